"""The tables of the quality benchmark: means, paired differences, and how small a difference the rows can show."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from metrics import Encode, coherence, cosines, repeated_share, says_a_line_thrice
from quality_rows import read_answers
from rich.console import Console
from rich.table import Table
from variants import VARIANTS

from specfuse_shared.comparing import Question
from specfuse_shared.comparing.intervals import POWER
from specfuse_shared.comparing.metrics import is_looping, score
from specfuse_shared.comparing.scores import cost_of


def measured(
    name: str, asked: Sequence[Question], encode: Encode | None = None, hanging: bool = False
) -> dict[str, Any] | None:
    """Each column's single scores and mean, and how the answers were made; None where answers are missing.

    A column is a set of rows and a metric. `encode` is needed for cosines and for `hanging` (coherence).
    """
    answers = read_answers(name)
    if any(row.id not in answers for row in asked):
        return None
    found: dict[str, Any] = {"columns": {}, "sets": {}}
    for task in dict.fromkeys(row.group for row in asked):
        rows = [row for row in asked if row.group == task]
        texts = [answers[row.id].text for row in rows]
        for metric, each in _scores(rows, texts, encode).items():
            found["columns"][f"{task}: {metric}"] = {"each": each, "mean": statistics.mean(each)}
        found["sets"][task] = _habits(rows, texts)
    made = [answers[row.id] for row in asked]
    if hanging:
        assert encode is not None, "coherence needs an encoder"
        told = (coherence(row.prompt, answers[row.id].text, encode) for row in asked)
        found["coherence"] = [one for one in told if one]
    found["active"] = sum(a.active * a.rounds for a in made) / max(1, sum(a.rounds for a in made))
    found["rounds"] = statistics.mean(a.rounds for a in made)
    return {**found, "cost": cost_of({row.id: answers[row.id] for row in asked}, 0)}


def _scores(rows: Sequence[Question], texts: Sequence[str], encode: Encode | None) -> dict[str, list[float]]:
    """Metric → the score of each row, of one set."""
    single = [score(row, text) for row, text in zip(rows, texts, strict=True)]
    found = {metric: [one[metric] for one in single] for metric in single[0]}
    if rows[0].group == "open":
        assert encode is not None, "cosines need an encoder"
        found["cosine"] = cosines([row.references for row in rows], texts, encode)
    return found


def _habits(rows: Sequence[Question], texts: Sequence[str]) -> dict[str, Any]:
    """How the answers of one set read."""
    keyed = list(zip((row.id for row in rows), texts, strict=True))
    return {
        "words": statistics.mean(len(text.split()) for text in texts),
        "circles": 100 * statistics.mean(is_looping(text) for text in texts),
        "repeated": 100 * statistics.mean(repeated_share(text) for text in texts),
        "thrice": [key for key, text in keyed if says_a_line_thrice(text)],
    }


Rivals = Mapping[str, Mapping[str, str]]
"""Column → variant → the variant that it is compared with there."""


def rivals_of(whole: Mapping[str, Any], against: str) -> Rivals:
    """`best`: the best of a variant's own members."""
    columns = next(iter(whole.values()))["columns"]
    if against != "best":
        return {column: dict.fromkeys(whole, against) for column in columns}

    def best(name: str, column: str) -> str:
        bars = [bar for bar in VARIANTS[name].bars if bar in whole]
        return max(bars, key=lambda bar: whole[bar]["columns"][column]["mean"])

    return {column: {name: best(name, column) for name in whole} for column in columns}


def seen(whole: Mapping[str, Any], rivals: Rivals) -> list[str]:
    """For each column how small a difference its rows can show, in the middle over the ensembles of the table."""
    lines = []
    for column, of in rivals.items():
        told = [
            facts["columns"][column] for name, facts in whole.items() if name not in (*VARIANTS[name].bars, of[name])
        ]
        spread = [one["difference"].least_seen for one in told if one["difference"].least_seen > 0]
        if spread:
            count, least = len(told[0]["each"]), statistics.median(spread)
            lines.append(f"{column}, {count} rows: differences below {least:.1f} cannot be seen ({POWER:.0%} power).")
    return lines


def show(whole: Mapping[str, Any], rivals: Rivals, title: str, plain: bool) -> None:
    """On the terminal, or as Markdown; without the columns of what was not measured."""
    rows = [_cells(name, whole, rivals) for name in whole]
    columns = [column for column in rows[0] if any(cells[column] for cells in rows)]
    if plain:
        for cells in (columns, ["---"] * len(columns), *([row[c] for c in columns] for row in rows)):
            print("| " + " | ".join(cells) + " |")
        print()
        return
    printed = Table(*columns, title=title)
    for row in rows:
        printed.add_row(*(row[c] for c in columns))
    Console(width=240).print(printed)


def loudest(whole: Mapping[str, Any]) -> list[str]:
    """How many answers say a line three times, where any do."""
    return [
        f"{name}: {len(habits['thrice'])} {task} answers say a line thrice"
        for name, facts in whole.items()
        for task, habits in facts["sets"].items()
        if habits["thrice"]
    ]


def _cells(name: str, whole: Mapping[str, Any], rivals: Rivals) -> dict[str, str]:
    """Column → text, empty where it was not measured."""
    facts = whole[name]

    def compared(column: str) -> str:
        d = facts["columns"][column]["difference"]
        gap = "" if d.low == d.high == 0 else f" {d}"
        return f"{facts['columns'][column]['mean']:.1f}{gap}"

    def listed(habit: str) -> str:
        return ", ".join(f"{habits[habit]:.0f}" for habits in facts["sets"].values())

    cost, hanging = facts["cost"], facts.get("coherence")
    return {
        "variant": name,
        **{f"{column} (to {_told(of)})": compared(column) for column, of in rivals.items()},
        "words": listed("words"),
        "words ÷ members'": _ratios(name, whole),
        "circles %": listed("circles"),
        "repeated %": listed("repeated"),
        "rounds": f"{facts['rounds']:.1f}",
        "active": f"{facts['active']:.2f}",
        "neighbours": _mean(hanging, "neighbours"),
        "on topic": _mean(hanging, "on_topic"),
        "first segment": f"{cost.first_seconds:.2f} s" if cost.timed else "",
        "tokens/s": f"{cost.tokens_per_second:.1f}" if cost.timed else "",
    }


def _told(of: Mapping[str, str]) -> str:
    """Whom a column's variants are compared with, where it is the same one for all."""
    return next(iter(of.values())) if len(set(of.values())) == 1 else "their best member"


def _ratios(name: str, whole: Mapping[str, Any]) -> str:
    """Words an answer, by the mean of those of the ensemble's members alone; empty where one was not asked."""
    alone = VARIANTS[name].alone
    if name in alone or any(member not in whole for member in alone):
        return ""
    means = {task: statistics.mean(whole[m]["sets"][task]["words"] for m in alone) for task in whole[name]["sets"]}
    return ", ".join(f"{h['words'] / max(1.0, means[task]):.2f}" for task, h in whole[name]["sets"].items())


def _mean(found: Sequence[Mapping[str, float]] | None, key: str) -> str:
    """With how many answers it is a mean of."""
    return f"{statistics.mean(one[key] for one in found):.0f} ({len(found)})" if found else ""


_PANELS = 4
"""Beside each other; more go below."""


def plot(whole: Mapping[str, Any], rivals: Rivals, file: Path) -> None:
    """Differences to the rival with their intervals, a panel for each column."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(whole)
    across = min(_PANELS, len(rivals))
    down = -(-len(rivals) // across)
    size = (3.0 * across, down * (0.8 + 0.34 * len(names)))
    figure, grid = pyplot.subplots(down, across, figsize=size, sharey=True, squeeze=False)
    for panel in grid.flat[len(rivals) :]:
        panel.set_visible(False)
    for panel, (column, of) in zip(grid.flat, rivals.items(), strict=False):
        gaps = [whole[name]["columns"][column]["difference"] for name in names]
        means = [g.mean for g in gaps]
        spread = [[g.mean - g.low for g in gaps], [g.high - g.mean for g in gaps]]
        colours = ["#8a8f98" if name in VARIANTS[name].bars else "#0b6e99" for name in names]
        panel.axvline(0, color="#444", linewidth=0.8)
        panel.errorbar(means, range(len(names)), xerr=spread, fmt="none", ecolor=colours, elinewidth=2)
        panel.scatter(means, range(len(names)), color=colours, zorder=3)
        panel.set_title(f"{column}\nagainst {_told(of)}", fontsize=9)
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    grid[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
