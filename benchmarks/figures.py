"""Results of benchmarks: ratios with their bounds, the table of a step, and figures of this process."""

from __future__ import annotations

import json
import platform
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Figure:
    """The `ratio` of two measurements; `target` is its upper bound, or its lower bound with `at_least`."""

    name: str
    ratio: float
    target: float
    at_least: bool
    detail: str

    @property
    def met(self) -> bool:
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target


def report(title: str, figures: Sequence[Figure], file: Path, facts: Sequence[tuple[str, str]] = ()) -> None:
    """Print the figures and facts, and write them with facts about the machine."""
    write(figures, file, facts)
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:  # on a bare GPU machine
        print(title, markdown(figures), *(f"{name}: {value}" for name, value in facts), sep="\n")
        return
    table = Table(title=f"{title}, {torch.get_num_threads()} threads of {platform.machine()}")
    for column in ("figure", "ratio", "target", "met", "from"):
        table.add_column(column)
    for f in figures:
        bound = f"{'≥' if f.at_least else '≤'} {f.target:g}"
        table.add_row(f.name, f"{f.ratio:.2f}", bound, "yes" if f.met else "no", f.detail)
    console = Console(width=120)
    console.print(table)
    for name, value in facts:
        console.print(f"{name}: {value}", highlight=False)


def write(figures: Sequence[Figure], file: Path, facts: Sequence[tuple[str, str]] = ()) -> None:
    """Figures and facts as JSON."""
    machine = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    content = {"figures": [{**asdict(f), "met": f.met} for f in figures], "facts": dict(facts), **machine}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def markdown(figures: Sequence[Figure]) -> str:
    """The figures as a table of the documentation."""
    lines = ["| measured | ratio | aim | from |", "| --- | --- | --- | --- |"]
    for f in figures:
        missed = "" if f.met else ", missed"
        lines.append(f"| {f.name} | {f.ratio:.2f}{missed} | {'≥' if f.at_least else '≤'} {f.target:g} | {f.detail} |")
    return "\n".join(lines)


@dataclass
class Sheet:
    """The results of step `name`, in files of `folder`; `lacking`: parts left out, with the missing requirements."""

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

    def add(self, what: str, value: object, note: str = "") -> None:
        self.lines.append({"what": what, "found": str(value), "note": note})
        print(f"    {what}: {value}{f' ({note})' if note else ''}", flush=True)
        self.write()

    def lacks(self, what: str) -> None:
        self.lacking.append(what)
        print(f"    left out: {what}", flush=True)
        self.write()

    def end(self, status: str) -> None:
        self.status = status
        self.write()

    def write(self) -> None:
        content: dict[str, Any] = {name: value for name, value in vars(self).items() if name not in ("folder", "began")}
        content["seconds"] = round(time.time() - self.began, 1)
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = self.file.with_suffix(".part")
        whole.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
        whole.replace(self.file)  # a killed step leaves no partial file
        self.file.with_suffix(".md").write_text(self.table(), "utf-8")

    def table(self) -> str:
        rows = ["| what | found | note |", "| --- | --- | --- |"]
        rows += [f"| {line['what']} | {_cell(line['found'])} | {_cell(line['note'])} |" for line in self.lines]
        rows += [f"| left out | {_cell(what)} | |" for what in self.lacking]
        return f"## {self.title}\n\n{self.status}\n\n" + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def read_sheet(file: Path) -> dict[str, Any] | None:
    """The content of a sheet's file; None if there is no file."""
    if not file.exists():
        return None
    content: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return content


def shortened(text: str, words: int) -> str:
    """The text's first words, with an ellipsis if it is longer."""
    ends = [word.end() for word in re.finditer(r"\S+", text)]
    return text if len(ends) <= words else f"{text[: ends[words - 1]]} …"


def peak_bytes() -> int:
    """The maximum memory of this process so far."""
    import psutil

    memory = psutil.Process().memory_info()
    if (peak := getattr(memory, "peak_wset", None)) is not None:  # Windows
        return int(peak)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
