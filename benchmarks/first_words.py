"""How soon the first words of a lone answer come, by when its first segment is decided.

    python benchmarks/first_words.py --data DIR [--rows N] [--tokens N] [--member PATH]…

The demo's pair and the given members answer open questions and passages, one at a time, in turns: with the defaults,
with first segments that are compared at their end only (`early_margin=0`), and with `preset("fast")`. Printed for each
kind: median seconds to the first words and to the end, their ratio to "fast" over the same questions, and forward
passes of all members.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from quality_rows import read_rows
from rich.console import Console
from rich.table import Table

from specfuse_shared import EnsembleConfig, EnsembleEngine, EnsembleResult, MemberConfig, SamplingParams, demo_members

SETTINGS: Mapping[str, Mapping[str, float]] = {"the default": {}, "early_margin = 0": {"early_margin": 0}, "fast": {}}


def main(
    data: Annotated[Path, typer.Option(help="folder of JSONL files")],
    rows: Annotated[int, typer.Option(help="at most this many of each kind")] = 12,
    tokens: Annotated[int, typer.Option(help="most tokens of an answer")] = 48,
    member: Annotated[list[str], typer.Option(help="a further member")] = [],  # noqa: B006
) -> None:
    console = Console(width=110)
    members = [*demo_members(), *(MemberConfig(name) for name in member)]
    engines = {
        name: EnsembleEngine(EnsembleConfig.preset("fast" if name == "fast" else "default", members, **settings)).load()
        for name, settings in SETTINGS.items()
    }
    for kind in ("open", "rag"):
        prompts = [question.prompt for question in read_rows(data, [kind], "choose", rows)]
        params = SamplingParams(max_tokens=tokens)
        for engine in engines.values():
            engine.generate(prompts[-1], params)
        found: dict[str, list[EnsembleResult]] = {name: [] for name in engines}
        for prompt in prompts:
            for name, engine in engines.items():
                found[name].append(engine.generate(prompt, params))
        console.print(_table(kind, found))
    for engine in engines.values():
        engine.close()


def _table(kind: str, found: Mapping[str, Sequence[EnsembleResult]]) -> Table:
    table = Table(title=f"{kind}: {len(found['fast'])} answers, one at a time", title_justify="left")
    for head in ("setting", "first words", "÷ fast", "whole answer", "÷ fast", "forwards"):
        table.add_column(head)
    for name, results in found.items():
        first, whole = _seconds(results)
        fast_first, fast_whole = _seconds(found["fast"])
        forwards = statistics.mean(sum(usage.forwards for usage in result.usage.members.values()) for result in results)
        table.add_row(
            name,
            f"{statistics.median(first):.2f} s",
            _ratio(first, fast_first),
            f"{statistics.median(whole):.2f} s",
            _ratio(whole, fast_whole),
            f"{forwards:.1f}",
        )
    return table


def _seconds(results: Sequence[EnsembleResult]) -> tuple[list[float], list[float]]:
    """To the first words, and to the end."""
    return [r.first_segment_seconds or r.total_seconds for r in results], [r.total_seconds for r in results]


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The median of each question's ratio."""
    return f"{statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.2f}"


if __name__ == "__main__":
    typer.run(main)
