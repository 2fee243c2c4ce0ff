"""One round: the active members draft and verify, the best candidate is the segment, and they learn from the scores."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from specfuse_shared.fusion.answer_text import TrimmedSegment
from specfuse_shared.fusion.drafting import DistinctCandidate, Drafting, Results, RoundState
from specfuse_shared.fusion.lateness import Wanted
from specfuse_shared.fusion.repetition import is_stuck, repeats
from specfuse_shared.fusion.value_loops import ValueLoop, loop_of
from specfuse_shared.members.stages import CandidateVerdict, Drafted, ScoringQuery, Value, Verdicts, Verify
from specfuse_shared.policies import CandidateLogprobs, Election, Electorate
from specfuse_shared.text.grammars.constraint import AnswerConstraint
from specfuse_shared.types import FinishReason, MemberAbsence, RoundRecord, RoundTiming

T = TypeVar("T")

Judged = Mapping[str, Sequence[CandidateVerdict]]
"""Each verifier's verdicts on the candidates, in their order."""


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """What a round came to: its record (None: nobody had anything to say), and its segment.

    `uncommitted`: text that members have to commit before they draft again. `closing`: the end of the segment that no
    member wrote, if it ends the answer. `loop`: what a value said again and again, where it was closed. `judged`: the
    draft of a member that is alone, with its log-probabilities, where they are asked for.
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
        """Draft, verify, select, learn. The last member alone decodes plainly: there is nothing to verify.

        Members commit the segment with their next drafts, so that nobody who reads it waits for that.
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
        """Candidates and the one that wins, as soon as that is clear; None: nobody had anything to say."""
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
        left = self._drafting.without(late)
        places = [choices.index(choice) for choice in left]
        return left, {name: [each[place] for place in places] for name, each in verdicts.items()}

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
        opened = self._state.policies.tools.opened_by(choice.text, behind=self._state.answer.text)
        return CandidateLogprobs(choice.text, choice.ends, verdict.logprobs, verdict.token_bytes, opened)

    def _repeats(self, choice: DistinctCandidate) -> bool:
        said = self._state.answer.text
        if repeats(said, choice.text):
            return True
        loop = None if self._constraint is None else loop_of(said, choice.text)
        return loop is not None and loop.closer != ""

    def _settled(self, winner: DistinctCandidate) -> _Settled:
        """The winner's text and why it ends the answer; where all that is left is a circle, what closes the answer.

        That is nothing, or the rest of a value under a grammar. A list or string in a loop is closed by itself, and
        the value goes on. A single member is never cut short: alone, it answers as it always does.
        """
        plain = _Settled(winner.text, winner.reason)
        guarded = (
            self._state.policies.config.repetition_guard
            and len(self._state.participants.sides) > 1
            and not self._drafting.min_tokens_left
        )
        if not guarded:
            return plain
        said, constraint = self._state.answer.text, self._constraint
        loop = loop_of(said, winner.text) if constraint is not None and winner.reason is None else None
        if constraint is not None and loop is not None and (closed := self._closed(loop, constraint)) is not None:
            return closed
        if not is_stuck(said, winner.text):
            return plain
        closing = "" if constraint is None else constraint.finish()
        if constraint is not None and not constraint.accepts(closing):
            return plain
        return _Settled(closing, FinishReason.REPETITION, closing)

    def _closed(self, loop: ValueLoop, constraint: AnswerConstraint) -> _Settled | None:
        """What a loop said once, and what closes it; None where the grammar demands more.

        A call is closed as a whole: nobody shall carry out what goes on behind a loop.
        """
        text = loop.kept + loop.closer
        if not loop.closer:
            return _Settled(text, None)
        if self._state.policies.tools.begins(self._state.answer.text + text):
            rest = constraint.finish_behind(text)
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
        """Update the verifiers' weights, then let members go; everyone's retention."""
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
