"""The winner of a round: scores become votes, votes a winner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specfuse_shared.policies.aggregates import MOST, SECOND
from specfuse_shared.policies.protocols import ROUNDING, AggregatePolicy, CandidateLogprobs, Matrix, ScorePolicy
from specfuse_shared.policies.scores import mean_behind, whether_to_call

_EQUAL = 1e-6


@dataclass(frozen=True, slots=True)
class Election:
    """`scores[j][i]` of verifier j for candidate i, the vote on each candidate, and which one won."""

    scores: Matrix
    votes: Sequence[float]
    winner: int

    def is_clear(self, margin: float) -> bool:
        """Whether the vote for the winner is at least `margin` times the vote for every other candidate."""
        others = [vote for i, vote in enumerate(self.votes) if i != self.winner]
        return self.votes[self.winner] > 0 and self.votes[self.winner] >= margin * max(others, default=0.0)


@dataclass(frozen=True, slots=True)
class Electorate:
    """How candidates are compared: the verifiers' `weights` (Σ = 1), and the two policies.

    `whole_values`: all candidates are whole values of a grammar. Then each verifier shares one vote out among them, for
    what it would have said beside the grammar is no choice (on ARC, a strong member else loses to weak ones).
    """

    score: ScorePolicy
    aggregate: AggregatePolicy
    weights: Sequence[float]
    whole_values: bool = False

    def elect(
        self, table: Sequence[Sequence[CandidateLogprobs]], drafters: Sequence[Sequence[int]], barred: Sequence[bool]
    ) -> Election:
        """Compare the candidates of `table[j]`, the same for each verifier j.

        `drafters[i]`: the verifiers that wrote candidate i. The one with the lowest vote leaves, and the others are
        compared anew as if it had not been said, until one is left: so nobody loses because a third one was short.
        `scores` and `votes` are those of all of them, the first time. Those that are `barred` get no vote, and lose
        against any other one that is thinkable, where three or more vote. Verifiers that the aggregate calls
        `outsiders` neither stand nor vote.
        """
        scores, votes = compared = self._compare(range(len(barred)), table, drafters)
        if outsiders := self._outsiders(scores, drafters):
            return replace(self._without(outsiders, table, drafters, barred), scores=scores)
        winner = self._left(compared, table, drafters, barred)
        return Election(scores, [0.0 if out else vote for vote, out in zip(votes, barred, strict=True)], winner)

    def _left(
        self,
        compared: tuple[Matrix, list[float]],
        table: Sequence[Sequence[CandidateLogprobs]],
        drafters: Sequence[Sequence[int]],
        barred: Sequence[bool],
    ) -> int:
        """Which candidate is left when one after another has gone."""
        votes = compared[1]
        least = max(votes) / SECOND if len(table) > 2 else 0.0
        left = [i for i, out in enumerate(barred) if not out and votes[i] >= least] if any(barred) else []
        left = left or list(range(len(votes)))
        while len(left) > 1:
            if len(left) < len(votes):
                compared = self._compare(left, table, drafters)
            left.remove(self._last(left, compared, table, drafters))
        return left[0]

    def _outsiders(self, scores: Matrix, drafters: Sequence[Sequence[int]]) -> list[int]:
        """Verifiers that the aggregate lets neither stand nor vote, if it knows any."""
        find = getattr(self.aggregate, "outsiders", None)
        return find(scores, self.weights, drafters) if find is not None and len(scores) > 2 else []

    def _without(
        self,
        outsiders: Sequence[int],
        table: Sequence[Sequence[CandidateLogprobs]],
        drafters: Sequence[Sequence[int]],
        barred: Sequence[bool],
    ) -> Election:
        """The election without these verifiers, and without what they alone wrote, which gets no vote."""
        voters = [j for j in range(len(table)) if j not in outsiders]
        some = [i for i, authors in enumerate(drafters) if not authors or set(authors) - set(outsiders)]
        mass = math.fsum(self.weights[j] for j in voters)
        electorate = replace(self, weights=[self.weights[j] / mass for j in voters])
        rows = [[table[j][i] for i in some] for j in voters]
        authors = [[voters.index(j) for j in drafters[i] if j in voters] for i in some]
        found = electorate.elect(rows, authors, [barred[i] for i in some])
        votes = dict(zip(some, found.votes, strict=True))
        return Election(found.scores, [votes.get(i, 0.0) for i in range(len(drafters))], some[found.winner])

    def _last(
        self,
        some: Sequence[int],
        compared: tuple[Matrix, list[float]],
        table: Sequence[Sequence[CandidateLogprobs]],
        drafters: Sequence[Sequence[int]],
    ) -> int:
        """Which of these candidates leaves: the one with the lowest vote, the last of equals.

        Candidates that are the same to every verifier, as far as they were compared with the others, are compared among
        themselves. If that tells no more, the shortest gives way to what goes on from it, provided that the voters
        rather expect how it goes on than anything else: nothing else was compared with that.
        """
        scores, votes = compared
        lowest = max(range(len(some)), key=lambda n: (-votes[n], n))
        same = [some[n] for n in _same([*scores, votes], lowest)]
        if 1 < len(same) < len(some):
            return self._last(same, self._compare(same, table, drafters), table, drafters)
        found = _beginning(table[0], same)
        if found is None:
            return some[lowest]
        beginning, longer = found
        expected = [self._expected(n, table[0][beginning].size, table) for n in longer]
        return beginning if max(expected) >= MOST else longer[expected.index(min(expected))]

    def _expected(self, candidate: int, size: int, table: Sequence[Sequence[CandidateLogprobs]]) -> float:
        """Weighted mean of how likely the verifiers find what this candidate says behind its first `size` bytes."""
        return math.fsum(w * mean_behind(row[candidate], size) for w, row in zip(self.weights, table, strict=True))

    def _compare(
        self, some: Sequence[int], table: Sequence[Sequence[CandidateLogprobs]], drafters: Sequence[Sequence[int]]
    ) -> tuple[Matrix, list[float]]:
        """Scores and votes of these candidates, as if there were no others."""
        scores: Matrix = [self._scores([row[i] for i in some]) for row in table]
        if self.whole_values:
            scores = [[score / (math.fsum(row) or 1.0) for score in row] for row in scores]
        return scores, self.aggregate(scores, self.weights, [drafters[i] for i in some])

    def _scores(self, row: Sequence[CandidateLogprobs]) -> list[float]:
        """A verifier has no opinion on a candidate that it cannot see, or of which it gives no log-probabilities.

        While calls of tools and text both stand, what counts is which of the two it shall be.
        """
        seen = [bool(candidate.logprobs) and all(p <= ROUNDING for p in candidate.logprobs) for candidate in row]
        known = [candidate for candidate, is_seen in zip(row, seen, strict=True) if is_seen]
        found = iter((whether_to_call(known) or self.score(known)) if known else ())
        return [next(found) if is_seen else 0.0 for is_seen in seen]


def _same(rows: Matrix, one: int) -> list[int]:
    """The candidates that no verifier tells from this one; itself among them."""
    return [i for i in range(len(rows[0])) if all(math.isclose(row[i], row[one], rel_tol=_EQUAL) for row in rows)]


def _beginning(row: Sequence[CandidateLogprobs], numbers: Sequence[int]) -> tuple[int, list[int]] | None:
    """The shortest candidate, and those that go on from its text; None if it ends or none does."""
    i = min(numbers, key=lambda n: (row[n].size, row[n].ends))
    longer = [n for n in numbers if row[n].size > row[i].size and row[n].text.startswith(row[i].text)]
    return (i, longer) if longer and not row[i].ends else None
