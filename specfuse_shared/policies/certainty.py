"""Certainty: when one candidate wins whatever others would have said, so that nobody has to ask them.

With `Stretch` per token under a linear mean, a candidate with more than half of the weighted probability wins against
every text that leaves it before its end, if the encodings of all verifiers fall apart at the same places. What is known
of a rival is the beginning of its draft: its verification of the candidate told what it would have said itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from specfuse_shared.policies.aggregates import SecondedMean, weighted_mean
from specfuse_shared.policies.exits import never
from specfuse_shared.policies.feedback import uniform
from specfuse_shared.policies.protocols import AggregatePolicy, ExitPolicy, FeedbackPolicy, ScorePolicy
from specfuse_shared.policies.scores import Stretch

HALF = 0.5 + 1e-3
"""More than half, beyond what rounding of logits could feign."""
_CLEAN = re.compile(r" [^\W_]")
"""One space and a letter or digit behind text: no token of a well-behaved vocabulary reaches across."""
_LAST_SPACES = re.compile(r"(?<=\S)\s+\S*$")


def may_be_certain(
    score: ScorePolicy, aggregate: AggregatePolicy, feedback: FeedbackPolicy, exits: ExitPolicy, members: int
) -> bool:
    """Whether half of the votes decide, and nothing is learned from rivals that nobody heard.

    A policy of one's own counts where it has an attribute `allows_certainty` that is true: a score whose values for
    texts that differ are probabilities of events that exclude each other, a linear mean, weights and exits that do not
    depend on scores.
    """
    exclusive = isinstance(score, Stretch) and score.per == "token" and score.least == "shortest"
    linear = aggregate is weighted_mean or (isinstance(aggregate, SecondedMean) and members < 3)
    return all(
        known or _says_so(policy)
        for known, policy in (
            (exclusive, score),
            (linear, aggregate),
            (feedback is uniform, feedback),
            (exits is never, exits),
        )
    )


def settles(answer: str, draft: str, beginnings: Sequence[str]) -> bool:
    """Whether a draft that has more than half wins against all rivals whose drafts begin so, however they go on.

    Rivals' drafts are cut before their last white space. Each must leave the draft before its end; and wherever the
    shortest candidate may end, tokens of all verifiers end there for all that agree so far, or each has left the draft
    already: else a verifier would count a token of one that another one does not.
    """
    if (answer and answer[-1].isspace()) or not _CLEAN.match(draft):
        return False
    left = [_leaves(draft, beginning) for beginning in beginnings]
    if any(at is None for at in left) or not all(map(_CLEAN.match, beginnings)):
        return False
    places = [at for at in left if at is not None]
    for own, beginning in enumerate(beginnings):
        if any(len(beginning.encode()) <= len(draft[:at].encode()) for at in places):
            return False  # it may end before another one leaves
        cut = _LAST_SPACES.search(beginning)
        if cut is None:
            continue
        if cut.start() <= places[own] and not _is_clean(draft, cut.start()):
            return False
        size = len(beginning[: cut.start()].encode())
        if not all(_has_left(draft, other, at, size) for other, at in zip(beginnings, places, strict=True)):
            return False
    return True


def _leaves(draft: str, beginning: str) -> int | None:
    """Where a rival's draft leaves this one, in characters; None if it may go on from it, or agree."""
    for at, (one, other) in enumerate(zip(draft, beginning, strict=False)):
        if one != other:
            return at
    return None


def _has_left(draft: str, beginning: str, at: int, size: int) -> bool:
    """Whether a rival left the draft within `size` bytes, or both are cleanly cut there."""
    if size > len(draft[:at].encode()):
        return True
    end = len(draft.encode()[:size].decode(errors="ignore"))
    return len(draft[:end].encode()) == size and _is_clean(draft, end) and _is_clean(beginning, end)


def _is_clean(text: str, end: int) -> bool:
    return end > 0 and not text[end - 1].isspace() and _CLEAN.match(text, end) is not None


def _says_so(policy: Any) -> bool:
    return bool(getattr(policy, "allows_certainty", False))
