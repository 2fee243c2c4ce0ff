"""Reciting members: real Llama models of a few thousand weights that produce a given text."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.reciting import reciting_model, reciting_tokenizer


@pytest.fixture(scope="session")
def recite(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`recite(name, speech)` → folder of a member that answers everything with the speech (no word twice)."""
    folder = tmp_path_factory.mktemp("members")

    def make(name: str, speech: str, certainty: float = 9.0, endless: bool = False) -> str:
        path: Path = folder / f"{zlib.crc32(repr((speech, certainty, endless)).encode()):x}" / name
        if not path.exists():
            tokenizer = reciting_tokenizer(speech)
            reciting_model(tokenizer, speech, certainty, endless).save_pretrained(path)
            tokenizer.save_pretrained(path)
        return str(path)

    return make
