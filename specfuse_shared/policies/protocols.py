"""The signatures of policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Matrix = Sequence[Sequence[float]]
"""`[j][i]`: what verifier j thinks of candidate i."""
ROUNDING = 0.3
"""Nats by which half precision may change a log-probability. A number further above 0 is not one, and two ways to
compute the same one differ by less."""


@dataclass(frozen=True, slots=True)
class CandidateLogprobs:
    """One candidate of a round in the eyes of one verifier, in that verifier's own tokens.

    `logprobs`: natural log p of each token. `token_bytes`: the number of UTF-8 bytes that each stands for (≥ 1). The
    tokens end where `text` ends; they may begin before it, in the answer, if encodings do not join there. For a
    candidate that `ends` the turn, the last entry of both is the end of turn. `call_bytes`: UTF-8 bytes at its
    beginning that open a tool call; 0 for text.
    """

    text: str
    ends: bool
    logprobs: Sequence[float]
    token_bytes: Sequence[int]
    call_bytes: int = 0

    @property
    def size(self) -> int:
        """UTF-8 bytes of the text."""
        return len(self.text.encode())


class ScorePolicy(Protocol):
    """Turns one verifier's log-probabilities of all candidates of a round into a score in [0, 1] for each."""

    def __call__(self, candidates: Sequence[CandidateLogprobs]) -> list[float]:
        """Gets at least one candidate, each with at least one token, no two with equal text and end.

        Called again in the same round for the candidates that are left, while there are two.
        """
        ...


class AggregatePolicy(Protocol):
    """Turns all verifiers' scores into one score per candidate."""

    def __call__(self, scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
        """`scores[j][i]` and `weights[j]` (Σ = 1) → S_i ≥ 0; the lowest leaves (`elect` has the rule for equals).

        `drafters[i]`: the verifiers that wrote candidate i. A policy can have a method
        `outsiders(scores, weights, drafters)`, which returns verifiers that, among three or more, neither stand nor
        vote in this round.
        """
        ...


class FeedbackPolicy(Protocol):
    """Learns the verifiers' weights from a finished round."""

    def __call__(self, weights: Sequence[float], scores: Matrix, round_index: int) -> list[float]:
        """`scores[j][i]`: verifier j on member i's candidate (n × n); rounds count from 1. Returns Σ = 1."""
        ...


@dataclass(frozen=True, slots=True)
class ExitDecision:
    """Retention probability of each active member, none where it decides nothing; the indices of those that leave."""

    retention: tuple[float, ...]
    leavers: tuple[int, ...]


class ExitPolicy(Protocol):
    """Decides after a verified round which members leave the answer."""

    def __call__(self, totals: Sequence[float], round_index: int) -> ExitDecision:
        """`totals[i]` = Σ over rounds of member i's aggregate score. Must leave at least one member."""
        ...
