"""Elections among candidates whose log-probabilities a test states."""

from __future__ import annotations

from collections.abc import Sequence

from specfuse_shared.candidate import CandidateLogprobs, RoundCandidate
from specfuse_shared.policies import AggregatePolicy, Election, Electorate, ScorePolicy, Stretch, weighted_mean


def elect(
    rows: Sequence[Sequence[CandidateLogprobs]],
    drafters: Sequence[Sequence[int]],
    weights: Sequence[float] | None = None,
    *,
    score: ScorePolicy | None = None,
    aggregate: AggregatePolicy = weighted_mean,
    barred: Sequence[int] = (),
    whole_values: bool = False,
) -> Election:
    """`rows[j][i]`: candidate i with verifier j's log p; `drafters[i]`: its authors; `barred`: repeating candidates."""
    names = [f"m{j}" for j in range(len(rows))]
    candidates = [
        RoundCandidate(
            rows[0][i].text,
            rows[0][i].ends,
            [names[j] for j in authors],
            repeats=i in barred,
            logprobs={name: row[i] for name, row in zip(names, rows, strict=True)},
        )
        for i, authors in enumerate(drafters)
    ]
    votes = dict(zip(names, weights or [1 / len(names)] * len(names), strict=True))
    return Electorate(score or Stretch(), aggregate, votes, whole_values).elect(candidates)
