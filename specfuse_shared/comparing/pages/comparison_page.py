"""A comparison as one HTML file: the verdict first, then differences with intervals, numbers, and answers side by side.

It needs no network and no scripts: filters are radio buttons with CSS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from specfuse_shared.comparing.intervals import Interval
from specfuse_shared.comparing.metrics import LABELS, is_looping
from specfuse_shared.comparing.questions import Question
from specfuse_shared.comparing.run.asking import ENSEMBLE, Asker
from specfuse_shared.comparing.run.run_file import Answer
from specfuse_shared.comparing.scores import ALL, Column, flop_text
from specfuse_shared.comparing.verdict import FEWEST_ROWS
from specfuse_shared.report.html import COLOURS, LINES, environment

if TYPE_CHECKING:
    from specfuse_shared.comparing.comparison import Comparison

APART = 50.0
"""Below this per cent of shared words, members disagree."""
MOST_NAMED = 10
SCALE = 5
"""Points between two marks of the picture's axis."""
FILTERS = {
    "better": "the ensemble is better than the best member",
    "worse": "it is worse",
    "same": "no difference",
    "apart": "members disagree",
    "looping": "a repetitive answer",
}


@dataclass(frozen=True, slots=True)
class Mark:
    """The mark of a system: the number in the badge, and the colour and line."""

    name: str
    number: str
    css: str


@dataclass(frozen=True, slots=True)
class DifferenceBar:
    """A difference in the picture; places are per cent of its width."""

    name: str
    text: str
    start: float
    size: float
    middle: float


@dataclass(frozen=True, slots=True)
class Panel:
    """The differences of one column to its best member. `few`: too few rows for reliable intervals."""

    title: str
    best: str
    rows: int
    few: bool
    bars: Sequence[DifferenceBar]


@dataclass(frozen=True, slots=True)
class Row:
    """A question with all answers. `css`: classes for filters; `points`: by system, of the main metric."""

    question: Question
    number: int
    css: str
    answers: Mapping[str, Answer]
    points: Mapping[str, float]


def document(comparison: Comparison) -> str:
    """The report as a whole HTML file."""
    return environment(__package__).get_template("comparison.html").render(view(comparison))


def view(comparison: Comparison) -> dict[str, Any]:
    """Everything that the template shows."""
    rows = list(_rows(comparison))
    groups = list(dict.fromkeys(question.group for question in comparison.questions))
    limit = _limit(list(comparison.columns.values()))
    return {
        "comparison": comparison,
        "verdict": comparison.verdict,
        "members": marks_of(comparison.askers),
        "panels": [_panel(column, limit) for column in comparison.columns.values()],
        "limit": limit,
        "columns": {_title(column): column for column in comparison.columns.values()},
        "rows": rows,
        "groups": groups,
        "filters": {css: (text, sum(css in r.css.split() for r in rows)) for css, text in FILTERS.items()},
        "apart": _apart(comparison, rows),
        "ensemble": ENSEMBLE,
        "flop_text": flop_text,
    }


def marks_of(askers: Sequence[Asker]) -> dict[str, Mark]:
    """Members in the same colours as in every report; ensembles in the text's colour."""
    marks: dict[str, Mark] = {}
    for i, asker in enumerate(asker for asker in askers if asker.is_member):
        marks[asker.name] = Mark(asker.name, str(i + 1), f"m{i % COLOURS} l{i % LINES}")
    for asker in askers:
        if not asker.is_member:
            marks[asker.name] = Mark(asker.name, _sign(asker, marks), "whole l0")
    return {asker.name: marks[asker.name] for asker in askers}


def _sign(asker: Asker, marks: Mapping[str, Mark]) -> str:
    if asker.is_sampled:
        return "×n"
    without = marks.get(asker.without or "")
    return "Σ" if without is None else f"−{without.number}"


def _title(column: Column) -> str:
    return f"{column.group}, {LABELS[column.metric]}" if column.metric else "all questions"


# ── the picture ──────────────────────────────────────────────────────────────────────────────────


def _limit(columns: Sequence[Column]) -> int:
    """The end of the picture's axis, on both sides of zero: it holds all reliable intervals."""
    many = [column for column in columns if len(column.rows) >= FEWEST_ROWS] or list(columns)
    ends = [abs(end) for column in many for gap in column.differences.values() for end in _ends(gap)]
    return SCALE * max(1, ceil(max(ends, default=1.0) / SCALE))


def _ends(gap: Interval) -> tuple[float, float]:
    """Its ends, within the range of points."""
    return max(gap.low, -100.0), min(gap.high, 100.0)


def _panel(column: Column, limit: int) -> Panel:
    bars = []
    for who, gap in column.differences.items():
        low, high = _ends(gap)
        place = [min(100.0, max(0.0, 50 + 50 * value / limit)) for value in (low, high, gap.mean)]
        bars.append(DifferenceBar(who, str(gap), place[0], max(place[1] - place[0], 0.4), place[2]))
    return Panel(_title(column), column.best, len(column.rows), len(column.rows) < FEWEST_ROWS, bars)


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


def _rows(comparison: Comparison) -> Iterator[Row]:
    whole = comparison.columns.get(ALL)
    places = {name: n for n, name in enumerate(whole.rows)} if whole else {}
    groups = list(dict.fromkeys(question.group for question in comparison.questions))
    for number, question in enumerate(comparison.questions, 1):
        answers = {
            name: by_question[question.id]
            for name, by_question in comparison.answers.items()
            if question.id in by_question
        }
        points: dict[str, float] = {}
        if whole is not None and question.id in places:
            points = {name: each[places[question.id]] for name, each in whole.points.items()}
        css = [f"g{groups.index(question.group)}", *_kinds(comparison, question, answers, points)]
        yield Row(question, number, " ".join(css), answers, points)


def _kinds(
    comparison: Comparison, question: Question, answers: Mapping[str, Answer], points: Mapping[str, float]
) -> Iterator[str]:
    if points:
        gap = points[ENSEMBLE] - points[comparison.columns[ALL].best]
        yield "better" if gap > 0 else "worse" if gap < 0 else "same"
    if comparison.agreement.get(question.id, 100.0) < APART:
        yield "apart"
    if any(is_looping(answer.text) for answer in answers.values()):
        yield "looping"


def _apart(comparison: Comparison, rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """The questions on which members disagree most."""
    measured = [(row, comparison.agreement[row.question.id]) for row in rows if row.question.id in comparison.agreement]
    return sorted((pair for pair in measured if pair[1] < APART), key=lambda pair: pair[1])[:MOST_NAMED]
