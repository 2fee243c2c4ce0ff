"""One round: active members draft and verify, the best candidate is the segment, and weights learn from the scores.

Members draft all at once, or the leader drafts first and the others take its draft as a guess. A guess changes no
draft: a member still drafts its own text, but if that equals the leader's, one forward pass finds it.

Also scoring (the probability of given texts as the answer's beginning, without drafting) and the log-probabilities of
an answer's tokens.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from specfuse_shared.config import EnsembleConfig, SamplingParams
from specfuse_shared.errors import GenerationError
from specfuse_shared.events import EnsembleResult, Event, FinishEvent
from specfuse_shared.fusion.answer_text import AnswerText, TrimmedSegment
from specfuse_shared.fusion.participants import LaneStats, LeaderPolicy, Participants, Wanted
from specfuse_shared.fusion.repetition import ValueLoop, is_stuck, loop_of, repeats
from specfuse_shared.members.stages import (
    CandidateVerdict,
    Close,
    Draft,
    DraftAlone,
    Drafted,
    Fault,
    Member,
    Op,
    Open,
    ScoringQuery,
    StageResult,
    Value,
    Verdicts,
    Verify,
)
from specfuse_shared.messages import Message
from specfuse_shared.policies import CandidateLogprobs, Election, Electorate
from specfuse_shared.text.codec import Codec, Encoding
from specfuse_shared.text.grammars.constraint import AnswerConstraint
from specfuse_shared.text.tool_calls import ToolUse
from specfuse_shared.types import (
    Candidate,
    FinishReason,
    MemberAbsence,
    RoundRecord,
    RoundTiming,
    TokenLogprob,
    TopLogprob,
)

Ops = Mapping[str, Op]
"""Stages to run, by member."""
Results = Mapping[str, StageResult]
"""Results by member."""
Ask = Callable[[Ops], Generator[Wanted, Results, dict[str, Value]]]
"""Has stages run; the values of those that did not fail, in the order asked. Members that failed have left then, and
those that were late are absent."""


@dataclass(slots=True)
class DistinctCandidate:
    """A distinct candidate: its text, whether the turn ends after it, and its authors.

    Stop strings do not affect it. They cut the final answer.
    """

    text: str
    ends: bool
    drafters: list[str]
    tokens: int
    overrun: str = ""
    """The first author's text after the candidate."""
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


class AnswerPolicies:
    """Constants of all rounds of an answer: settings and policies; and the number of verified rounds."""

    def __init__(
        self,
        config: EnsembleConfig,
        params: SamplingParams,
        tools: ToolUse,
        constraint: AnswerConstraint | None,
        traffic: LaneStats | None = None,
    ) -> None:
        self.config = config
        self.params = params
        self.tools = tools
        self.constraint = constraint
        self.score = config.score_policy()
        self.aggregate = config.aggregate_policy()
        self.feedback = config.feedback_policy()
        self.feedback_limit = config.feedback_limit if isinstance(config.feedback, str) else None
        self.exit = config.exit_policy()
        self.verified_rounds = 0
        self.lead = LeaderPolicy(traffic)
        self.opened = False
        """Whether the first segment is complete: text that was clear before its end is followed by more."""

    def segment_limit(self, tokens: int) -> int:
        """Maximum tokens of the next drafts, after this number of answer tokens."""
        first = 0 if self.opened else (self.config.first_segment_tokens or 0) - tokens
        return max(first, self.config.segment_tokens)


@dataclass(frozen=True, slots=True)
class RoundState:
    """The state of round `index` of an answer; `ask` requests stages from members."""

    policies: AnswerPolicies
    participants: Participants
    answer: AnswerText
    index: int
    ask: Ask

    @property
    def present(self) -> list[str]:
        return self.participants.present

    @property
    def alone(self) -> bool:
        """Whether one member is left, which decodes plainly; a grammar binds it as it binds several."""
        return len(self.participants.active) == 1 and self.policies.constraint is None


class Drafting:
    """The drafts of a round. `leader`: who drafted first. `agreed`: all that drafted, and are present, said the same.

    Drafts that are asked for again, with a higher limit, begin as before. Members know what they drafted; only a server
    that samples drafts it anew.
    """

    def __init__(self, state: RoundState) -> None:
        self._state = state
        self._config = state.policies.config
        self._constraint = state.policies.constraint
        self.alone = state.alone
        self.leader: str | None = None
        self.judged: Drafted | None = None
        """The draft of a member that is alone, where it says what it thinks of it."""
        self._limit = 0
        self._choices: list[DistinctCandidate] = []
        self._who_drafted = list[str]()
        self._drafted = dict[str, int]()

    def run(self, limit: int) -> Generator[Wanted, Results, list[DistinctCandidate]]:
        """Every present member's candidate of at most `limit` tokens; equal ones count once.

        Text that the grammar forces is every member's draft, without a forward pass.
        """
        self._limit = limit
        if self._constraint is not None and (forced := self._constraint.forced()):
            over = self._constraint.admit(forced, False).reason
            self._who_drafted = list(self._state.present)
            self._choices = [DistinctCandidate(forced, False, list(self._who_drafted), 0, over=over)]
            return self._choices
        self.leader = leader = self._chosen_leader()
        drafts = (yield from self._led(leader)) if leader else (yield from self._state.ask(self._draft_ops()))
        drafts = {name: drafts[name] for name in self._state.present if name in drafts}
        self._who_drafted, self._choices = list(drafts), self._distinct(drafts)
        return self._choices

    @property
    def agreed(self) -> bool:
        return len(self._choices) == 1 and len(self._choices[0].drafters) == len(self._who_drafted)

    def without(self, names: Collection[str]) -> list[DistinctCandidate]:
        """The candidates, as if these members had not drafted."""
        self._who_drafted = [name for name in self._who_drafted if name not in names]
        for choice in self._choices:
            choice.drafters = [name for name in choice.drafters if name not in names]
        remaining = [choice for choice in self._choices if choice.drafters]
        self._choices = sorted(remaining, key=lambda choice: self._who_drafted.index(choice.drafters[0]))
        return self._choices

    def _distinct(self, drafts: Mapping[str, Value]) -> list[DistinctCandidate]:
        choices: list[DistinctCandidate] = []
        for name, draft in drafts.items():
            assert isinstance(draft, Drafted)
            self._count(name, draft)
            self.judged = draft if draft.judged else None
            choice = self._choice(name, draft)
            same = next((c for c in choices if (c.text, c.ends) == (choice.text, choice.ends)), None)
            if same is not None:
                same.drafters.append(name)
            elif choice.text or choice.finishes or self.alone:
                choices.append(choice)
        return choices

    def _draft_ops(self) -> dict[str, Op]:
        if not self.alone:
            return {name: self._op() for name in self._drafters}
        limit, side = self._limit, self._state.participants[self._state.present[0]]
        if side is self._state.participants.reference:
            limit = min(limit, self._state.policies.params.max_tokens - side.counts.answer)
        side.alone = side.counts.answer
        params = self._state.policies.params
        top = params.top_logprobs if params.logprobs and side is self._state.participants.reference else None
        return {side.member.name: DraftAlone(limit, self._state.index, self.min_tokens_left, top)}

    @property
    def _drafters(self) -> list[str]:
        """The drafting members: under a grammar the selected ones, or all if none is selected."""
        if self._constraint is None:
            return self._state.present
        willing = [n for n in self._state.present if self._state.participants[n].member.info.drafts_under_grammar]
        return willing or self._state.present

    def _op(self, guess: str = "") -> Draft:
        return Draft(self._limit, self._state.index, self.min_tokens_left, guess)

    # ── one first ────────────────────────────────────────────────────────────────────────────────

    def _chosen_leader(self) -> str | None:
        if self._config.speculation == "off" or self.alone:
            return None
        return self._state.policies.lead.leader(self._state.participants, self._drafters, self._limit)

    def _led(self, leader: str) -> Generator[Wanted, Results, dict[str, Value]]:
        """The leader's draft, then the others', to whom it is a guess."""
        drafts = yield from self._state.ask({leader: self._op()})
        first = drafts.get(leader)
        guess = first.text + first.overrun if isinstance(first, Drafted) else ""
        followers = [name for name in self._drafters if name in self._state.present and name != leader]
        drafts.update((yield from self._state.ask({name: self._op(guess) for name in followers})) if followers else {})
        return drafts

    @property
    def min_tokens_left(self) -> int:
        """Tokens that are still required before a member may end its turn."""
        params = self._state.policies.params
        return sys.maxsize if params.ignore_eos else max(0, params.min_tokens - self._state.answer.tokens)

    def _count(self, name: str, draft: Drafted) -> None:
        side = self._state.participants[name]
        side.drafted += max(0, draft.tokens - self._drafted.get(name, 0))
        self._drafted[name] = draft.tokens
        if self.alone:
            side.alone = (side.alone or 0) + draft.tokens

    def _choice(self, name: str, draft: Drafted) -> DistinctCandidate:
        """The part of a draft that the grammar admits."""
        if self._constraint is None:
            ends = draft.ends and self._may_end(draft.text)
            return DistinctCandidate(draft.text, ends, [name], draft.tokens, draft.overrun)
        admitted = self._constraint.admit(draft.text, draft.ends)
        overrun = draft.overrun if admitted.text == draft.text else ""
        return DistinctCandidate(admitted.text, admitted.ends, [name], draft.tokens, overrun, admitted.reason)

    def _may_end(self, text: str) -> bool:
        """Whether the answer is long enough to end with `text`."""
        return (
            not self.min_tokens_left
            or self.alone
            or self._state.answer.tokens_with(text) >= self._state.policies.params.min_tokens
        )


T = TypeVar("T")

Judged = Mapping[str, Sequence[CandidateVerdict]]
"""Each verifier's verdicts on the candidates, in their order."""


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """The result of a round: its record (None: no member had a draft), and its segment.

    `uncommitted`: text that members have to commit before they draft again. `closing`: the end of the segment without
    an author, if it ends the answer. `loop`: the text that a value repeated, if the value was closed. `judged`: the
    draft of a single member, with its log-probabilities if requested.
    """

    record: RoundRecord | None
    segment: TrimmedSegment
    uncommitted: str = ""
    closing: str = ""
    loop: str = ""
    judged: Drafted | None = None


@dataclass(frozen=True, slots=True)
class _Settled:
    """The winner's text as it becomes a segment, and why it ends the answer, if it does. See `RoundEnd`."""

    text: str
    reason: FinishReason | None
    closing: str = ""
    loop: str = ""


class Round:
    """One round; `run` is the whole of it."""

    def __init__(self, state: RoundState) -> None:
        self._state = state
        self._constraint = state.policies.constraint
        self._before = tuple(state.participants.active)
        self._absent = {n: MemberAbsence(n) for n in self._before if n in state.participants.absent}
        self._exits = state.participants.take_exits()
        self._drafting = Drafting(state)
        self._seconds = {"draft": 0.0, "verify": 0.0}

    def run(self) -> Generator[Wanted, Results, RoundEnd]:
        """Draft, verify, select, learn. The last member decodes plainly, without verification.

        Members commit the segment with their next drafts, so its readers do not wait for that.
        """
        choices, winner = yield from self._decide()
        if winner is None:
            return self._silent()
        judged = len(choices) > 1
        settled = self._settled(winner)
        segment = self._state.answer.fit(settled.text, settled.reason, self._own_count())
        goes_on = segment.reason is None
        if goes_on and self._constraint is not None:
            self._constraint.commit(segment.text)
        weights = self._state.participants.weights
        self._state.policies.lead.learn(winner.drafters, settled=len(choices) == 1)
        retention = self._learn(choices) if judged and goes_on else {}
        record = self._record(choices, winner, segment.text, weights, retention)
        uncommitted = segment.text if goes_on and not self._drafting.alone else ""
        return RoundEnd(record, segment, uncommitted, settled.closing, settled.loop, self._drafting.judged)

    def _silent(self) -> RoundEnd:
        """No member had anything to say: others are asked where one left or was late, else a value is closed."""
        began = len(self._before) - sum(absence.stage is None for absence in self._absent.values())
        if self._state.participants.active and len(self._state.present) < began:
            return RoundEnd(None, TrimmedSegment("", None))
        if self._constraint is not None and not self._constraint.accepts(""):
            return RoundEnd(None, TrimmedSegment(self._constraint.finish(), FinishReason.LENGTH))
        return RoundEnd(None, TrimmedSegment("", FinishReason.STOP))

    def _decide(self) -> Generator[Wanted, Results, tuple[list[DistinctCandidate], DistinctCandidate | None]]:
        """Candidates and the winner, as soon as it is clear; None: no member had a draft."""
        policies = self._state.policies
        config, limit = policies.config, policies.segment_limit(self._state.answer.tokens)
        for tokens in config.looks(limit):
            choices = yield from self._timed("draft", self._drafting.run(tokens))
            self._note_absent("draft", tokens)
            verdicts: Judged = {}
            if len(choices) > 1:
                verdicts = yield from self._timed("verify", self._judged(choices))
                choices, verdicts = self._without_late(choices, verdicts, tokens)
                if not verdicts:  # all that were on time have failed
                    return [], None
            is_last = tokens == limit or (bool(choices) and all(choice.finishes for choice in choices))
            if len(choices) > 1:
                election = self._elected(choices, verdicts)
                if is_last or election.is_clear(config.margin(tokens, whole=self._are_short(choices))):
                    policies.opened = is_last
                    return choices, choices[election.winner]
            elif is_last or self._drafting.agreed:
                policies.opened = is_last
                return choices, choices[0] if choices else None
        raise AssertionError("the last look decides")

    def _note_absent(self, stage: Literal["draft", "verify"], tokens: int) -> list[str]:
        """Who was late in this stage."""
        absent = self._state.participants.absent
        late = [name for name in self._before if name in absent and name not in self._absent]
        self._absent |= {name: MemberAbsence(name, stage, tokens) for name in late}
        return late

    def _without_late(
        self, choices: list[DistinctCandidate], verdicts: Judged, tokens: int
    ) -> tuple[list[DistinctCandidate], Judged]:
        """Who was late to judge is as if it had not drafted: the candidates without its own, and their verdicts."""
        if not (late := self._note_absent("verify", tokens)):
            return choices, verdicts
        remaining = self._drafting.without(late)
        places = [choices.index(choice) for choice in remaining]
        return remaining, {name: [each[place] for place in places] for name, each in verdicts.items()}

    def _are_short(self, choices: list[DistinctCandidate]) -> bool:
        """Whether candidates are better compared as wholes: one is over, or they are values of a grammar or calls."""
        tools, before = self._state.policies.tools, self._state.answer.text
        return self._bound or any(choice.finishes or tools.begins(before + choice.text) for choice in choices)

    @property
    def _bound(self) -> bool:
        """Whether a grammar leaves no free text."""
        return self._constraint is not None and not self._state.policies.tools.leaves_text

    def _timed(self, what: str, work: Generator[Wanted, Results, T]) -> Generator[Wanted, Results, T]:
        began = time.monotonic()
        done = yield from work
        self._seconds[what] += time.monotonic() - began
        return done

    def _record(
        self,
        choices: list[DistinctCandidate],
        winner: DistinctCandidate,
        segment: str,
        weights: Mapping[str, float],
        retention: Mapping[str, float],
    ) -> RoundRecord:
        start = len(self._state.answer.text)
        return RoundRecord(
            index=self._state.index,
            active=self._before,
            candidates=tuple(choice.record() for choice in choices),
            winner=winner.drafters[0],
            text=segment,
            start=start,
            end=start + len(segment),
            verified=len(choices) > 1,
            weights=weights,
            retention=retention,
            exits=(*self._exits, *self._state.participants.exits),
            timing=RoundTiming(self._seconds["draft"], self._seconds["verify"]),
            leader=self._drafting.leader,
            absent=tuple(self._absent.values()),
        )

    # ── verify and select ────────────────────────────────────────────────────────────────────────

    def _judged(self, choices: list[DistinctCandidate]) -> Generator[Wanted, Results, Judged]:
        """The verdicts of every present member on these candidates."""
        questions = tuple(ScoringQuery(c.text, c.ends, "" if c.ends else c.overrun) for c in choices)
        judged = yield from self._state.ask({name: Verify(questions) for name in self._state.present})
        return {name: _each(verdicts) for name, verdicts in judged.items()}

    def _elected(self, choices: list[DistinctCandidate], judged: Judged) -> Election:
        """Score every candidate, and compare them."""
        present = self._state.present
        table = [[self._seen(*pair) for pair in zip(choices, each, strict=True)] for each in judged.values()]
        drafters = [[present.index(name) for name in c.drafters if name in present] for c in choices]
        for choice in choices:
            choice.repeats = self._state.policies.config.repetition_guard and self._repeats(choice)
        weights = list(self._state.participants.weights.values())
        whole = self._bound and all(choice.finishes for choice in choices)
        voters = Electorate(self._state.policies.score, self._state.policies.aggregate, weights, whole)
        election = voters.elect(table, drafters, [c.repeats for c in choices])
        for index, choice in enumerate(choices):
            choice.scores = {name: row[index] for name, row in zip(judged, election.scores, strict=True)}
            choice.score = election.votes[index]
        return election

    def _seen(self, choice: DistinctCandidate, verdict: CandidateVerdict) -> CandidateLogprobs:
        """A candidate in the eyes of a verifier."""
        opened = self._state.policies.tools.opened_by(choice.text, after=self._state.answer.text)
        return CandidateLogprobs(choice.text, choice.ends, verdict.logprobs, verdict.token_bytes, opened)

    def _repeats(self, choice: DistinctCandidate) -> bool:
        answer = self._state.answer.text
        if repeats(answer, choice.text):
            return True
        loop = None if self._constraint is None else loop_of(answer, choice.text)
        return loop is not None and loop.closer != ""

    def _settled(self, winner: DistinctCandidate) -> _Settled:
        """The winner's text and the reason if it ends the answer; if every candidate loops, the text that closes the
        answer.

        The closing text is empty, or the rest of a value under a grammar. A list or string in a loop is closed by
        itself, and the value continues. A single member is never cut: it answers as without this package.
        """
        plain = _Settled(winner.text, winner.reason)
        guarded = (
            self._state.policies.config.repetition_guard
            and len(self._state.participants.sides) > 1
            and not self._drafting.min_tokens_left
        )
        if not guarded:
            return plain
        answer, constraint = self._state.answer.text, self._constraint
        loop = loop_of(answer, winner.text) if constraint is not None and winner.reason is None else None
        if constraint is not None and loop is not None and (closed := self._closed(loop, constraint)) is not None:
            return closed
        if not is_stuck(answer, winner.text):
            return plain
        closing = "" if constraint is None else constraint.finish()
        if constraint is not None and not constraint.accepts(closing):
            return plain
        return _Settled(closing, FinishReason.REPETITION, closing)

    def _closed(self, loop: ValueLoop, constraint: AnswerConstraint) -> _Settled | None:
        """The first occurrence of a loop and its closing text; None if the grammar requires more.

        A call is closed as a whole: text after a loop should not be executed.
        """
        text = loop.kept + loop.closer
        if not loop.closer:
            return _Settled(text, None)
        if self._state.policies.tools.begins(self._state.answer.text + text):
            rest = constraint.finish_after(text)
            return (
                None if rest is None else _Settled(text + rest, FinishReason.REPETITION, loop.closer + rest, loop.said)
            )
        admitted = constraint.admit(text, False)
        if admitted.text != text or admitted.reason is FinishReason.LENGTH:
            return None
        if admitted.reason is None:
            return _Settled(text, None, "", loop.said)
        return _Settled(text, FinishReason.REPETITION, loop.closer, loop.said)

    def _own_count(self) -> int | None:
        """Tokens of the answer with this round, where the reference member decodes alone and knows."""
        side = self._state.participants.reference
        return side.alone if self._drafting.alone and side.member.name in self._state.present else None

    # ── learn ────────────────────────────────────────────────────────────────────────────────────

    def _learn(self, choices: list[DistinctCandidate]) -> dict[str, float]:
        """Update the verifiers' weights, then let members go. Returns every member's retention."""
        policies, participants = self._state.policies, self._state.participants
        policies.verified_rounds += 1
        present = self._state.present
        drafted: dict[str, Any] = {n: next((c for c in choices if n in c.drafters), None) for n in present}
        matrix = [[c.scores[j] if (c := drafted[i]) else 0.0 for i in present] for j in present]
        weights = policies.feedback(list(participants.weights.values()), matrix, policies.verified_rounds)
        participants.weigh(weights, policies.feedback_limit)
        gained = {name: (choice.score or 0.0) if (choice := drafted[name]) else 0.0 for name in present}
        for name in participants.active:  # for who was late, the round counts as for the others on average
            participants[name].total += gained[name] if name in gained else sum(gained.values()) / len(gained)
        decision = policies.exit([participants[name].total for name in present], policies.verified_rounds)
        retention = dict(zip(present, decision.retention, strict=True)) if decision.retention else {}
        leavers = [present[i] for i in decision.leavers]
        if len(leavers) >= len(present):
            leavers.remove(max(present, key=lambda name: retention.get(name, participants[name].total)))
        participants.drop(leavers, self._state.index, "retention", retention)
        return retention


def _each(verdicts: Value) -> tuple[CandidateVerdict, ...]:
    assert isinstance(verdicts, Verdicts)
    return verdicts.each


class ScoringSession:
    """One prompt, put to members with texts that they shall judge; `scores` holds what each found.

    A session like `AnswerSession`, whose answer is empty. A member that fails has no scores; where all do, it raises
    `GenerationError`. Raises `RequestError` on construction if the request cannot be served.
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
        self._prompts = {name: self.participants.scoring_prompt(name, texts) for name in self.participants.sides}
        self._questions = tuple(ScoringQuery(text, False) for text in texts)
        thoughts = {name: len(prompt) - len(self.participants[name].prompt) for name, prompt in self._prompts.items()}
        self.max_tokens = max(thoughts[m.name] + len(m.codec.encode(text)) for m in members for text in texts)
        self.scores: dict[str, tuple[float, ...]] = {}
        self.events: deque[Event] = deque()
        self.finished = False

    def run(self) -> Generator[Wanted, Results, None]:
        """Yields stages by member, is sent their results."""
        began, sides = time.monotonic(), self.participants.sides
        params = SamplingParams(max_tokens=max(1, self.max_tokens))
        opened = yield Wanted({name: Open(prompt, params, 0) for name, prompt in self._prompts.items()})
        faults = {name: result.error for name, result in opened.items() if result.error is not None}
        ready = [name for name in sides if name not in faults]
        judged = (yield Wanted({name: Verify(self._questions) for name in ready})) if ready else {}
        for name in ready:
            if (fault := judged[name].error) is not None:
                faults[name] = fault
            elif isinstance(verdicts := judged[name].value, Verdicts):
                self.scores[name] = tuple(math.fsum(verdict.logprobs) for verdict in verdicts.each)
        yield Wanted({name: Close(remember=name in self.scores) for name in sides})
        self._finish(faults, time.monotonic() - began)

    def _finish(self, faults: Mapping[str, Fault], seconds: float) -> None:
        if not self.scores:
            name, fault = next(iter(faults.items()))
            what = f"member {name!r} could not judge the texts"
            raise GenerationError(f"{what}: {fault.message}", member=name, text="", public=f"{what} ({fault.kind})")
        self.finished = True
        usage = self.participants.usage("")
        members = tuple(self.participants.sides)
        result = EnsembleResult("", FinishReason.STOP, None, usage, (), members, None, 0.0, None, seconds)
        self.events.append(FinishEvent(result))


def token_logprobs(codec: Codec, text: str, verdict: CandidateVerdict) -> tuple[TokenLogprob, ...]:
    """The member's `verdict` on a whole text, token by token."""
    pieces = codec.pieces(text)
    tops = verdict.tops or [()] * len(pieces)
    alternatives = codec.alternatives(text, [[token for token, _ in top] for top in tops])
    return _told(pieces, verdict, alternatives)


class SegmentLogprobs:
    """Log-probabilities for the text of each segment, in order.

    `codec`: the judging member's. `told` counts the bytes of the reported tokens. A token that reaches into the next
    text is reported with that text. If a later encoding replaces a reported token, only its additional bytes are
    reported. `is_over`: a segment was not judged, so later ones have no position.
    """

    def __init__(self, codec: Codec) -> None:
        self.told = 0
        self.is_over = False
        self._codec = codec
        self._encoding = Encoding()
        self._waiting = deque[TokenLogprob]()
        self._shown = 0
        self._drafts: list[Drafted] = []
        self._drafted: tuple[int, ...] = ()

    def judged(self, text: str, verdict: CandidateVerdict) -> None:
        """The verdict on a segment that follows the previous ones."""
        before, after = self._encoding, self._codec.extend(self._encoding, text)
        pairs = enumerate(zip(before.ids, after.ids, strict=False))
        base = next((n for n, (one, two) in pairs if one != two), min(len(before.ids), len(after.ids)))
        pieces = self._codec.pieces_after(after.ids[:base], after.ids[base:], text)
        self._add(pieces, verdict)
        self._encoding = after

    def drafted(self, draft: Drafted) -> None:
        """A draft of the member itself, which was committed as it was drafted; its text may come with a later one."""
        self._drafts.append(draft)
        ids = tuple(token for each in self._drafts for token in each.ids)
        text, before = "".join(each.text for each in self._drafts), (*self._encoding.ids, *self._drafted)
        if self._codec.text_after(before, ids) != text:
            return
        pieces = deque(self._codec.pieces_after(before, ids, text))
        for each in self._drafts:
            assert each.judged is not None
            self._add([pieces.popleft() for _ in each.ids], each.judged)
        self._drafts, self._drafted = [], self._drafted + ids

    def take(self, text: str) -> tuple[TokenLogprob, ...]:
        """The tokens that end in `text`, which becomes visible now."""
        self._shown += len(text.encode())
        tokens = []
        while self._waiting and self.told + len(self._waiting[0].bytes) <= self._shown:
            tokens.append(self._waiting.popleft())
            self.told += len(tokens[-1].bytes)
        return tuple(tokens)

    def _add(self, pieces: Sequence[bytes], verdict: CandidateVerdict) -> None:
        alternatives = self._codec.spelled([[token for token, _ in top] for top in verdict.tops or [()] * len(pieces)])
        self._waiting.extend(_told(pieces, verdict, alternatives))


def logprobs_after(logprobs: Sequence[TokenLogprob], count: int) -> tuple[TokenLogprob, ...]:
    """The tokens of a whole answer that end after its first `count` bytes."""
    tokens, end = [], 0
    for token in logprobs:
        end += len(token.bytes)
        if end > count:
            tokens.append(token)
    return tuple(tokens)


def _told(
    pieces: Sequence[bytes], verdict: CandidateVerdict, alternatives: Sequence[Sequence[bytes]]
) -> tuple[TokenLogprob, ...]:
    tops = verdict.tops or [()] * len(pieces)
    return tuple(
        TokenLogprob(
            _shown(piece),
            logprob,
            tuple(piece),
            tuple(
                TopLogprob(_shown(alternative), chance, tuple(alternative))
                for alternative, (_, chance) in zip(spelled, top, strict=True)
            ),
        )
        for piece, logprob, top, spelled in zip(pieces, verdict.logprobs, tops, alternatives, strict=True)
    )


def _shown(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")
