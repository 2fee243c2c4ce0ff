"""Scores of the answers: a column for each group of questions and metric, with differences to the best member."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from types import MappingProxyType

from specfuse_shared.comparing.intervals import Interval, difference
from specfuse_shared.comparing.metrics import agreement, is_looping, score
from specfuse_shared.comparing.questions import Question
from specfuse_shared.comparing.run.run_file import Answer

ALL = "all"
"""The column of all questions, each with its main metric."""


@dataclass(frozen=True, slots=True)
class Column:
    """Scores (0 to 100) of one group and metric on the same `rows`, and differences to the best member."""

    group: str
    metric: str
    rows: tuple[str, ...]
    points: Mapping[str, tuple[float, ...]]
    best: str
    differences: Mapping[str, Interval] = field(default_factory=dict)

    @property
    def means(self) -> dict[str, float]:
        return {name: statistics.mean(each) for name, each in self.points.items()}

    def between(self, ours: str, theirs: str) -> Interval:
        """The difference between two systems.

        Args:
            ours: Name of a system.
            theirs: Name of the system that is subtracted.

        Returns:
            The mean difference in points, with its 95 % interval.

        Example:
            ```python
            from specfuse_shared.comparing import ENSEMBLE, compare

            asked = [{"text": "Name the capital of France.", "references": ["Paris"]}]
            comparison = compare("demo", asked, run="run.jsonl", max_tokens=8, timed=0)
            column = next(iter(comparison.columns.values()))
            print(column.between(ENSEMBLE, column.best))
            ```
        """
        return difference(self.points[ours], self.points[theirs])


@dataclass(frozen=True, slots=True)
class Habits:
    """Properties of a system's answers: mean `words`, per cent that loop (`looping`), per cent `cut` by
    `max_tokens`."""

    words: float
    looping: float
    cut: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over answers that ran alone: seconds, seconds to the first words, tokens per second; None if not timed.

    `forwards_per_token`, and `forwards` and `flop` of an answer: over all answers. `flop`: 2 · parameters · tokens that
    went through each model, the prompt's included; None if a size is unknown. `weight_bytes`: 0 if unknown.
    """

    timed: int
    seconds: float | None
    first_seconds: float | None
    tokens_per_second: float | None
    forwards_per_token: float | None
    weight_bytes: int
    forwards: float | None = None
    flop: float | None = None


def columns_of(
    questions: Sequence[Question], answers: Mapping[str, Mapping[str, Answer]], members: Sequence[str]
) -> dict[str, Column]:
    """Name → column; the first covers all questions that can be scored. Rows are questions that all systems
    answered."""
    scored = {
        q.id: {name: score(q, of_question[q.id].text) for name, of_question in answers.items()}
        for q in questions
        if q.scored
    }
    points: dict[tuple[str, str], dict[str, dict[str, float]]] = defaultdict(dict)
    for question in (q for q in questions if q.scored):
        each = scored[question.id]
        metrics = list(next(iter(each.values())))
        points[ALL, ""][question.id] = {name: points_of[metrics[0]] for name, points_of in each.items()}
        for metric in metrics:
            group = question.group or ""
            points[group, metric][question.id] = {name: points_of[metric] for name, points_of in each.items()}
    return {f"{g}: {m}" if m else g: _column(g, m, rows, members) for (g, m), rows in points.items()}


def mains_of(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Group → the column of its main metric."""
    mains: dict[str, Column] = {}
    for column in columns.values():
        if column.metric:
            mains.setdefault(column.group, column)
    return mains


def _column(group: str, metric: str, rows: Mapping[str, Mapping[str, float]], members: Sequence[str]) -> Column:
    names = list(next(iter(rows.values())))
    points = {name: tuple(each[name] for each in rows.values()) for name in names}
    best = max(members, key=lambda name: statistics.mean(points[name]))
    gaps = {name: difference(points[name], points[best]) for name in names if name != best}
    return Column(group, metric, tuple(rows), points, best, gaps)


def habits_of(answers: Mapping[str, Answer]) -> Habits:
    texts = [answer.text for answer in answers.values()]
    return Habits(
        words=statistics.mean(len(text.split()) for text in texts),
        looping=100 * statistics.mean(is_looping(text) for text in texts),
        cut=100 * statistics.mean(answer.finish == "length" for answer in answers.values()),
    )


def cost_of(answers: Mapping[str, Answer], weight_bytes: int, sizes: Mapping[str, int] = MappingProxyType({})) -> Cost:
    """`sizes`: member → parameters."""
    alone = [answer for answer in answers.values() if answer.alone]
    tokens = sum(answer.tokens for answer in answers.values())
    forwards = sum(answer.forwards for answer in answers.values())
    flop = [flop_of(answer, sizes) for answer in answers.values()]
    return Cost(
        timed=len(alone),
        seconds=statistics.median(a.seconds for a in alone) if alone else None,
        first_seconds=statistics.median(a.first_seconds for a in alone) if alone else None,
        tokens_per_second=statistics.median(a.tokens / max(a.seconds, 1e-9) for a in alone) if alone else None,
        forwards_per_token=forwards / tokens if tokens and forwards else None,
        weight_bytes=weight_bytes,
        forwards=forwards / len(answers) if forwards else None,
        flop=statistics.mean(each for each in flop if each) if all(flop) else None,
    )


def flop_of(answer: Answer, sizes: Mapping[str, int]) -> float | None:
    """Cost of an answer's matrix products: 2 · parameters · tokens. None if unknown.

    A prompt counts once per model, even if it was in a cache.
    """
    if not answer.work or not all(sizes.get(name) for name, _, _ in answer.work):
        return None
    return 2.0 * sum(sizes[name] * (prompt + fed) for name, prompt, fed in answer.work)


def flop_text(value: float | None) -> str:
    """The number with a suitable unit."""
    if value is None:
        return "–"
    units = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"))
    size, unit = next((each for each in units if value >= each[0]), (1e6, "MFLOP"))
    return f"{value / size:.3g} {unit}"


def agreement_of(answers: Mapping[str, Mapping[str, Answer]], members: Sequence[str]) -> dict[str, float]:
    """Question → overlap of the members' answers, the mean of all pairs, 0 to 100."""
    if len(members) < 2:
        return {}
    rows = answers[members[0]]
    pairs = list(combinations(members, 2))
    return {
        row: statistics.mean(agreement(answers[one][row].text, answers[two][row].text) for one, two in pairs)
        for row in rows
    }
