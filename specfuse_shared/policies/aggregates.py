"""Aggregates: all verifiers' scores become one vote on each candidate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specfuse_shared.policies.protocols import Matrix


def weighted_mean(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """S_i = Σ_j w_j s_ji (the papers')."""
    return [math.fsum(w * row[i] for w, row in zip(weights, scores, strict=True)) for i in range(len(scores[0]))]


SECOND = 1000.0
"""A candidate is implausible to a verifier that finds it less than 1/`SECOND` as likely as another one."""
MOST = 0.5
"""A member with more of the votes than this outvotes all others together."""


@dataclass(frozen=True, slots=True)
class SecondedMean:
    """The weighted mean, in which, among three or more members, a candidate of one member needs a second.

    Its author's vote counts at most `SECOND` times the highest other vote. So a member that is sure of its own nonsense
    cannot carry it, and votes for what another member finds plausible stay as they are. The `outsiders` neither stand
    nor vote. None of this holds for a member with most of the votes: weak ones do not know what it knows.
    """

    def __call__(self, scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
        def counted(j: int, i: int) -> float:
            if len(scores) < 3 or list(drafters[i]) != [j] or weights[j] > MOST:
                return scores[j][i]
            second = max(row[i] for k, row in enumerate(scores) if k != j)
            return min(scores[j][i], SECOND * second)

        return weighted_mean(
            [[counted(j, i) for i in range(len(row))] for j, row in enumerate(scores)], weights, drafters
        )

    def outsiders(self, scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[int]:
        """Verifiers that find only their own draft plausible, while no other verifier does; none if this holds for
        all."""
        heard = [
            (j, i)
            for j, row in enumerate(scores)
            for i, score in enumerate(row)
            if list(drafters[i]) != [j] and SECOND * score >= max(row)
        ]
        insiders = {j for j, _ in heard} | {drafters[i][0] for _, i in heard if len(drafters[i]) == 1}
        insiders |= {j for j, weight in enumerate(weights) if weight > MOST} if insiders else set()
        return [j for j in range(len(scores)) if j not in insiders] if insiders else []


def geometric_mean(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """S_i = Π_j s_ji^w_j: a candidate that one verifier finds impossible cannot win.

    With equal weights this also ranks by regret: how much lower each verifier scores a candidate than its own.
    """

    def mean(i: int) -> float:
        if any(row[i] <= 0 for row in scores):
            return 0.0
        return math.exp(math.fsum(w * math.log(row[i]) for w, row in zip(weights, scores, strict=True)))

    return [mean(i) for i in range(len(scores[0]))]
