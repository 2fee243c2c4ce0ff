"""The winner of a round: scores become votes, votes a winner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
        """Compare the candidates of `table[j]`, the same for each verifier j; those that are `barred` get no vote.

        `drafters[i]`: the verifiers that wrote candidate i. The highest vote wins. Candidates that are the same to
        every verifier, as far as they were compared with the others, are compared among themselves; if that tells no
        more, the shortest gives way to what goes on from it. Else the first of equals wins. A winner that ends the
        turn, and does not stand for equals that go on, is compared once more with the others that end, as if nothing
        else had been said.
        """
        scores = [self._scores(row) for row in table]
        votes = self.aggregate(scores, self.weights, drafters)
        votes = [0.0 if out else vote for vote, out in zip(votes, barred, strict=True)]
        first = votes.index(max(votes))
        left = _same(scores, votes, first)
        if len(left) == len(votes):
            left = _without_beginning(table[0], left)
        ending = [i for i, candidate in enumerate(table[0]) if candidate.ends and not barred[i]]
        again = ending if len(left) == 1 and left[0] in ending else left
        winner = self._among(again, table, drafters) if 1 < len(again) < len(votes) else left[0]
        return Election(scores, votes, winner)

    def _among(
        self, some: Sequence[int], table: Sequence[Sequence[CandidateLogprobs]], drafters: Sequence[Sequence[int]]
    ) -> int:
        """Which of these candidates wins if there are no others."""
        rows, own = [[row[i] for i in some] for row in table], [drafters[i] for i in some]
        return some[self.elect(rows, own, [False] * len(some)).winner]

    def _scores(self, row: Sequence[CandidateLogprobs]) -> list[float]:
        """A verifier to which a candidate is invisible has no opinion on it."""
        seen = [candidate for candidate in row if candidate.logprobs]
        found = iter(self.score(seen) if seen else ())
        return [next(found) if candidate.logprobs else 0.0 for candidate in row]


def _same(scores: Matrix, votes: Sequence[float], first: int) -> list[int]:
    """The candidates that no verifier tells from the `first`, which has the highest vote; itself among them."""
    if votes[first] <= 0:
        return [first]
    rows = [*scores, votes]
    return [i for i in range(len(votes)) if all(math.isclose(row[i], row[first], rel_tol=_EQUAL) for row in rows)]


def _without_beginning(row: Sequence[CandidateLogprobs], numbers: Sequence[int]) -> list[int]:
    """All but the shortest candidate, if it goes on and another one begins with its text."""
    i = min(numbers, key=lambda n: (row[n].size, row[n].ends))
    others = [n for n in numbers if n != i]
    begins = not row[i].ends and any(row[n].text.startswith(row[i].text) and row[n].size > row[i].size for n in others)
    return others if begins else list(numbers)
