"""Feedback: the verifiers' weights learn from a finished round (SpecEM)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specfuse_shared.policies.aggregates import SECOND
from specfuse_shared.policies.protocols import Matrix


def uniform(weights: Sequence[float], scores: Matrix, round_index: int) -> list[float]:
    """Weights keep their initial values (SpecFuse)."""
    return list(weights)


def rewards(scores: Matrix, second: float | None = None) -> list[float]:
    """r_i: share of pairwise comparisons that member i's candidate wins in the eyes of third parties; ties count ½.

    A comparison is (i, rival k, verifier j) with j ∉ {i, k}. With `second`, verifiers that find both candidates less
    than 1/`second` as likely as the one they like best have no opinion: they would compare noise. Where no third party
    is left, the rival judges against its own candidate.
    """
    n = len(scores)
    if n < 2:
        return [0.0] * n

    def judges(i: int, k: int) -> list[int]:
        third = [j for j in range(n) if j not in (i, k)]
        if second is not None:
            third = [j for j in third if second * max(scores[j][i], scores[j][k]) >= max(scores[j])]
        return third or [k]

    def share(i: int) -> float:
        duels = [(scores[j][i], scores[j][k]) for k in range(n) if k != i for j in judges(i, k)]
        return sum(1.0 if mine > theirs else 0.5 if mine == theirs else 0.0 for mine, theirs in duels) / len(duels)

    return [share(i) for i in range(n)]


@dataclass(frozen=True, slots=True)
class OnlineFeedback:
    """SpecEM: w_i ← w_i · exp(η_t r_i), normalised.

    Schedules: `constant` η_t = rate, `sqrt_decay` η_t = rate/√t, `paper` η_t = rate·√(1/n)/t. Other than in the paper,
    verifiers to which two candidates are unthinkable do not compare them.
    """

    schedule: Literal["constant", "sqrt_decay", "paper"] = "constant"
    rate: float = 0.5

    def eta(self, n: int, round_index: int) -> float:
        if self.schedule == "paper":
            return self.rate * math.sqrt(1 / n) / round_index
        return self.rate / math.sqrt(round_index) if self.schedule == "sqrt_decay" else self.rate

    def __call__(self, weights: Sequence[float], scores: Matrix, round_index: int) -> list[float]:
        eta = self.eta(len(weights), round_index)
        won = rewards(scores, None if self.schedule == "paper" else SECOND)
        return normalised([w * math.exp(eta * r) for w, r in zip(weights, won, strict=True)])


def normalised(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [w / total for w in weights]
