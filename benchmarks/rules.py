"""Rules of an election that were tried beside the default's: for `elections.py` and, as policies, for `variants.py`."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specfuse_shared.policies import CandidateLogprobs, Matrix, Stretch, weighted_mean


@dataclass(frozen=True, slots=True)
class Override:
    """Votes for what verifier `lead` drafted count `times` as much: others win only where they are surer by that."""

    lead: int
    times: float

    def __call__(self, scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
        votes = weighted_mean(scores, weights, drafters)
        return [
            vote * (self.times if self.lead in authors else 1.0) for vote, authors in zip(votes, drafters, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Lottery:
    """The control: one verifier, drawn by weight, has what it drafted. The same votes always draw the same one."""

    seed: int = 0

    def __call__(self, scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
        lot = random.Random(repr((self.seed, scores)))
        drawn = lot.choices(range(len(weights)), weights)[0]
        return [float(drawn in authors) for authors in drafters]


@dataclass(frozen=True, slots=True)
class StretchWithoutEnd:
    """Equal stretches in which the end of the turn is no event: what ends is compared by its text alone."""

    def __call__(self, candidates: Sequence[CandidateLogprobs]) -> list[float]:
        return Stretch()([_endless(candidate) for candidate in candidates])


def _endless(candidate: CandidateLogprobs) -> CandidateLogprobs:
    if not candidate.ends or len(candidate.logprobs) < 2:
        return candidate
    return replace(candidate, ends=False, logprobs=candidate.logprobs[:-1], token_bytes=candidate.token_bytes[:-1])


def mean_probability(candidate: CandidateLogprobs) -> float:
    """Of a token of it; 0 for one without log-probabilities."""
    return math.fsum(map(math.exp, candidate.logprobs)) / max(1, len(candidate.logprobs))
