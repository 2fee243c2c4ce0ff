"""One round: the active members draft, verify, and the best candidate is committed; then they learn from the scores."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from specfuse_shared.config import EnsembleConfig
from specfuse_shared.fusion.answer_text import AnswerText, Fitted
from specfuse_shared.fusion.participants import Participants
from specfuse_shared.fusion.repetition import is_stuck, repeats
from specfuse_shared.members.stages import (
    Commit,
    Draft,
    DraftAlone,
    Drafted,
    Op,
    Question,
    StageResult,
    Value,
    Verdict,
    Verdicts,
    Verify,
)
from specfuse_shared.policies import CandidateLogprobs, Electorate
from specfuse_shared.sampling_params import SamplingParams
from specfuse_shared.text.constraint import AnswerConstraint
from specfuse_shared.types import Candidate, FinishReason, RoundRecord, RoundTiming

Ops = Mapping[str, Op]
"""Stages to run, by member."""
Results = Mapping[str, StageResult]
"""What came of them, by member."""
Ask = Callable[[Ops], Generator[Ops, Results, dict[str, Value]]]
"""Has stages run; the values of those that did not fail, in the order asked. Members that failed have left then."""


@dataclass(slots=True)
class DistinctCandidate:
    """A distinct candidate: the text that would be added, whether the turn ends behind it, and who drafted it.

    Stop strings are unknown to it: they cut the answer that would have been given.
    """

    text: str
    ends: bool
    drafters: list[str]
    tokens: int
    over: FinishReason | None = None
    """Why the answer is over with this text under its grammar."""
    scores: dict[str, float] = field(default_factory=dict)
    score: float | None = None
    repeats: bool = False
    """It says again what was said, and the guard took its score."""

    @property
    def finishes(self) -> bool:
        return self.reason is not None

    @property
    def reason(self) -> FinishReason | None:
        """Why the answer ends with this candidate, if it does."""
        return self.over or (FinishReason.STOP if self.ends else None)

    def record(self) -> Candidate:
        drafters, scores = tuple(self.drafters), dict(self.scores)
        return Candidate(self.text, drafters, self.finishes, self.tokens, scores, self.score, self.repeats)


class Method:
    """What stays the same in all rounds of an answer: its settings and policies, and how many rounds were verified."""

    def __init__(self, config: EnsembleConfig, params: SamplingParams, constraint: AnswerConstraint | None) -> None:
        self.config, self.params, self.constraint = config, params, constraint
        self.score, self.aggregate = config.score_policy(), config.aggregate_policy()
        self.feedback, self.exit = config.feedback_policy(), config.exit_policy()
        self.verified_rounds = 0


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """What a round came to: its record (None: nobody had anything to say), and its segment."""

    record: RoundRecord | None
    segment: Fitted


class Round:
    """Round `index` of an answer. `run` is the whole of it; it asks members for stages by `ask`."""

    def __init__(self, method: Method, participants: Participants, answer: AnswerText, index: int, ask: Ask) -> None:
        self._method, self._participants, self._answer, self._index, self._ask = (
            method,
            participants,
            answer,
            index,
            ask,
        )
        self._config, self._constraint = method.config, method.constraint
        self._before, self._exits = tuple(participants.active), participants.take_exits()
        self._alone = len(participants.active) == 1 and method.constraint is None
        self._clock = [time.monotonic()]

    @property
    def _active(self) -> list[str]:
        return self._participants.active

    def run(self) -> Generator[Ops, Results, RoundEnd]:
        """Draft, verify, select, commit, learn. The last member alone decodes plainly: there is nothing to verify."""
        choices = yield from self._draft()
        self._tick()
        if not choices:
            return RoundEnd(None, Fitted("", FinishReason.STOP))
        winner = (yield from self._verify(choices)) if len(choices) > 1 else choices[0]
        self._tick()
        segment = self._answer.fit(*self._unstuck(winner), self._own_count())
        if segment.reason is None and not self._alone:
            yield from self._ask({name: Commit(segment.text) for name in self._active})
            if self._constraint is not None:
                self._constraint.commit(segment.text)
        self._tick()
        weights = self._participants.weights
        retention = self._learn(choices) if len(choices) > 1 and segment.reason is None else {}
        return RoundEnd(self._record(choices, winner, segment.text, weights, retention), segment)

    def _record(
        self,
        choices: list[DistinctCandidate],
        winner: DistinctCandidate,
        segment: str,
        weights: Mapping[str, float],
        retention: Mapping[str, float],
    ) -> RoundRecord:
        start = len(self._answer.text)
        return RoundRecord(
            index=self._index,
            active=self._before,
            candidates=tuple(choice.record() for choice in choices),
            winner=winner.drafters[0],
            text=segment,
            start=start,
            end=start + len(segment),
            verified=len(choices) > 1,
            weights=weights,
            retention=retention,
            exits=(*self._exits, *self._participants.exits),
            timing=RoundTiming(*(b - a for a, b in itertools.pairwise(self._clock))),
        )

    def _tick(self) -> None:
        self._clock.append(time.monotonic())

    # ── draft ────────────────────────────────────────────────────────────────────────────────────

    def _draft(self) -> Generator[Ops, Results, list[DistinctCandidate]]:
        """Every active member's candidate; equal ones count once.

        What the grammar dictates is every member's draft, and no model has to run for it.
        """
        if self._constraint is not None and (forced := self._constraint.forced()):
            over = self._constraint.admit(forced, False).reason
            return [DistinctCandidate(forced, False, list(self._active), 0, over)]
        drafts = yield from self._ask(self._draft_ops())
        choices: list[DistinctCandidate] = []
        for name, draft in drafts.items():
            assert isinstance(draft, Drafted)
            self._count(name, draft)
            choice = self._choice(name, draft)
            same = next((c for c in choices if (c.text, c.ends) == (choice.text, choice.ends)), None)
            if same is not None:
                same.drafters.append(name)
            elif choice.text or choice.finishes or self._alone:
                choices.append(choice)
        return choices

    def _draft_ops(self) -> dict[str, Op]:
        limit, hold = self._config.segment_limit(self._index), self._hold
        if not self._alone:
            return {name: Draft(limit, self._index, hold) for name in self._drafters}
        side = self._participants[self._active[0]]
        if side is self._participants.reference:
            limit = min(limit, self._method.params.max_tokens - side.counts.answer)
        side.alone = side.counts.answer
        return {side.member.name: DraftAlone(limit, self._index, hold)}

    @property
    def _drafters(self) -> list[str]:
        """Who drafts: under a grammar those that shall, or everybody where nobody shall."""
        if self._constraint is None:
            return self._active
        willing = [n for n in self._active if self._participants[n].member.info.drafts_under_grammar]
        return willing or self._active

    @property
    def _hold(self) -> int:
        """So many tokens have to come before a member may end its turn."""
        params = self._method.params
        return sys.maxsize if params.ignore_eos else max(0, params.min_tokens - self._answer.tokens)

    def _count(self, name: str, draft: Drafted) -> None:
        side = self._participants[name]
        side.drafted += draft.tokens
        if self._alone:
            side.alone = (side.alone or 0) + draft.tokens

    def _choice(self, name: str, draft: Drafted) -> DistinctCandidate:
        """A draft as far as the grammar admits it."""
        if self._constraint is None:
            return DistinctCandidate(draft.text, draft.ends and self._may_end(draft.text), [name], draft.tokens)
        admitted = self._constraint.admit(draft.text, draft.ends)
        return DistinctCandidate(admitted.text, admitted.ends, [name], draft.tokens, admitted.reason)

    def _may_end(self, text: str) -> bool:
        """Whether the answer is long enough to end with `text`."""
        return not self._hold or self._alone or self._answer.tokens_with(text) >= self._method.params.min_tokens

    # ── verify and select ────────────────────────────────────────────────────────────────────────

    def _verify(self, choices: list[DistinctCandidate]) -> Generator[Ops, Results, DistinctCandidate]:
        """Score every candidate; the winner."""
        questions = tuple(Question(c.text, c.ends) for c in choices)
        judged = yield from self._ask({name: Verify(questions) for name in self._active})
        table = [[_seen(*pair) for pair in zip(choices, _each(own), strict=True)] for own in judged.values()]
        drafters = [[self._active.index(name) for name in c.drafters if name in self._active] for c in choices]
        for choice in choices:
            choice.repeats = self._config.repetition_guard and repeats(self._answer.text, choice.text)
        weights = list(self._participants.weights.values())
        voters = Electorate(self._method.score, self._method.aggregate, weights)
        election = voters.elect(table, drafters, [c.repeats for c in choices])
        for index, choice in enumerate(choices):
            choice.scores = {name: row[index] for name, row in zip(judged, election.scores, strict=True)}
            choice.score = election.votes[index]
        return choices[election.winner]

    def _unstuck(self, winner: DistinctCandidate) -> tuple[str, FinishReason | None]:
        """The winner's text and why it ends the answer; nothing more, where all that is left is a circle.

        A single member is never cut short: alone, it answers as it always does.
        """
        guarded = self._config.repetition_guard and self._constraint is None and len(self._participants.sides) > 1
        if guarded and not self._hold and is_stuck(self._answer.text, winner.text):
            return "", FinishReason.REPETITION
        return winner.text, winner.reason

    def _own_count(self) -> int | None:
        """Tokens of the answer with this round, where the reference member decodes alone and knows."""
        side = self._participants.reference
        return side.alone if self._alone and side.member.name in self._active else None

    # ── learn ────────────────────────────────────────────────────────────────────────────────────

    def _learn(self, choices: list[DistinctCandidate]) -> dict[str, float]:
        """Update the verifiers' weights, then let members go; everyone's retention."""
        method, participants = self._method, self._participants
        method.verified_rounds += 1
        own: dict[str, Any] = {n: next((c for c in choices if n in c.drafters), None) for n in self._active}
        matrix = [[c.scores[j] if (c := own[i]) else 0.0 for i in self._active] for j in self._active]
        weights = method.feedback(list(participants.weights.values()), matrix, method.verified_rounds)
        for name, weight in zip(self._active, weights, strict=True):
            choice = own[name]
            participants[name].weight = weight
            participants[name].total += (choice.score or 0.0) if choice else 0.0
        decision = method.exit([participants[name].total for name in self._active], method.verified_rounds)
        retention = dict(zip(self._active, decision.retention, strict=True))
        leavers = [self._active[i] for i in decision.leavers]
        if len(leavers) >= len(self._active):
            leavers.remove(max(self._active, key=lambda name: retention[name]))
        participants.drop(leavers, self._index, "retention", retention)
        return retention


def _each(found: Value) -> tuple[Verdict, ...]:
    assert isinstance(found, Verdicts)
    return found.each


def _seen(choice: DistinctCandidate, verdict: Verdict) -> CandidateLogprobs:
    """A candidate in the eyes of a verifier."""
    return CandidateLogprobs(choice.text, choice.ends, verdict.logprobs, verdict.token_bytes)
