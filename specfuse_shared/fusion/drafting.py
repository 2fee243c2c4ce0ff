"""What the members of a round say: all at once, or one first, whose draft the others take as a guess.

A guess changes no draft: a member says what it would have said, and where that is what the leader said, one forward
finds it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field

from specfuse_shared.fusion.answer_text import AnswerText
from specfuse_shared.fusion.lateness import Wanted
from specfuse_shared.fusion.leading import Lead, Traffic
from specfuse_shared.fusion.participants import Participants
from specfuse_shared.members.stages import (
    Draft,
    DraftAlone,
    Drafted,
    Op,
    StageResult,
    Value,
)
from specfuse_shared.settings.config import EnsembleConfig
from specfuse_shared.settings.sampling_params import SamplingParams
from specfuse_shared.text.grammars.constraint import AnswerConstraint
from specfuse_shared.text.tool_calls import ToolUse
from specfuse_shared.types import Candidate, FinishReason

Ops = Mapping[str, Op]
"""Stages to run, by member."""
Results = Mapping[str, StageResult]
"""What came of them, by member."""
Ask = Callable[[Ops], Generator[Wanted, Results, dict[str, Value]]]
"""Has stages run; the values of those that did not fail, in the order asked. Members that failed have left then, and
those that were late are absent."""


@dataclass(slots=True)
class DistinctCandidate:
    """A distinct candidate: the text that would be added, whether the turn ends behind it, and who drafted it.

    Stop strings are unknown to it: they cut the answer that would have been given.
    """

    text: str
    ends: bool
    drafters: list[str]
    tokens: int
    overrun: str = ""
    """What its first drafter began to say behind it."""
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
    """What stays the same in all rounds of an answer: its settings and policies, and how many rounds were verified."""

    def __init__(
        self,
        config: EnsembleConfig,
        params: SamplingParams,
        tools: ToolUse,
        constraint: AnswerConstraint | None,
        traffic: Traffic | None = None,
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
        self.lead = Lead(traffic)
        self.opened = False
        """Whether the first segment is over: behind what was clear before its end, it goes on."""

    def segment_limit(self, tokens: int) -> int:
        """The most tokens of the next drafts, behind an answer of so many."""
        first = 0 if self.opened else (self.config.first_segment_tokens or 0) - tokens
        return max(first, self.config.segment_tokens)


@dataclass(frozen=True, slots=True)
class RoundState:
    """What takes part in round `index` of an answer; members are asked for stages by `ask`."""

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

        What the grammar dictates is every member's draft, and no model has to run for it.
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
        left = [choice for choice in self._choices if choice.drafters]
        self._choices = sorted(left, key=lambda choice: self._who_drafted.index(choice.drafters[0]))
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
        """Who drafts: under a grammar those that shall, or everybody where nobody shall."""
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
        others = [name for name in self._drafters if name in self._state.present and name != leader]
        drafts.update((yield from self._state.ask({name: self._op(guess) for name in others})) if others else {})
        return drafts

    @property
    def min_tokens_left(self) -> int:
        """So many tokens have to come before a member may end its turn."""
        params = self._state.policies.params
        return sys.maxsize if params.ignore_eos else max(0, params.min_tokens - self._state.answer.tokens)

    def _count(self, name: str, draft: Drafted) -> None:
        side = self._state.participants[name]
        side.drafted += max(0, draft.tokens - self._drafted.get(name, 0))
        self._drafted[name] = draft.tokens
        if self.alone:
            side.alone = (side.alone or 0) + draft.tokens

    def _choice(self, name: str, draft: Drafted) -> DistinctCandidate:
        """A draft as far as the grammar admits it."""
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
