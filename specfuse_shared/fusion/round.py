"""One round: active members draft and verify, the best candidate is the segment, and weights change by the scores.

All members draft at once, or one member, the leader, drafts first. Then the others use its draft as a guess, as in
speculative decoding. A guess changes no draft: a member still drafts its own text. If that equals the leader's draft,
one forward pass is enough.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from specfuse_shared.candidate import RoundCandidate
from specfuse_shared.config import EnsembleConfig, SamplingParams
from specfuse_shared.fusion.answer_text import AnswerText, TrimmedSegment
from specfuse_shared.fusion.participants import LaneStats, LeaderPolicy, Ops, Participants
from specfuse_shared.fusion.repetition import ValueLoop, is_stuck, loop_of, repeats
from specfuse_shared.members.stages import (
    Draft,
    DraftAlone,
    Drafted,
    Op,
    ScoringQuery,
    Value,
    Verdicts,
    Verify,
)
from specfuse_shared.policies import Election, Electorate
from specfuse_shared.text.grammars.constraint import AnswerConstraint
from specfuse_shared.text.tool_calls import ToolUse
from specfuse_shared.types import FinishReason, MemberAbsence, RoundRecord, RoundTiming

Ask = Callable[[Ops], Awaitable[dict[str, Value]]]
"""Requests stages from members. Returns the values of those that answered, in the members' order.

Failed members have left the answer by then, and late ones are absent from the round.
"""


class AnswerContext:
    """Shared by all rounds of an answer: settings, policies, and state that one round leaves to the next."""

    def __init__(
        self,
        config: EnsembleConfig,
        params: SamplingParams,
        tools: ToolUse,
        constraint: AnswerConstraint | None,
        lane_stats: LaneStats | None = None,
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
        self.lead = LeaderPolicy(lane_stats)
        self.first_segment_done = False
        """Whether the first segment is complete. If it was decided early, the next round drafts the rest of it."""

    def segment_limit(self, tokens: int) -> int:
        """Maximum tokens of the next drafts of an answer that has `tokens` tokens."""
        first = 0 if self.first_segment_done else (self.config.first_segment_tokens or 0) - tokens
        return max(first, self.config.segment_tokens)

    def decodes_plainly(self, active: Sequence[str]) -> bool:
        """Whether one member is left and no grammar checks its drafts. Then it decodes without verification."""
        return len(active) == 1 and self.constraint is None


class Round:
    """Round `index` of an answer; `ask` requests stages from members.

    `run` does all its steps. Then the fields hold the result. `record`: None if no member had
    a draft. `segment`: the new text. `uncommitted`: text that members have to commit before they draft again.
    `closing`: text without an author that closes the answer. `loop`: the text that a list, string or call repeated,
    if that was closed. `judged`: the draft of a member that decodes alone, if its log-probabilities were requested.
    """

    def __init__(
        self, context: AnswerContext, participants: Participants, answer: AnswerText, index: int, ask: Ask
    ) -> None:
        self._context = context
        self._participants = participants
        self._answer = answer
        self._index = index
        self._ask = ask
        self._constraint = context.constraint
        self._alone = context.decodes_plainly(participants.active)
        self._before = tuple(participants.active)
        self._absent = {n: MemberAbsence(n) for n in self._before if n in participants.absent}
        self._exits = participants.take_exits()
        self._seconds = {"draft": 0.0, "verify": 0.0}
        self._leader: str | None = None
        self._drafters: list[str] = []
        """Members that drafted, in the ensemble's order, without late ones."""
        self._drafted_tokens: dict[str, int] = {}
        self._candidates: list[RoundCandidate] = []
        self._winner: RoundCandidate | None = None
        self.record: RoundRecord | None = None
        self.segment = TrimmedSegment("", None)
        self.uncommitted = ""
        self.closing = ""
        self.loop = ""
        self.judged: Drafted | None = None

    async def run(self) -> None:
        """Draft and verify until the winner is clear, then trim its text to the answer and learn from the scores.

        Members commit the segment with their next drafts, so that it is streamed without waiting for commits.
        """
        limit = self._context.segment_limit(self._answer.tokens)
        for tokens in self._context.config.draft_limits(limit):
            await self._draft(tokens)
            if len(self._candidates) > 1:
                await self._verify(tokens)
                if not self._present:  # all members that were on time have failed
                    self._winner = None
                    break
            if self._elect(tokens, limit):
                break
        if self._winner is None:
            self._end_without_draft()
        else:
            self._append(self._winner)

    # ── draft ────────────────────────────────────────────────────────────────────────────────────

    async def _draft(self, tokens: int) -> None:
        """Get every present member's candidate of at most `tokens` tokens; equal ones count once.

        The same drafts may be requested again with a higher limit. Then each one extends the previous one, except at a
        server that samples. Text that the grammar forces is every member's draft, without a forward pass.
        """
        began = time.monotonic()
        if self._constraint is not None and (forced := self._constraint.forced()):
            grammar_end = self._constraint.admit(forced, False).reason
            self._drafters = list(self._present)
            self._candidates = [RoundCandidate(forced, False, list(self._present), 0, grammar_end=grammar_end)]
        else:
            drafts = await self._ask_for_drafts(tokens)
            self._drafters = [name for name in self._present if name in drafts]
            self._candidates = self._distinct({name: drafts[name] for name in self._drafters})
        self._seconds["draft"] += time.monotonic() - began
        self._note_absent("draft", tokens)

    async def _ask_for_drafts(self, tokens: int) -> dict[str, Value]:
        """All drafts at once. With a leader, its draft comes first, and the others use it as a guess."""
        if self._alone:
            return await self._ask(self._plain_draft(tokens))
        names = self._willing
        speculates = self._context.config.speculation != "off"
        self._leader = self._context.lead.leader(self._participants, names, tokens) if speculates else None
        if self._leader is None:
            return await self._ask({name: self._draft_op(tokens) for name in names})
        drafts = await self._ask({self._leader: self._draft_op(tokens)})
        first = drafts.get(self._leader)
        guess = first.text + first.overrun if isinstance(first, Drafted) else ""
        followers = [name for name in self._willing if name in self._present and name != self._leader]
        if followers:
            drafts |= await self._ask({name: self._draft_op(tokens, guess) for name in followers})
        return drafts

    @property
    def _present(self) -> list[str]:
        return self._participants.present

    @property
    def _willing(self) -> list[str]:
        """The members that draft: under a grammar those with `drafts_under_grammar`, or all if none has it."""
        if self._constraint is None:
            return self._present
        willing = [n for n in self._present if self._participants[n].member.info.drafts_under_grammar]
        return willing or self._present

    def _draft_op(self, tokens: int, guess: str = "") -> Draft:
        return Draft(tokens, self._index, self._min_tokens_left, guess)

    def _plain_draft(self, tokens: int) -> dict[str, Op]:
        participant, params, top = self._participants[self._present[0]], self._context.params, None
        if participant is self._participants.reference:
            tokens = min(tokens, params.max_tokens - participant.counts.answer)
            top = params.top_logprobs if params.logprobs else None
        participant.alone = participant.counts.answer
        return {participant.member.name: DraftAlone(tokens, self._index, self._min_tokens_left, top)}

    @property
    def _min_tokens_left(self) -> int:
        """Tokens that are still required before a member may end its turn."""
        params = self._context.params
        return sys.maxsize if params.ignore_eos else max(0, params.min_tokens - self._answer.tokens)

    def _distinct(self, drafts: Mapping[str, Value]) -> list[RoundCandidate]:
        candidates: list[RoundCandidate] = []
        for name, draft in drafts.items():
            assert isinstance(draft, Drafted)
            self._count(name, draft)
            self.judged = draft if draft.logprobs else None
            candidate = self._candidate(name, draft)
            same = next((c for c in candidates if (c.text, c.ends) == (candidate.text, candidate.ends)), None)
            if same is not None:
                same.drafters.append(name)
            elif candidate.text or candidate.finishes or self._alone:
                candidates.append(candidate)
        return candidates

    def _count(self, name: str, draft: Drafted) -> None:
        participant = self._participants[name]
        participant.drafted += max(0, draft.tokens - self._drafted_tokens.get(name, 0))
        self._drafted_tokens[name] = draft.tokens
        if self._alone:
            participant.alone = (participant.alone or 0) + draft.tokens

    def _candidate(self, name: str, draft: Drafted) -> RoundCandidate:
        """The part of a draft that the grammar admits."""
        if self._constraint is None:
            ends = draft.ends and self._may_end(draft.text)
            return RoundCandidate(draft.text, ends, [name], draft.tokens, draft.overrun)
        admitted = self._constraint.admit(draft.text, draft.ends)
        overrun = draft.overrun if admitted.text == draft.text else ""
        return RoundCandidate(admitted.text, admitted.ends, [name], draft.tokens, overrun, admitted.reason)

    def _may_end(self, text: str) -> bool:
        """Whether the answer is long enough to end with `text`."""
        return (
            not self._min_tokens_left
            or self._alone
            or self._answer.tokens_with(text) >= self._context.params.min_tokens
        )

    def _note_absent(self, stage: Literal["draft", "verify"], tokens: int) -> list[str]:
        """Record and return the members that were late in this stage."""
        absent = self._participants.absent
        late = [name for name in self._before if name in absent and name not in self._absent]
        self._absent |= {name: MemberAbsence(name, stage, tokens) for name in late}
        return late

    # ── verify ───────────────────────────────────────────────────────────────────────────────────

    async def _verify(self, tokens: int) -> None:
        """Get every present member's log-probabilities. The draft of a late verifier does not count either."""
        began = time.monotonic()
        queries = tuple(ScoringQuery(c.text, c.ends, "" if c.ends else c.overrun) for c in self._candidates)
        judged = await self._ask({name: Verify(queries) for name in self._present})
        for name, verdicts in judged.items():
            assert isinstance(verdicts, Verdicts)
            for candidate, logprobs in zip(self._candidates, verdicts.each, strict=True):
                call_bytes = self._context.tools.opened_by(candidate.text, after=self._answer.text)
                candidate.logprobs[name] = replace(logprobs, call_bytes=call_bytes)
        self._seconds["verify"] += time.monotonic() - began
        if late := self._note_absent("verify", tokens):
            self._remove_drafters(late)

    def _remove_drafters(self, names: Collection[str]) -> None:
        self._drafters = [name for name in self._drafters if name not in names]
        for candidate in self._candidates:
            candidate.drafters = [name for name in candidate.drafters if name not in names]
        self._candidates = [candidate for candidate in self._candidates if candidate.drafters]
        self._candidates.sort(key=lambda candidate: self._drafters.index(candidate.drafters[0]))

    # ── elect ────────────────────────────────────────────────────────────────────────────────────

    def _elect(self, tokens: int, limit: int) -> bool:
        """Choose the winner. False: it is not clear yet, and members should draft more tokens."""
        candidates = self._candidates
        is_last = tokens == limit or (bool(candidates) and all(candidate.finishes for candidate in candidates))
        if len(candidates) > 1:
            election = self._election()
            self._winner = candidates[election.winner]
            margin = self._context.config.margin(whole=self._needs_whole_drafts)
            decided = is_last or election.is_clear(margin)
        else:
            self._winner = candidates[0] if candidates else None
            decided = is_last or (bool(candidates) and len(candidates[0].drafters) == len(self._drafters))
        if decided:
            self._context.first_segment_done = is_last
        return decided

    def _election(self) -> Election:
        """Score every candidate, and compare them."""
        for candidate in self._candidates:
            candidate.repeats = self._context.config.repetition_guard and self._repeats(candidate)
        whole = self._bound and all(candidate.finishes for candidate in self._candidates)
        weights = self._participants.weights
        election = Electorate(self._context.score, self._context.aggregate, weights, whole).elect(self._candidates)
        for index, candidate in enumerate(self._candidates):
            candidate.scores = {name: row[index] for name, row in zip(weights, election.scores, strict=True)}
            candidate.vote = election.votes[index]
        return election

    def _repeats(self, candidate: RoundCandidate) -> bool:
        if repeats(self._answer.text, candidate.text):
            return True
        loop = None if self._constraint is None else loop_of(self._answer.text, candidate.text)
        return loop is not None and loop.closer != ""

    @property
    def _needs_whole_drafts(self) -> bool:
        """Whether an early winner needs the higher margin, because candidates are better compared in full.

        One of them ends the answer or begins a tool call, or a grammar allows no free text.
        """
        tools, before = self._context.tools, self._answer.text
        return self._bound or any(c.finishes or tools.begins(before + c.text) for c in self._candidates)

    @property
    def _bound(self) -> bool:
        """Whether a grammar leaves no free text."""
        return self._constraint is not None and not self._context.tools.leaves_text

    # ── append ───────────────────────────────────────────────────────────────────────────────────

    def _append(self, winner: RoundCandidate) -> None:
        """Fit the winner's text into the answer, then update weights and members."""
        verified = len(self._candidates) > 1
        text, reason = self._text_of(winner)
        self.segment = self._answer.fit(text, reason, self._own_count())
        continues = self.segment.reason is None
        if continues and self._constraint is not None:
            self._constraint.commit(self.segment.text)
        weights = self._participants.weights
        self._context.lead.learn(winner.drafters, settled=not verified)
        retention = self._learn() if verified and continues else {}
        self.record = self._record(winner, weights, retention)
        if continues and not self._alone:
            self.uncommitted = self.segment.text

    def _end_without_draft(self) -> None:
        """No member had a draft. If a member left or was late, a new round asks the rest.

        Otherwise the answer ends, and a value under a grammar is closed.
        """
        began = len(self._before) - sum(absence.stage is None for absence in self._absent.values())
        if self._participants.active and len(self._present) < began:
            return
        if self._constraint is not None and not self._constraint.accepts(""):
            self.segment = TrimmedSegment(self._constraint.finish(), FinishReason.LENGTH)
        else:
            self.segment = TrimmedSegment("", FinishReason.STOP)

    def _text_of(self, winner: RoundCandidate) -> tuple[str, FinishReason | None]:
        """The winner's text and why it ends the answer, if it does.

        If the winner loops, so does every other plausible candidate, and the answer ends. Under a grammar the
        rest of the value is added. If a list or string loops, only that is closed, and the value continues. An ensemble
        of one member is never cut: it answers as without this package.
        """
        plain, answer, constraint = (winner.text, winner.reason), self._answer.text, self._constraint
        guards = self._context.config.repetition_guard and len(self._participants.by_name) > 1
        if not guards or self._min_tokens_left:
            return plain
        if constraint is not None and winner.reason is None and (loop := loop_of(answer, winner.text)) is not None:
            closed = self._closed(loop, constraint)
            if closed is not None:
                return closed
        if not is_stuck(answer, winner.text):
            return plain
        closing = "" if constraint is None else constraint.finish()
        if constraint is not None and not constraint.accepts(closing):
            return plain
        self.closing = closing
        return closing, FinishReason.REPETITION

    def _closed(self, loop: ValueLoop, constraint: AnswerConstraint) -> tuple[str, FinishReason | None] | None:
        """The first occurrence of the repeated text, with the text that closes the list or string.

        None if the grammar requires more. A looping tool call ends the answer, so that it is not executed.
        """
        text = loop.kept + loop.closer
        if not loop.closer:
            return text, None
        if self._context.tools.begins(self._answer.text + text):
            rest = constraint.finish_after(text)
            if rest is None:
                return None
            self.closing, self.loop = loop.closer + rest, loop.said
            return text + rest, FinishReason.REPETITION
        admitted = constraint.admit(text, False)
        if admitted.text != text or admitted.reason is FinishReason.LENGTH:
            return None
        self.loop = loop.said
        if admitted.reason is None:
            return text, None
        self.closing = loop.closer
        return text, FinishReason.REPETITION

    def _own_count(self) -> int | None:
        """Tokens of the answer, this round included, if the reference member decodes alone and so has their count."""
        participant = self._participants.reference
        return participant.alone if self._alone and participant.member.name in self._present else None

    def _record(
        self, winner: RoundCandidate, weights: Mapping[str, float], retention: Mapping[str, float]
    ) -> RoundRecord:
        start, text = len(self._answer.text), self.segment.text
        return RoundRecord(
            index=self._index,
            active=self._before,
            candidates=tuple(candidate.record() for candidate in self._candidates),
            winner=winner.drafters[0],
            text=text,
            start=start,
            end=start + len(text),
            verified=len(self._candidates) > 1,
            weights=weights,
            retention=retention,
            exits=(*self._exits, *self._participants.exits),
            timing=RoundTiming(self._seconds["draft"], self._seconds["verify"]),
            leader=self._leader,
            absent=tuple(self._absent.values()),
        )

    # ── learn ────────────────────────────────────────────────────────────────────────────────────

    def _learn(self) -> dict[str, float]:
        """Update the verifiers' weights, then drop members. Returns present members' retention."""
        context, participants, present = self._context, self._participants, self._present
        context.verified_rounds += 1
        drafted = {name: next((c for c in self._candidates if name in c.drafters), None) for name in present}
        matrix = [[c.scores[j] if (c := drafted[i]) else 0.0 for i in present] for j in present]
        weights = context.feedback(list(participants.weights.values()), matrix, context.verified_rounds)
        participants.weigh(weights, context.feedback_limit)
        gained = {name: (c.vote or 0.0) if (c := drafted[name]) else 0.0 for name in present}
        for name in participants.active:  # a late member gets the others' average
            participants[name].total += gained[name] if name in gained else sum(gained.values()) / len(gained)
        decision = context.exit([participants[name].total for name in present], context.verified_rounds)
        retention = dict(zip(present, decision.retention, strict=True)) if decision.retention else {}
        leavers = [present[i] for i in decision.leavers]
        if len(leavers) >= len(present):
            leavers.remove(max(present, key=lambda name: retention.get(name, participants[name].total)))
        participants.drop(leavers, self._index, "retention", retention)
        return retention
