"""One request: rounds of draft, verify, select, commit, learn, until the answer ends.

`AnswerSession` owns the state of one answer: its text, its rounds, and who takes part (`Participants`). It runs no
model: it yields the stages that members shall run and is sent what came out, so that a scheduler can run many answers
together. It knows no ids and no tensors.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specfuse_shared.config import EnsembleConfig
from specfuse_shared.errors import GenerationError, UnfinishedValueError
from specfuse_shared.events import Event, ExitEvent, FinishEvent, StartEvent, ThinkingEvent, WarningEvent
from specfuse_shared.fusion.answer_text import AnswerText, Fitted
from specfuse_shared.fusion.participants import Participants
from specfuse_shared.fusion.repetition import is_stuck, repeats
from specfuse_shared.members.base import Draft, Member, Question, Stage, Thought, Verdict
from specfuse_shared.policies import CandidateLogprobs, Electorate
from specfuse_shared.results import EnsembleResult
from specfuse_shared.sampling_params import SamplingParams
from specfuse_shared.text.constraint import AnswerConstraint
from specfuse_shared.text.tool_calls import ToolUse
from specfuse_shared.types import (
    Candidate,
    FinishReason,
    MemberFault,
    Message,
    RoundRecord,
    RoundTiming,
    StageName,
    TokenLogprob,
    Usage,
)

Jobs = Mapping[str, Stage]
"""Stages to run, by member."""
Outcomes = Mapping[str, Any]
"""What became of the jobs: each one's result, or the exception that it raised."""
Work = Generator[Jobs, Outcomes | None, None]


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


_THINKING_PIECE = 16
"""Tokens of thoughts between two events."""
_SEED_BITS = 32
"""Of the seed of a sampled request that named none."""


class AnswerSession:
    """One answer of the ensemble; `run` is the whole of it, `events` what it has to tell.

    A member whose stage fails leaves the answer, which goes on with the others. Raises `RequestError` on
    construction, before any model runs, if the request cannot be served.
    """

    def __init__(
        self,
        config: EnsembleConfig,
        members: Sequence[Member],
        messages: Sequence[Message],
        params: SamplingParams,
        tools: ToolUse | None = None,
    ) -> None:
        tools = tools or ToolUse()
        params = replace(params, grammar=tools.grammar(params.grammar))
        self._config, self._params = config, params
        self._score, self._aggregate = config.score_policy(), config.aggregate_policy()
        self._feedback, self._exit = config.feedback_policy(), config.exit_policy()
        self.seed = params.seed if params.seed is not None or params.greedy else secrets.randbits(_SEED_BITS)
        self.participants = Participants(config, members, messages, params, tools.offered, self.seed or 0)
        grammar, codec = params.grammar, self.participants.reference.member.codec
        self._constraint = AnswerConstraint(grammar, codec, params.max_tokens) if grammar else None
        self._answer = AnswerText(params, codec, self._constraint.is_value if self._constraint else None)
        self._rounds: list[RoundRecord] = []
        self._verified_rounds = 0
        self._thoughts: dict[str, str] = {}
        self._warnings: list[MemberFault] = []
        self._ended: Fitted | None = None
        self._began, self._prefilled = time.monotonic(), 0.0
        self.events: deque[Event] = deque()
        self.finished = False

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._answer.text

    @property
    def rounds(self) -> Sequence[RoundRecord]:
        return self._rounds

    @property
    def max_tokens(self) -> int:
        return self._params.max_tokens

    @property
    def max_thinking_tokens(self) -> int:
        return self._params.max_thinking_tokens

    def run(self) -> Work:
        """Yields jobs, is sent their outcomes; ends when the answer does. Raises `GenerationError`."""
        self._began = time.monotonic()
        yield from self._all("prefill", {name: self.participants[name].session.prefill() for name in self._active})
        self._prefilled = time.monotonic() - self._began
        self.events.append(StartEvent(tuple(self._active), self.participants.reference.session.prompt_tokens))
        yield from self._think()
        while self._ended is None:
            self.participants.drop_full(self._next)
            self.events.extend(map(ExitEvent, self.participants.exits))
            if not self._active:
                self._finish(Fitted("", FinishReason.LENGTH))
            elif len(self._active) == 1 and self._constraint is None:
                yield from self._round_alone()
            else:
                yield from self._round()
        yield from self._close(self._ended)

    def release(self) -> None:
        """Free every cache. Safe to call twice."""
        self.participants.release(remember=self.finished)

    @property
    def _active(self) -> list[str]:
        return self.participants.active

    @property
    def _next(self) -> int:
        """Number of the round that runs now, or would run next."""
        return len(self._rounds) + 1

    def _think(self) -> Work:
        """Members that think do so at the same time, each for itself; the answer begins when all are done."""
        thinking = {n: self.participants.thinking_room(n, self.max_thinking_tokens) for n in self._active}
        thinking = {n: most for n, most in thinking.items() if self.participants[n].member.thinks}
        while thinking:
            jobs = {n: self.participants[n].session.think(_THINKING_PIECE, most) for n, most in thinking.items()}
            thoughts: dict[str, Thought] = yield from self._all("think", jobs)
            for name, thought in thoughts.items():
                self._thoughts[name] = self._thoughts.get(name, "") + thought.text
                if thought.text:
                    self.events.append(ThinkingEvent(name, thought.text))
            thinking = {n: most for n, most in thinking.items() if n in thoughts and not thoughts[n].ended}

    # ── one round ────────────────────────────────────────────────────────────────────────────────

    def _round(self) -> Work:
        clock = [time.monotonic()]
        active, exits = tuple(self._active), self.participants.take_exits()
        choices = yield from self._draft()
        clock.append(time.monotonic())
        if not choices:
            self._finish(Fitted("", FinishReason.STOP))
            return
        verified = len(choices) > 1
        winner = (yield from self._verify(choices)) if verified else choices[0]
        clock.append(time.monotonic())
        segment = self._answer.fit(*self._unstuck(winner))
        if segment.reason is None:
            jobs = {name: self.participants[name].session.commit(segment.text) for name in self._active}
            yield from self._all("commit", jobs)
            if self._constraint is not None:
                self._constraint.commit(segment.text)
        clock.append(time.monotonic())
        weights = self.participants.weights
        retention = self._learn(choices) if verified and segment.reason is None else {}
        record = RoundRecord(
            index=self._next,
            active=active,
            candidates=tuple(c.record() for c in choices),
            winner=winner.drafters[0],
            text=segment.text,
            start=len(self.text),
            end=len(self.text) + len(segment.text),
            verified=verified,
            weights=weights,
            retention=retention,
            exits=(*exits, *self.participants.exits),
            timing=RoundTiming(*(b - a for a, b in itertools.pairwise(clock))),
        )
        self._publish(record, segment)

    def _draft(self) -> Generator[Jobs, Outcomes, list[DistinctCandidate]]:
        """Every active member's candidate; equal ones count once.

        What the grammar dictates is every member's draft, and no model has to run for it.
        """
        if self._constraint is not None and (forced := self._constraint.forced()):
            over = self._constraint.admit(forced, False).reason
            return [DistinctCandidate(forced, False, list(self._active), 0, over)]
        limit = self._config.segment_limit(self._next)
        jobs = {name: self.participants[name].session.draft(limit, self._next) for name in self._active}
        drafts: dict[str, Draft] = yield from self._all("draft", jobs)
        choices: list[DistinctCandidate] = []
        for name, draft in drafts.items():
            self.participants[name].drafted += draft.tokens
            choice = self._choice(name, draft)
            same = next((c for c in choices if (c.text, c.ends) == (choice.text, choice.ends)), None)
            if same is not None:
                same.drafters.append(name)
            elif choice.text or choice.finishes:
                choices.append(choice)
        return choices

    def _choice(self, name: str, draft: Draft) -> DistinctCandidate:
        """A draft as far as the grammar admits it."""
        if self._constraint is None:
            return DistinctCandidate(draft.text, draft.ends, [name], draft.tokens)
        admitted = self._constraint.admit(draft.text, draft.ends)
        return DistinctCandidate(admitted.text, admitted.ends, [name], draft.tokens, admitted.reason)

    def _verify(self, choices: list[DistinctCandidate]) -> Generator[Jobs, Outcomes, DistinctCandidate]:
        """Score every candidate; the winner."""
        questions = [Question(c.text, c.ends) for c in choices]
        jobs = {name: self.participants[name].session.verify(questions) for name in self._active}
        judged: dict[str, list[Verdict]] = yield from self._all("verify", jobs)
        table = [
            [CandidateLogprobs(c.text, c.ends, v.logprobs, v.token_bytes) for c, v in zip(choices, own, strict=True)]
            for own in judged.values()
        ]
        drafters = [[self._active.index(name) for name in c.drafters if name in self._active] for c in choices]
        for choice in choices:
            choice.repeats = self._config.repetition_guard and repeats(self.text, choice.text)
        voters = Electorate(self._score, self._aggregate, list(self.participants.weights.values()))
        election = voters.elect(table, drafters, [c.repeats for c in choices])
        for index, choice in enumerate(choices):
            choice.scores = {name: row[index] for name, row in zip(judged, election.scores, strict=True)}
            choice.score = election.votes[index]
        return choices[election.winner]

    def _unstuck(self, winner: DistinctCandidate) -> tuple[str, FinishReason | None]:
        """The winner's text and why it ends the answer; nothing more, where all that is left is a circle.

        A single member is never cut short: alone, it answers as it always does.
        """
        guarded = self._config.repetition_guard and self._constraint is None and len(self.participants.sides) > 1
        if guarded and is_stuck(self.text, winner.text):
            return "", FinishReason.REPETITION
        return winner.text, winner.reason

    def _learn(self, choices: list[DistinctCandidate]) -> dict[str, float]:
        """Update the verifiers' weights, then let members go; everyone's retention."""
        self._verified_rounds += 1
        own = {name: next((c for c in choices if name in c.drafters), None) for name in self._active}
        matrix = [[c.scores[j] if (c := own[i]) else 0.0 for i in self._active] for j in self._active]
        weights = self._feedback(list(self.participants.weights.values()), matrix, self._verified_rounds)
        for name, weight in zip(self._active, weights, strict=True):
            choice = own[name]
            self.participants[name].weight = weight
            self.participants[name].total += (choice.score or 0.0) if choice else 0.0
        decision = self._exit([self.participants[name].total for name in self._active], self._verified_rounds)
        retention = dict(zip(self._active, decision.retention, strict=True))
        leavers = [self._active[i] for i in decision.leavers]
        if len(leavers) >= len(self._active):
            leavers.remove(max(self._active, key=lambda name: retention[name]))
        self.participants.drop(leavers, self._next, "retention", retention)
        return retention

    def _round_alone(self) -> Work:
        """The last member decodes plainly: nothing to verify."""
        name, exits = self._active[0], self.participants.take_exits()
        side, clock = self.participants[name], time.monotonic()
        limit, is_reference = self._config.segment_limit(self._next), side is self.participants.reference
        if is_reference:
            limit = min(limit, self._params.max_tokens - side.session.answer_tokens)
        before = side.session.answer_tokens
        drafts = yield from self._all("draft", {name: side.session.draft_alone(limit, self._next)})
        draft = drafts[name]
        side.drafted += draft.tokens
        side.alone = before + draft.tokens
        choice = self._choice(name, draft)
        segment = self._answer.fit(*self._unstuck(choice), side.alone if is_reference else None)
        record = RoundRecord(
            index=self._next,
            active=(name,),
            candidates=(choice.record(),),
            winner=name,
            text=segment.text,
            start=len(self.text),
            end=len(self.text) + len(segment.text),
            verified=False,
            weights={name: 1.0},
            retention={},
            exits=tuple(exits),
            timing=RoundTiming(draft=time.monotonic() - clock),
        )
        self._publish(record, segment)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    def _publish(self, record: RoundRecord, segment: Fitted) -> None:
        self._rounds.append(record)
        if segment.reason is not None:
            self._finish(segment, record)
            return
        self.events.append(self._answer.add(record.text, record))
        self.events.extend(map(ExitEvent, self.participants.take_exits()))

    def _finish(self, segment: Fitted, record: RoundRecord | None = None) -> None:
        """Release what was held back, up to the stop string, and close the answer."""
        constraint = self._constraint if segment.reason is FinishReason.LENGTH else None
        if constraint is not None and not constraint.accepts(segment.text):
            message = f"no room was left to complete the answer (max_tokens={self._params.max_tokens})"
            raise UnfinishedValueError(message, member=self._active[0] if self._active else None, text=self.text)
        last = self._answer.finish(segment, record)
        if last is not None:
            self.events.append(last)
        self._ended = segment

    def _close(self, last: Fitted) -> Work:
        """Free the caches, and let the last event tell the whole result."""
        usage, self.finished = self.participants.usage(self.text), True
        self.release()
        logprobs = (yield from self._score_answer()) if self._params.logprobs else None
        self.events.append(FinishEvent(self._result(last, usage, logprobs)))

    def _score_answer(self) -> Generator[Jobs, Outcomes, tuple[TokenLogprob, ...] | None]:
        """Log p of the answer's tokens by the reference member, which reads the answer once more, as a whole.

        So they are those of the final text, whoever wrote it, wherever it was cut and whether or not that member
        stayed to the end. None if the member fails.
        """
        member, session = self.participants.reference.member, self.participants.reopen_reference()
        name, pieces = member.name, member.codec.pieces(self.text)
        for stage in (session.prefill(), session.verify([Question(self.text, False)])):
            outcome = (yield {name: stage})[name]
            if isinstance(outcome, Exception):
                self._warn(name, "score", f"member {name!r} could not score the answer: {outcome}")
                return None
        session.release()
        [verdict] = outcome
        return tuple(
            TokenLogprob(piece.decode("utf-8", "replace"), logprob, tuple(piece))
            for piece, logprob in zip(pieces, verdict.logprobs, strict=True)
        )

    def _result(self, last: Fitted, usage: Usage, logprobs: tuple[TokenLogprob, ...] | None) -> EnsembleResult:
        assert last.reason is not None, "the answer goes on"
        return EnsembleResult(
            text=self.text,
            finish_reason=last.reason,
            stop_sequence=last.stop.stop if last.stop else None,
            usage=usage,
            rounds=tuple(self._rounds),
            members=tuple(self.participants.sides),
            seed=self.seed,
            prefill_seconds=self._prefilled,
            first_segment_seconds=self._answer.first_seconds,
            total_seconds=time.monotonic() - self._began,
            logprobs=logprobs,
            thinking=dict(self._thoughts),
            warnings=tuple(self._warnings),
        )

    # ── who takes part ───────────────────────────────────────────────────────────────────────────

    def _all(self, stage: StageName, jobs: Jobs) -> Generator[Jobs, Outcomes, dict[str, Any]]:
        """Results of a stage, in the members' order; members that failed have left."""
        outcomes = yield jobs
        results = {}
        for name in jobs:
            outcome = outcomes[name]
            if isinstance(outcome, Exception):
                self._lose(name, stage, outcome)
            else:
                results[name] = outcome
        return results

    def _lose(self, name: str, stage: StageName, error: Exception) -> None:
        message = f"member {name!r} failed in {stage} and left the answer: {error}"
        if self._active == [name]:
            text = f"{message.replace(' and left the answer', '')} (no member is left)"
            raise GenerationError(text, member=name, text=self.text) from error
        self.participants.drop([name], self._next, "fault")
        self._warn(name, stage, message)

    def _warn(self, name: str, stage: StageName, message: str) -> None:
        self._warnings.append(MemberFault(name, stage, message))
        self.events.append(WarningEvent(name, stage, message))
