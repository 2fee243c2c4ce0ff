"""What the benchmarks report: ratios with their bounds, as a table and as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Figure:
    """`ratio` of two measurements; `target` is the most it should be (the least where `at_least`)."""

    name: str
    ratio: float
    target: float
    at_least: bool
    detail: str

    @property
    def met(self) -> bool:
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target


def report(title: str, figures: Sequence[Figure], file: Path, facts: Sequence[tuple[str, str]] = ()) -> None:
    """Print the figures and the facts beside them, and write them with what they were measured on."""
    write(figures, file, facts)
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:  # on a lent card
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
    found = {"figures": [{**asdict(f), "met": f.met} for f in figures], "facts": dict(facts), **machine}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def markdown(figures: Sequence[Figure]) -> str:
    """The figures as a table of the documentation."""
    lines = ["| measured | ratio | aim | from |", "| --- | --- | --- | --- |"]
    for f in figures:
        missed = "" if f.met else ", missed"
        lines.append(f"| {f.name} | {f.ratio:.2f}{missed} | {'≥' if f.at_least else '≤'} {f.target:g} | {f.detail} |")
    return "\n".join(lines)
