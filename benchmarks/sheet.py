"""What one step of a longer measurement found: written after every line, as JSON and as a table."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Sheet:
    """Lines of `name` in `folder`; `lacking`: what was missing, and what of the step was left out for that."""

    folder: Path
    name: str
    title: str
    tiny: bool
    status: str = "running"
    lines: list[dict[str, str]] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.time)

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.json"

    def add(self, what: str, found: object, note: str = "") -> None:
        self.lines.append({"what": what, "found": str(found), "note": note})
        print(f"    {what}: {found}{f' ({note})' if note else ''}", flush=True)
        self.write()

    def lacks(self, what: str) -> None:
        self.lacking.append(what)
        print(f"    left out: {what}", flush=True)
        self.write()

    def end(self, status: str) -> None:
        self.status = status
        self.write()

    def write(self) -> None:
        found: dict[str, Any] = {name: value for name, value in vars(self).items() if name not in ("folder", "began")}
        found["seconds"] = round(time.time() - self.began, 1)
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = self.file.with_suffix(".part")
        whole.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
        whole.replace(self.file)  # a step that is killed leaves no half of a file
        self.file.with_suffix(".md").write_text(self.table(), "utf-8")

    def table(self) -> str:
        rows = ["| what | found | note |", "| --- | --- | --- |"]
        rows += [f"| {line['what']} | {_cell(line['found'])} | {_cell(line['note'])} |" for line in self.lines]
        rows += [f"| left out | {_cell(what)} | |" for what in self.lacking]
        return f"## {self.title}\n\n{self.status}\n\n" + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def read(file: Path) -> dict[str, Any] | None:
    """A sheet as it was written last; None if there is none."""
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found
