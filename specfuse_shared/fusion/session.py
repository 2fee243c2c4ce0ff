"""One request: rounds of draft, verify, select, learn and exit, until the answer ends.

`AnswerSession` owns the state of one answer: its text, its rounds, and its `Participants`. It runs no
model. It awaits stages of members, whose requests and results are plain data without tensors.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from specfuse_shared.config import EnsembleConfig, SamplingParams
from specfuse_shared.errors import GenerationError, RequestError, UnfinishedValueError
from specfuse_shared.events import (
    EnsembleResult,
    Event,
    ExitEvent,
    FinishEvent,
    SegmentEvent,
    StartEvent,
    ThinkingEvent,
    WarningEvent,
)
from specfuse_shared.fusion.answer_text import AnswerText, TrimmedSegment
from specfuse_shared.fusion.participants import Deadline, LaneStats, Late, Ops, Participants, Results, Wanted
from specfuse_shared.fusion.repetition import loop_of
from specfuse_shared.fusion.round import AnswerContext, Round
from specfuse_shared.fusion.token_logprobs import SegmentLogprobs, logprobs_after, token_logprobs
from specfuse_shared.members.stages import (
    Close,
    Closed,
    Commit,
    Draft,
    Fault,
    Member,
    Op,
    Open,
    ScoringQuery,
    Think,
    Thought,
    Value,
    Verdicts,
    Verify,
)
from specfuse_shared.messages import Message
from specfuse_shared.text.grammars.constraint import AnswerConstraint
from specfuse_shared.text.tool_calls import ToolUse
from specfuse_shared.types import FinishReason, MemberFault, RoundRecord, StageName, TokenLogprob, Usage

_THINKING_PIECE = 16
"""Tokens of reasoning per event."""
_SEED_BITS = 32
"""Bits of the seed, if a sampled request has none."""


class AnswerSession:
    """One answer of the ensemble; `run` produces it, and `events` reports it.

    A member whose stage fails leaves the answer, and the others continue. Raises `RequestError` on construction, before
    any model runs, if the request cannot be served. `check` is called between the steps of construction, and raises if
    the answer is no longer needed.
    """

    def __init__(
        self,
        config: EnsembleConfig,
        members: Sequence[Member],
        messages: Sequence[Message],
        params: SamplingParams,
        tools: ToolUse | None = None,
        lane_stats: LaneStats | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._tools = tools = replace(tools or ToolUse(), otherwise=params.grammar)
        self._params = params = replace(params, grammar=tools.grammar())
        self.seed = params.seed if params.seed is not None or params.greedy else secrets.randbits(_SEED_BITS)
        self.participants = Participants(config, members, messages, tools.offered, check)
        codec, constraint = self.participants.reference.member.codec, None
        if params.grammar is not None:
            constraint = AnswerConstraint(params.grammar, codec, params.max_tokens)
            for member in members:
                check()
                member.text.prepare(params.grammar)
        self._answer = AnswerText(params, codec, constraint.is_value if constraint is not None else None)
        self._context = AnswerContext(config, params, tools, constraint, lane_stats)
        self._rounds: list[RoundRecord] = []
        self._thoughts: dict[str, str] = {}
        self._warnings: list[MemberFault] = []
        self._owed: dict[str, str] = {}
        """By member: text of the answer that it has to commit before it drafts again."""
        self._late = Late()
        self._round_ends: float | None = None
        self._closing = ""
        self._loops: list[str] = []
        self._logprobs = SegmentLogprobs(codec) if params.logprobs else None
        self._began = time.monotonic()
        self._prefilled = 0.0
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

    async def run(self) -> None:
        """Awaits stages of members; ends when the answer does. Raises `GenerationError`.

        The result is reported after all members, except late ones, have freed their caches of the answer.
        """
        self._began = time.monotonic()
        self._round_ends = self._end_of_round()
        await self._ask(self._opening())
        self._round_ends = None  # reasoning has no deadline
        self._prefilled = time.monotonic() - self._began
        self.events.append(StartEvent(tuple(self._active), len(self.participants.reference.prompt)))
        await self._think()
        last = await self._run_rounds()
        end = TrimmedSegment("", FinishReason.LENGTH) if last is None else last.segment
        self._finish(end, last)
        self._record_last_exits()
        pending_text = self._hold_last_text()
        usage = self.participants.usage(self.text)
        if closes := {**self.participants.take_closes(), **{name: Close(remember=True) for name in self._active}}:
            await Wanted(closes, unwaited=self._release_late(closes))
        logprobs = await self._score() if self._params.logprobs else None
        self.events.extend(self._with_the_rest(event, logprobs) for event in pending_text)
        self.events.append(FinishEvent(self._result(end, usage, logprobs)))

    async def _run_rounds(self) -> Round | None:
        """Rounds until the answer ends. Returns the last one, or None if no member is left."""
        while True:
            await self._prepare_round()
            self.events.extend(map(ExitEvent, self.participants.exits))
            if not self._active:
                return None
            current = Round(self._context, self.participants, self._answer, self._round_number, self._ask)
            await current.run()
            self._late.count(self._active, self.participants.absent)
            self._loops += [current.loop] if current.loop else []
            if self._logprobs is not None and current.segment.reason is None:
                await self._judge(current, self._logprobs)
            self._publish(current)
            if current.segment.reason is not None:
                return current
            if current.uncommitted:
                self._owed |= {name: self._owed.get(name, "") + current.uncommitted for name in self._active}

    @property
    def _active(self) -> list[str]:
        return self.participants.active

    @property
    def _round_number(self) -> int:
        """Number of the round that runs, or that begins next."""
        return len(self._rounds) + 1

    def _end_of_round(self) -> float | None:
        seconds = self._context.config.round_seconds
        return None if seconds is None else time.monotonic() + seconds

    async def _prepare_round(self) -> None:
        """Begin a round without the members that are still late. If all are late, wait for one of them."""
        config, late = self._context.config, self._late.running
        for name in self._late.lost(config.late_rounds, config.late_rounds * (config.round_seconds or 0.0)):
            if set(self._active) - late.keys():
                self._leave_late(name)
        while True:
            self.participants.absent, self._round_ends = set(late), self._end_of_round()
            # commit first: plain decoding and `drop_full` need the number of committed tokens
            plain = self._context.decodes_plainly(self._active)
            if self.participants.present and (plain or self.participants.may_be_full(self._owed)):
                await self._ask({})
            self.participants.drop_full(self._round_number)
            if self.participants.present or not self._active:
                return
            closes = self.participants.take_closes()
            self._take_results(await Wanted(closes, unwaited=self._release_late(closes)))

    def _opening(self) -> dict[str, Op]:
        seed, speculates = self.seed or 0, self._context.config.speculation == "auto"
        return {n: Open(self.participants[n].prompt, self._params, seed, speculates) for n in self._active}

    async def _think(self) -> None:
        """Members that think do so in parallel, each for itself. The answer begins when all are done."""
        thinking = {n: self.participants.thinking_limit(n, self.max_thinking_tokens) for n in self._active}
        thinking = {n: limit for n, limit in thinking.items() if self.participants[n].member.info.thinks}
        while thinking:
            thoughts = await self._ask({n: Think(_THINKING_PIECE, limit) for n, limit in thinking.items()})
            for name, thought in thoughts.items():
                assert isinstance(thought, Thought)
                self._thoughts[name] = self._thoughts.get(name, "") + thought.text
                if thought.text:
                    self.events.append(ThinkingEvent(name, thought.text))
                if thought.ended:
                    del thinking[name]
            thinking = {n: limit for n, limit in thinking.items() if n in thoughts}

    async def _ask(self, ops: Ops) -> dict[str, Value]:
        """Run stages and return their values, in the members' order. Members that fail leave the answer.

        Members that left earlier get a `Close`. Text that is not committed yet is sent along: within drafts, or as a
        `Commit` to members without a stage here. Members that are late are absent from then on.
        """
        sent = self._with_commits(ops)
        if not sent:
            return {}
        closes = self.participants.take_closes()
        results = await Wanted({**closes, **sent}, self._deadline(sent), self._release_late(closes))
        values: dict[str, Value] = {}
        self._take_results(results)
        for name, op in sent.items():
            if name not in results:
                self._late.add(name, op)
                self.participants.absent.add(name)
            elif (fault := results[name].error) is not None:
                self._drop_failed(name, op.stage, fault)
            elif name in ops:
                values[name] = results[name].value
        return values

    def _with_commits(self, ops: Ops) -> Ops:
        owed = {name: text for name in self.participants.present if (text := self._owed.pop(name, ""))}
        drafts = {n: replace(op, commit=owed[n]) for n, op in ops.items() if n in owed and isinstance(op, Draft)}
        assert drafts.keys() == owed.keys() & ops.keys(), "text has to be committed before anything else"
        merged: dict[str, Op] = {**ops, **{name: Commit(text) for name, text in owed.items()}, **drafts}
        return {name: merged[name] for name in self._active if name in merged}

    def _deadline(self, ops: Ops) -> Deadline | None:
        """When members count as late for these stages; None if the answer waits for all."""
        lane_stats = self._context.lead.lane_stats
        if self._round_ends is None or lane_stats is None or len(self._active) == 1:
            return None
        present = self.participants.present
        return Deadline(
            self._round_ends,
            self._context.config.round_grace,
            {name: lane_stats.clock_of(name) for name in present},
            frozenset(present) - ops.keys(),
            frozenset(n for n, op in ops.items() if isinstance(op, Open) and self.participants[n].member.info.thinks),
        )

    def _take_results(self, results: Results) -> None:
        """Take results. Late members among them are back, or have failed in the meantime."""
        for name, result in results.items():
            self.participants[name].counts = result.counts
            op = self._late.running.pop(name, None)
            if op is None or isinstance(result.value, Closed):
                continue
            if result.error is not None:
                self._drop_failed(name, op.stage, result.error)
            elif not self.participants.holds(name, self.text):
                self.participants.drop([name], self._round_number, "context")

    def _release_late(self, closes: Ops) -> frozenset[str]:
        """Stop tracking the late members among `closes`, and return them.

        The answer does not wait until they have closed. It does wait for the reference member if that scores it next.
        """
        judge = self.participants.reference.member.name if self._params.logprobs else None
        late = frozenset(name for name in closes if name in self._late.running and name != judge)
        for name in late:
            del self._late.running[name]
        return late

    def _leave_late(self, name: str) -> None:
        rounds, stage = self._late.missed[name], self._late.running[name].stage
        self.participants.drop([name], self._round_number, "late")
        message = f"member {name!r} was late for {rounds} rounds in a row and left the answer"
        self._warn(name, stage, message, TimeoutError.__name__)

    def _drop_failed(self, name: str, stage: StageName, fault: Fault) -> None:
        if self._active == [name]:
            what, why = f"member {name!r} failed in {stage}", "no member is left"
            public = f"{what} ({fault.kind}; {why})"
            message = f"{what}: {fault.message} ({why})"
            error = GenerationError(message, member=name, text=self.text, public=public)
            error.add_note(fault.details)
            raise error
        self.participants.drop([name], self._round_number, "fault")
        self._warn(name, stage, f"member {name!r} failed in {stage} and left the answer: {fault.message}", fault.kind)

    def _warn(self, name: str, stage: StageName, message: str, kind: str) -> None:
        self._warnings.append(MemberFault(name, stage, message, kind))
        self.events.append(WarningEvent(name, stage, message, kind))

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    async def _judge(self, current: Round, logprobs: SegmentLogprobs) -> None:
        """Get the reference member's log-probabilities of a segment, while that member takes part.

        Once it has missed a segment, `_score` gets the rest with the whole answer.
        """
        name, text = self.participants.reference.member.name, current.segment.text
        if logprobs.is_over:
            return
        if current.judged is not None:
            logprobs.drafted(current.judged)
        elif text and name in self.participants.present:
            if name in self._owed:  # text that a grammar forces is committed with the next draft
                await self._ask({})
            verify = Verify((ScoringQuery(text, False),), top=self._params.top_logprobs)
            verdicts = (await self._ask({name: verify})).get(name) if name in self.participants.present else None
            if isinstance(verdicts, Verdicts):
                logprobs.judged(verdicts)
            else:
                logprobs.is_over = True
        elif text:
            logprobs.is_over = True

    def _hold_last_text(self) -> list[Event]:
        """Take back the event of the last text, which waits for its log-probabilities."""
        if self._logprobs is None or not self.events or not isinstance(self.events[-1], SegmentEvent):
            return []
        return [self.events.pop()]

    def _with_the_rest(self, event: Event, logprobs: Sequence[TokenLogprob] | None) -> Event:
        """The event of the last text, with all log-probabilities that were not reported yet."""
        assert isinstance(event, SegmentEvent)
        assert self._logprobs is not None
        return replace(event, logprobs=logprobs_after(logprobs or (), self._logprobs.reported))

    def _publish(self, current: Round) -> None:
        """Emit the round; `_finish` emits the last one."""
        if current.record is None:
            return
        self._rounds.append(current.record)
        if current.segment.reason is None:
            event = self._answer.add(current.record.text, current.record)
            if self._logprobs is not None:
                event = replace(event, logprobs=self._logprobs.take(event.text))
            self.events.append(event)
            self.events.extend(map(ExitEvent, self.participants.take_exits()))

    def _record_last_exits(self) -> None:
        """Add members that left after the last round, for example with a full context, to its record."""
        if self._rounds:
            recorded = self._rounds[-1].exits
            gone_now = [gone for gone in self.participants.take_exits() if gone not in recorded]
            self._rounds[-1] = replace(self._rounds[-1], exits=(*recorded, *gone_now))

    def _finish(self, end: TrimmedSegment, last: Round | None) -> None:
        """Emit the text that was held back, up to the stop string.

        An answer may end within a tool call. Raises `UnfinishedValueError` if another value is incomplete.
        """
        is_cut = end.reason in (FinishReason.LENGTH, FinishReason.REPETITION)
        constraint = self._context.constraint if end.stop is None else None
        unfinished = constraint is not None and not constraint.accepts(end.text)
        if is_cut and constraint is not None:
            closing = "" if last is None else last.closing
            self._closing = closing or (end.text if end.text == constraint.finish() else "")
        event = self._answer.finish(end, None if last is None else last.record)
        if event is not None:
            self.events.append(event)
        if unfinished and not self._tools.begins(self.text):
            message = f"the answer could not be completed: {self._why_unfinished(last, is_cut)}"
            member, usage = self._active[0] if self._active else None, self.participants.usage(self.text)
            raise UnfinishedValueError(message, member=member, text=self.text, usage=usage)
        self.finished = True

    def _why_unfinished(self, last: Round | None, is_cut: bool) -> str:
        """Why the value is incomplete, and the text that it repeated, if any."""
        if last is None:
            return "no member has context left: shorten the prompt, or raise max_context"
        loop = loop_of("", self.text)
        looped = f" (the answer repeated {loop.said[:80]!r})" if loop is not None and loop.closer else ""
        if not is_cut or last.record is None:
            return f"no member produced a valid continuation{looped}"
        return f"max_tokens={self._params.max_tokens} was too small{looped}"

    async def _score(self) -> tuple[TokenLogprob, ...] | None:
        """Log p of the answer's tokens by the reference member, which reads the answer again, after its reasoning.

        They describe the final text, as it was cut, no matter which member wrote it and whether the reference member
        left the answer. None if the member fails.
        """
        participant = self.participants.reference
        name, verdicts = participant.member.name, None
        verify = Verify((ScoringQuery(self.text, False),), top=self._params.top_logprobs)
        try:
            prompt = self.participants.scoring_prompt(name, [self.text], self._thoughts.get(name, ""))
        except RequestError as error:
            self._warn(name, "score", f"member {name!r} could not score the answer: {error}", type(error).__name__)
            return None
        for op in (Open(prompt, replace(self._params, grammar=None), 0), verify):
            result = (await Wanted({name: op}))[name]
            if result.error is not None:
                message = f"member {name!r} could not score the answer: {result.error.message}"
                self._warn(name, "score", message, result.error.kind)
                break
            verdicts = result.value
        await Wanted({name: Close()})
        if not isinstance(verdicts, Verdicts):
            return None
        return token_logprobs(participant.member.codec, verdicts)

    def _result(self, last: TrimmedSegment, usage: Usage, logprobs: tuple[TokenLogprob, ...] | None) -> EnsembleResult:
        assert last.reason is not None, "the answer has not ended"
        return EnsembleResult(
            text=self.text,
            finish_reason=FinishReason.REPETITION if self._loops and last.reason is FinishReason.STOP else last.reason,
            stop_sequence=last.stop.stop if last.stop else None,
            usage=usage,
            rounds=tuple(self._rounds),
            members=tuple(self.participants.by_name),
            seed=self.seed,
            prefill_seconds=self._prefilled,
            first_segment_seconds=self._answer.first_seconds,
            total_seconds=time.monotonic() - self._began,
            logprobs=logprobs,
            thinking=dict(self._thoughts),
            warnings=tuple(self._warnings),
            closing=self._closing,
            loops=tuple(self._loops),
        )


class ScoringSession:
    """One prompt and texts that the members score as answers to it. `scores`: by member, log p of each text.

    It has the interface of `AnswerSession`, with an empty answer. A member that fails has no scores. If all fail, `run`
    raises `GenerationError`. Raises `RequestError` on construction if the request cannot be served.
    """

    text = ""
    max_thinking_tokens = 0

    def __init__(
        self,
        config: EnsembleConfig,
        members: Sequence[Member],
        messages: Sequence[Message],
        texts: Sequence[str],
        tools: ToolUse,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.participants = Participants(config, members, messages, tools.offered, check)
        self._prompts = {name: self.participants.scoring_prompt(name, texts) for name in self.participants.by_name}
        self._questions = tuple(ScoringQuery(text, False) for text in texts)
        thoughts = {name: len(prompt) - len(self.participants[name].prompt) for name, prompt in self._prompts.items()}
        self.max_tokens = max(thoughts[m.name] + len(m.codec.encode(text)) for m in members for text in texts)
        self.scores: dict[str, tuple[float, ...]] = {}
        self.events: deque[Event] = deque()
        self.finished = False

    async def run(self) -> None:
        """Awaits stages of members."""
        began, by_name = time.monotonic(), self.participants.by_name
        params = SamplingParams(max_tokens=max(1, self.max_tokens))
        opened = await Wanted({name: Open(prompt, params, 0) for name, prompt in self._prompts.items()})
        faults = {name: result.error for name, result in opened.items() if result.error is not None}
        ready = [name for name in by_name if name not in faults]
        judged = await Wanted({name: Verify(self._questions) for name in ready}) if ready else {}
        for name in ready:
            if (fault := judged[name].error) is not None:
                faults[name] = fault
            elif isinstance(verdicts := judged[name].value, Verdicts):
                self.scores[name] = tuple(math.fsum(verdict.logprobs) for verdict in verdicts.each)
        await Wanted({name: Close(remember=name in self.scores) for name in by_name})
        self._finish(faults, time.monotonic() - began)

    def _finish(self, faults: Mapping[str, Fault], seconds: float) -> None:
        if not self.scores:
            name, fault = next(iter(faults.items()))
            what = f"member {name!r} could not judge the texts"
            raise GenerationError(f"{what}: {fault.message}", member=name, text="", public=f"{what} ({fault.kind})")
        self.finished = True
        usage = self.participants.usage("")
        members = tuple(self.participants.by_name)
        result = EnsembleResult("", FinishReason.STOP, None, usage, (), members, None, 0.0, None, seconds)
        self.events.append(FinishEvent(result))
