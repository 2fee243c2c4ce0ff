"""Suggests members to combine, from their answers alone, before any ensemble runs.

An ensemble can gain where another member is right and the best one is wrong. It loses where others outvote a best
member that is right. Both are counted for each pair and trio. The prediction is a rule of thumb for ranking sets of
members: the mean of the members, weighted by their votes, plus a share (`WON`) of the best answer's points above it.
Answers that are right by guessing do not count as the best answer, because a vote cannot recognise them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specfuse_shared.comparing.intervals import Interval, difference
from specfuse_shared.comparing.verdict import FAR, FEWEST_ROWS

LARGEST = 3
"""Maximum number of members in a set."""
MAX_LISTED = 20
"""Maximum number of reported sets."""
WON = 1 / 3
"""The predicted gain, as a share of the best answer's points above the weighted mean of all answers. Of two members
with equal votes of which one is right, the right one is then followed in two of three cases."""


@dataclass(frozen=True, slots=True)
class Beforehand:
    """Facts about members and questions that are known before they answer.

    Attributes:
        votes: Member → first weight of its vote; equal if empty.
        guessed: For each question, the mean points of a blind guess (100 ÷ number of choices); 0 if it cannot be
            guessed. Empty if no question can.
    """

    votes: Mapping[str, float] = field(default_factory=dict)
    guessed: Sequence[float] = ()


_NOTHING = Beforehand()


@dataclass(frozen=True, slots=True)
class Combination:
    """A pair or trio of members, with statistics of their answers alone, in points.

    `best`: the best of them. `gap`: the worst member's distance to it. `added`: the advantage of the best answer to
    each question over `best` (of right and wrong answers: how often only others are right). `contradicted`: the
    others' distance to `best` where it is better (how often they contradict it when it is right). `predicted`: the
    predicted difference of their ensemble to `best`, and `to_best` to the best of all members. The intervals cover
    the choice of questions; they do not cover errors of the rule.
    """

    members: tuple[str, ...]
    best: str
    gap: Interval
    added: Interval
    contradicted: Interval
    predicted: Interval
    to_best: Interval

    @property
    def is_far(self) -> bool:
        """Whether the members are so far apart that no gain has been published."""
        return self.gap.mean > FAR

    def to_dict(self) -> dict[str, Any]:
        """The statistics as plain JSON.

        Returns:
            The members, the best one, and each interval.

        Example:
            ```python
            from specfuse_shared.comparing import suggest

            asked = [{"text": "Name the capital of France.", "references": ["Paris"]}]
            suggestion = suggest("demo", asked, run="run.jsonl", max_tokens=8, timed=0)
            print(suggestion.combinations[0].to_dict()["members"])
            ```
        """
        names = ("gap", "added", "contradicted", "predicted", "to_best")
        intervals = {name: getattr(self, name).to_dict() for name in names}
        return {"members": list(self.members), "best": self.best, **intervals}


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Recommended combinations. `means`: member → points. `combinations`: the most promising first. `rows`: questions
    with references that all members answered. `sets`: number of evaluated sets. `remarks`: exclusions and their
    reasons."""

    rows: int
    means: Mapping[str, float]
    combinations: tuple[Combination, ...]
    sets: int
    remarks: tuple[str, ...] = ()

    @property
    def best(self) -> str:
        """The best member."""
        return max(self.means, key=lambda name: self.means[name])

    @property
    def recommended(self) -> Combination | None:
        """The most promising set, if it is predicted to be better than the best member."""
        first = self.combinations[0]
        return first if first.to_best.above and self.rows >= FEWEST_ROWS else None

    @property
    def headline(self) -> str:
        """The recommendation in a sentence."""
        first, names = self.combinations[0], " + ".join(self.combinations[0].members)
        prediction = f"{first.to_best} points to {self.best} alone are predicted, on {self.rows} questions"
        if self.rows < FEWEST_ROWS:
            return f"Too few questions to say: for {names}, {prediction}; at least {FEWEST_ROWS} are needed."
        if self.recommended is not None:
            return f"Try {names}: {prediction}."
        if first.to_best.mean > 0:
            return f"These questions cannot show whether {names} are worth a try: {prediction}."
        return f"Use {self.best} alone: for the most promising ensemble, {names}, {prediction}."

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sets whose members are far apart."""
        return tuple(
            f"{' + '.join(each.members)}: members are {each.gap.mean:.1f} points apart; published ensembles lost "
            f"beyond {FAR:.0f}"
            for each in self.combinations
            if each.is_far
        )

    def to_dict(self) -> dict[str, Any]:
        """The recommendation and its statistics as plain JSON.

        Returns:
            The recommended members or None, their means, and all combinations.

        Example:
            ```python
            from specfuse_shared.comparing import suggest

            asked = [{"text": "Name the capital of France.", "references": ["Paris"]}]
            print(suggest("demo", asked, run="run.jsonl", max_tokens=8, timed=0).to_dict()["recommended"])
            ```
        """
        recommended = self.recommended
        return {
            "headline": self.headline,
            "rows": self.rows,
            "sets": self.sets,
            "means": dict(self.means),
            "best": self.best,
            "recommended": None if recommended is None else list(recommended.members),
            "combinations": [each.to_dict() for each in self.combinations],
            "warnings": list(self.warnings),
            "remarks": list(self.remarks),
        }


def suggestion_of(
    points: Mapping[str, Sequence[float]], remarks: Sequence[str] = (), beforehand: Beforehand = _NOTHING
) -> Suggestion:
    """The suggestion, from each member's points per question."""
    means = {name: float(np.mean(each)) for name, each in points.items()}
    best = points[max(means, key=lambda name: means[name])]
    sizes = range(2, min(LARGEST, len(points)) + 1)
    sets = [{name: points[name] for name in names} for size in sizes for names in combinations(points, size)]
    sets.sort(key=lambda each: -float(_predicted(each, beforehand).mean()))
    listed = tuple(combination_of(each, best, beforehand) for each in sets[:MAX_LISTED])
    return Suggestion(len(best), means, listed, len(sets), tuple(remarks))


def combination_of(
    points: Mapping[str, Sequence[float]],
    best_of_all: Sequence[float] | None = None,
    beforehand: Beforehand = _NOTHING,
) -> Combination:
    """The combination, from each member's points per question. `best_of_all`: the points of the best of all members."""
    together, names = _together(points), list(points)
    order = np.argsort(-together.mean(axis=1), kind="stable")
    best, worst, predicted = together[order[0]], together[order[-1]], _predicted(points, beforehand)
    below = np.maximum(0.0, best - together[order[1:]]).mean(axis=0)
    return Combination(
        tuple(names),
        names[order[0]],
        gap=_difference(best, worst),
        added=_difference(together.max(axis=0), best),
        contradicted=_difference(below, np.zeros_like(below)),
        predicted=_difference(predicted, best),
        to_best=_difference(predicted, best if best_of_all is None else np.asarray(best_of_all, dtype=float)),
    )


def _together(points: Mapping[str, Sequence[float]]) -> NDArray[np.float64]:
    """Points (members, questions)."""
    return np.asarray(list(points.values()), dtype=float)


def _predicted(points: Mapping[str, Sequence[float]], beforehand: Beforehand) -> NDArray[np.float64]:
    """Points of the ensemble, question by question."""
    together = _together(points)
    votes = np.asarray([beforehand.votes.get(name, 1.0) for name in points])
    mean = (votes / votes.sum()) @ together
    above = np.maximum(0.0, together - mean) * _known(together, beforehand.guessed)
    return np.asarray(mean + WON * above.max(axis=0))


def _known(together: NDArray[np.float64], guessed: Sequence[float]) -> NDArray[np.float64]:
    """The share (members, questions) of each member's points that it knows rather than guesses.

    If a guess has g points, a member that knows a share k of the answers has k + (1 - k) · g points. Of these, k are
    known.
    """
    share = np.ones_like(together)
    for chance in {each for each in guessed if each}:
        rows = np.asarray(guessed) == chance
        had = together[:, rows].mean(axis=1)
        known = np.maximum(0.0, had - chance) / (100.0 - chance) * 100.0
        share[:, rows] = (known / np.maximum(had, 1e-9))[:, None]
    return share


def _difference(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> Interval:
    return difference(ours.tolist(), theirs.tolist())
