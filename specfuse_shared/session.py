"""One request: rounds of draft, verify, select, commit, learn, until the answer ends.

`AnswerSession` owns the state of one answer (text, weights, totals, who is active) and asks members for whole
stages. It knows no ids and no tensors. `step` runs one round, so that a caller can interleave answers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from specfuse_shared.config import EnsembleConfig, SamplingParams
from specfuse_shared.constraint import AnswerConstraint
from specfuse_shared.errors import GenerationError, PromptTooLongError, SpecFuseError, UnfinishedValueError
from specfuse_shared.events import Event, ExitEvent, FinishEvent, SegmentEvent, StartEvent
from specfuse_shared.member import Draft, Member, MemberSession, Question
from specfuse_shared.policies import normalised
from specfuse_shared.sampling import new_seed
from specfuse_shared.stops import StopHold, StopMatch, find_stop
from specfuse_shared.tokens import Encoding
from specfuse_shared.types import (
    Candidate,
    EnsembleResult,
    FinishReason,
    MemberExit,
    MemberUsage,
    Message,
    RoundRecord,
    RoundTiming,
    Usage,
)

_ROOM_PER_TOKEN = 8
"""A token of one member may take this many of another's (Chinese, emoji); kept free in every context."""


@dataclass(slots=True)
class _Side:
    """A member's part in this answer."""

    member: Member
    session: MemberSession
    weight: float
    total: float = 0.0
    drafted: int = 0
    alone: int | None = None
    """Tokens of the whole answer, where the member ended it by decoding alone."""


@dataclass(slots=True)
class _Choice:
    """A distinct candidate: the text that would be added, what is scored for it, and who drafted it."""

    text: str
    scored: str
    ends: bool
    stop: StopMatch | None
    drafters: list[str]
    tokens: int
    reason: FinishReason | None = None
    """Why the answer is over with this text under its grammar."""
    scores: dict[str, float] = field(default_factory=dict)
    score: float | None = None

    @property
    def finishes(self) -> bool:
        return self.ends or self.stop is not None or self.reason is not None

    def record(self) -> Candidate:
        return Candidate(self.text, tuple(self.drafters), self.finishes, self.tokens, dict(self.scores), self.score)


class AnswerSession:
    """One answer of the ensemble. `start` once, then `step` until `finished`; `release` frees every cache.

    Raises `RequestError` on construction, before any model runs, if the request cannot be served.
    """

    def __init__(
        self, config: EnsembleConfig, members: Sequence[Member], messages: Sequence[Message], params: SamplingParams
    ) -> None:
        self._config, self._params = config, params
        self._score, self._aggregate = config.score_policy(), config.aggregate_policy()
        self._feedback, self._exit = config.feedback_policy(), config.exit_policy()
        self.seed = params.seed if params.seed is not None or params.greedy else new_seed()
        prompts = [member.encode_prompt(messages, params.offered_tools) for member in members]
        for member, prompt in zip(members, prompts, strict=True):
            self._check_room(member, len(prompt), len(members))
        weights = normalised([member.weight for member in members])
        self._sides = {
            m.name: _Side(m, m.open(p, params, self.seed or 0), w)
            for m, p, w in zip(members, prompts, weights, strict=True)
        }
        self._active = [m.name for m in members]
        self._reference = self._sides[config.reference_name]
        self._counted, self._text = Encoding(), ""
        grammar, codec = params.answer_grammar(), self._reference.member.codec
        self._constraint = AnswerConstraint(grammar, codec, params.max_tokens) if grammar else None
        self._hold = StopHold(params.stops)
        self._rounds: list[RoundRecord] = []
        self._verified_rounds = 0
        self._began, self._prefilled, self._first = 0.0, 0.0, None  # type: float, float, float | None
        self.finished = False

    def start(self) -> Iterator[Event]:
        """Read the prompt into every member."""
        self._began = time.monotonic()
        for side in self._sides.values():
            with self._running(side):
                side.session.prefill()
        self._prefilled = time.monotonic() - self._began
        yield StartEvent(tuple(self._sides), self._reference.session.prompt_tokens)

    def step(self) -> Iterator[Event]:
        """Run one round; yield its events."""
        exits = self._leave_full_contexts()
        yield from map(ExitEvent, exits)
        if not self._active:
            yield from self._finish("", None, FinishReason.LENGTH, None)
        elif len(self._active) == 1 and self._constraint is None:
            yield from self._round_alone(exits)
        else:
            yield from self._round(exits)

    def release(self) -> None:
        for side in self._sides.values():
            side.session.release()

    # ── one round ────────────────────────────────────────────────────────────────────────────────

    def _round(self, exits: list[MemberExit]) -> Iterator[Event]:
        clock = [time.monotonic()]
        choices = self._draft()
        clock.append(time.monotonic())
        if not choices:
            yield from self._finish("", None, FinishReason.STOP, None)
            return
        verified = len(choices) > 1
        if verified:
            self._verify(choices)
        winner = max(choices, key=lambda c: c.score or 0.0)
        clock.append(time.monotonic())
        segment, reason = self._fit(winner)
        if reason is None:
            self._commit(segment)
        clock.append(time.monotonic())
        record = RoundRecord(
            index=len(self._rounds) + 1,
            active=tuple(self._active),
            candidates=tuple(c.record() for c in choices),
            winner=winner.drafters[0],
            text=segment,
            start=len(self._text),
            end=len(self._text) + len(segment),
            verified=verified,
            weights={name: self._sides[name].weight for name in self._active},
            retention={},
            exits=tuple(exits),
            timing=RoundTiming(*(b - a for a, b in itertools.pairwise(clock))),
        )
        if verified and reason is None:
            retention, left = self._learn(choices)
            record = replace(record, retention=retention, exits=(*exits, *left))
            exits = left
        else:
            exits = []
        yield from self._publish(record, winner.stop, reason)
        if not self.finished:
            yield from map(ExitEvent, exits)

    def _draft(self) -> list[_Choice]:
        """Every active member's candidate; equal ones count once.

        What the grammar dictates is every member's draft, and no model has to run for it.
        """
        if self._constraint is not None and (forced := self._constraint.forced()):
            reason = self._constraint.admit(forced, False).reason
            return [_Choice(forced, forced, False, None, list(self._active), 0, reason)]
        choices: list[_Choice] = []
        for name in self._active:
            side = self._sides[name]
            with self._running(side):
                draft = side.session.draft(self._config.segment_tokens, len(self._rounds) + 1)
            side.drafted += draft.tokens
            choice = self._choice(name, draft)
            same = next((c for c in choices if (c.scored, c.ends) == (choice.scored, choice.ends)), None)
            if same is not None:
                same.drafters.append(name)
            elif choice.text or choice.finishes:
                choices.append(choice)
        return choices

    def _choice(self, name: str, draft: Draft) -> _Choice:
        """A draft that completes a stop string ends there; it is scored with the string, without an end of turn."""
        match, known = find_stop(self._text, draft.text, self._params.stops), len(self._text)
        text = draft.text[: max(0, match.start - known)] if match else draft.text
        if self._constraint is not None and not (match and self._constraint.accepts(text)):
            admitted = self._constraint.admit(draft.text, draft.ends)
            return _Choice(admitted.text, admitted.text, admitted.ends, None, [name], draft.tokens, admitted.reason)
        if match is None:
            return _Choice(text, text, draft.ends, None, [name], draft.tokens)
        return _Choice(text, draft.text[: match.end - known], False, match, [name], draft.tokens)

    def _verify(self, choices: list[_Choice]) -> None:
        questions = [Question(c.scored, c.ends) for c in choices]
        for name in self._active:
            side = self._sides[name]
            with self._running(side):
                verdicts = side.session.verify(questions)
            for choice, verdict in zip(choices, verdicts, strict=True):
                # a verifier to which the candidate is invisible has no opinion on it
                choice.scores[name] = self._score(verdict.logprobs, verdict.token_bytes) if verdict.logprobs else 0.0
        table = [[c.scores[name] for c in choices] for name in self._active]
        for choice, score in zip(choices, self._aggregate(table, self._weights()), strict=True):
            choice.score = score

    def _commit(self, segment: str) -> None:
        for name in self._active:
            with self._running(self._sides[name]):
                self._sides[name].session.commit(segment)
        if self._constraint is not None:
            self._constraint.commit(segment)

    def _learn(self, choices: list[_Choice]) -> tuple[dict[str, float], list[MemberExit]]:
        """Update the verifiers' weights, then let members go."""
        self._verified_rounds += 1
        own = {name: next((c for c in choices if name in c.drafters), None) for name in self._active}
        matrix = [[c.scores[j] if (c := own[i]) else 0.0 for i in self._active] for j in self._active]
        weights = self._feedback(self._weights(), matrix, self._verified_rounds)
        for name, weight in zip(self._active, weights, strict=True):
            choice = own[name]
            self._sides[name].weight = weight
            self._sides[name].total += (choice.score or 0.0) if choice else 0.0
        decision = self._exit([self._sides[name].total for name in self._active], self._verified_rounds)
        retention = dict(zip(self._active, decision.retention, strict=True))
        leavers = [self._active[i] for i in decision.leavers]
        if len(leavers) >= len(self._active):
            leavers.remove(max(self._active, key=lambda name: retention[name]))
        exits = [MemberExit(n, len(self._rounds) + 1, "retention", retention[n]) for n in leavers]
        self._drop(leavers)
        return retention, exits

    def _round_alone(self, exits: list[MemberExit]) -> Iterator[Event]:
        """The last member decodes plainly: nothing to verify."""
        name = self._active[0]
        side, clock = self._sides[name], time.monotonic()
        limit = self._config.segment_tokens
        if side is self._reference:
            limit = min(limit, self._params.max_tokens - side.session.answer_tokens)
        before = side.session.answer_tokens
        with self._running(side):
            draft = side.session.draft_alone(limit, len(self._rounds) + 1)
        side.drafted += draft.tokens
        side.alone = before + draft.tokens
        choice = self._choice(name, draft)
        segment, reason = self._fit(choice, side.alone if side is self._reference else None)
        record = RoundRecord(
            index=len(self._rounds) + 1,
            active=(name,),
            candidates=(choice.record(),),
            winner=name,
            text=segment,
            start=len(self._text),
            end=len(self._text) + len(segment),
            verified=False,
            weights={name: 1.0},
            retention={},
            exits=tuple(exits),
            timing=RoundTiming(draft=time.monotonic() - clock),
        )
        yield from self._publish(record, choice.stop, reason)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    def _fit(self, choice: _Choice, own_count: int | None = None) -> tuple[str, FinishReason | None]:
        """The segment within `max_tokens`, and why the answer ends with it, if it does.

        `own_count`: tokens of the reference member where it decodes alone, which need no encoding of the text.
        """
        limit, reason = self._params.max_tokens, choice.reason or (FinishReason.STOP if choice.finishes else None)
        if own_count is not None:
            return choice.text, reason or (FinishReason.LENGTH if own_count >= limit else None)
        codec = self._reference.member.codec
        counted = codec.extend(self._counted, choice.text)
        if len(counted.ids) > limit:
            text = codec.head(counted, limit)
            self._counted = codec.extend(Encoding(), text)
            return text[len(self._text) :], FinishReason.LENGTH
        self._counted = counted
        return choice.text, reason or (FinishReason.LENGTH if len(counted.ids) == limit else None)

    def _publish(self, record: RoundRecord, stop: StopMatch | None, reason: FinishReason | None) -> Iterator[Event]:
        self._rounds.append(record)
        if reason is not None:
            yield from self._finish(record.text, stop, reason, record)
            return
        self._text += record.text
        yield self._segment(self._hold.feed(record.text), record)

    def _finish(
        self, segment: str, stop: StopMatch | None, reason: FinishReason, record: RoundRecord | None
    ) -> Iterator[Event]:
        """Release what was held back, up to the stop string, and close the answer."""
        if reason is FinishReason.LENGTH and self._constraint is not None and not self._constraint.accepts(segment):
            message = f"no room was left to complete the answer (max_tokens={self._params.max_tokens})"
            raise UnfinishedValueError(message, member=self._active[0] if self._active else "", text=self._text)
        self._text += segment
        if stop is not None and reason is FinishReason.STOP:
            self._text = self._text[: stop.start]
        else:
            stop = None
        shown = self._hold.finish(segment, len(self._text))
        if shown or record is not None:
            yield self._segment(shown, record)
        self.finished = True
        self.release()
        yield FinishEvent(self._result(reason, stop.stop if stop else None))

    def _segment(self, text: str, record: RoundRecord | None) -> SegmentEvent:
        if text and self._first is None:
            self._first = time.monotonic() - self._began
        end = self._hold.released
        return SegmentEvent(text, end - len(text), end, record)

    def _result(self, reason: FinishReason, stop: str | None) -> EnsembleResult:
        return EnsembleResult(
            text=self._text,
            finish_reason=reason,
            stop_sequence=stop,
            usage=self._usage(),
            rounds=tuple(self._rounds),
            members=tuple(self._sides),
            seed=self.seed,
            prefill_seconds=self._prefilled,
            first_segment_seconds=self._first,
            total_seconds=time.monotonic() - self._began,
        )

    def _usage(self) -> Usage:
        def usage(side: _Side) -> MemberUsage:
            answer = side.alone if side.alone is not None else len(side.member.codec.encode(self._text))
            return MemberUsage(side.session.prompt_tokens, side.drafted, side.session.fed, answer)

        members = {name: usage(side) for name, side in self._sides.items()}
        reference = self._reference.member.name
        return Usage(self._reference.session.prompt_tokens, members[reference].answer, reference, members)

    # ── who takes part ───────────────────────────────────────────────────────────────────────────

    def _weights(self) -> list[float]:
        return [self._sides[name].weight for name in self._active]

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            self._sides[name].session.release()
            self._active.remove(name)
        for name, weight in zip(self._active, normalised(self._weights() or [1.0]), strict=False):
            self._sides[name].weight = weight

    def _leave_full_contexts(self) -> list[MemberExit]:
        """Members without room for another round leave, so that the others can go on."""
        full = [name for name in self._active if self._is_full(self._sides[name])]
        self._drop(full)
        reason: Literal["context"] = "context"
        return [MemberExit(name, len(self._rounds) + 1, reason) for name in full]

    def _is_full(self, side: _Side) -> bool:
        limit = side.member.context_limit
        used = side.session.prompt_tokens + side.session.answer_tokens
        return limit is not None and used + self._room(len(self._active)) > limit

    def _room(self, members: int) -> int:
        """Free tokens that a round needs in every context."""
        return self._config.segment_tokens * (_ROOM_PER_TOKEN if members > 1 else 1)

    def _check_room(self, member: Member, count: int, members: int) -> None:
        room, limit = self._room(members), member.context_limit
        if limit is not None and count + room > limit:
            raise PromptTooLongError(member.name, limit, count, room)

    @contextmanager
    def _running(self, side: _Side) -> Iterator[None]:
        """Name the member in any failure, and keep the text so far."""
        try:
            yield
        except SpecFuseError:
            raise
        except Exception as error:
            name = side.member.name
            raise GenerationError(f"member {name!r} failed: {error}", member=name, text=self._text) from error
