"""The winner of a round: scores become votes, votes a winner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specfuse_shared.policies.aggregates import SECOND
from specfuse_shared.policies.protocols import AggregatePolicy, CandidateLogprobs, Matrix, ScorePolicy

_EQUAL = 1e-6


@dataclass(frozen=True, slots=True)
class Election:
    """`scores[j][i]` of verifier j for candidate i, the vote on each candidate, and which one won."""

    scores: Matrix
    votes: Sequence[float]
    winner: int


@dataclass(frozen=True, slots=True)
class Electorate:
    """How candidates are compared: the verifiers' `weights` (Σ = 1), and the two policies."""

    score: ScorePolicy
    aggregate: AggregatePolicy
    weights: Sequence[float]

    def elect(
        self, table: Sequence[Sequence[CandidateLogprobs]], drafters: Sequence[Sequence[int]], barred: Sequence[bool]
    ) -> Election:
        """Compare the candidates of `table[j]`, the same for each verifier j.

        `drafters[i]`: the verifiers that wrote candidate i. The one with the lowest vote leaves, and the others are
        compared anew as if it had not been said, until one is left: so nobody loses because a third one was short.
        `scores` and `votes` are those of all of them, the first time; those that are `barred` get no vote, and lose
        against any other one that is thinkable, where three or more vote.
        """
        scores, votes = self._compare(table, drafters)
        least = max(votes) / SECOND if len(table) > 2 else 0.0
        left = [i for i, out in enumerate(barred) if not out and votes[i] >= least] if any(barred) else []
        left = left or list(range(len(votes)))
        while len(left) > 1:
            left.remove(self._last(left, table, drafters))
        return Election(scores, [0.0 if out else vote for vote, out in zip(votes, barred, strict=True)], left[0])

    def _last(
        self, some: Sequence[int], table: Sequence[Sequence[CandidateLogprobs]], drafters: Sequence[Sequence[int]]
    ) -> int:
        """Which of these candidates leaves: the one with the lowest vote, the last of equals.

        Candidates that are the same to every verifier, as far as they were compared with the others, are compared among
        themselves; if that tells no more, the shortest gives way to what goes on from it.
        """
        scores, votes = self._compare([[row[i] for i in some] for row in table], [drafters[i] for i in some])
        lowest = max(range(len(some)), key=lambda n: (-votes[n], n))
        same = [some[n] for n in _same([*scores, votes], lowest)]
        if 1 < len(same) < len(some):
            return self._last(same, table, drafters)
        beginning = _beginning(table[0], same)
        return some[lowest] if beginning is None else beginning

    def _compare(
        self, table: Sequence[Sequence[CandidateLogprobs]], drafters: Sequence[Sequence[int]]
    ) -> tuple[Matrix, list[float]]:
        scores = [self._scores(row) for row in table]
        return scores, self.aggregate(scores, self.weights, drafters)

    def _scores(self, row: Sequence[CandidateLogprobs]) -> list[float]:
        """A verifier to which a candidate is invisible has no opinion on it."""
        seen = [candidate for candidate in row if candidate.logprobs]
        found = iter(self.score(seen) if seen else ())
        return [next(found) if candidate.logprobs else 0.0 for candidate in row]


def _same(rows: Matrix, one: int) -> list[int]:
    """The candidates that no verifier tells from this one; itself among them."""
    return [i for i in range(len(rows[0])) if all(math.isclose(row[i], row[one], rel_tol=_EQUAL) for row in rows)]


def _beginning(row: Sequence[CandidateLogprobs], numbers: Sequence[int]) -> int | None:
    """The shortest candidate, if it goes on and another one begins with its text."""
    i = min(numbers, key=lambda n: (row[n].size, row[n].ends))
    longer = [n for n in numbers if row[n].size > row[i].size and row[n].text.startswith(row[i].text)]
    return i if longer and not row[i].ends else None
