"""The participants of one answer: each member's state, weight and exit, the leader of a round, and late members.

Members without space refuse a prompt before any model runs, and leave once their context is full.

In some rounds one member, the leader, drafts first, and the others use its draft as a guess. If members run one after
another, this saves the others time, except on an accelerator that runs at least as many answers as it has members. If
members run in parallel, they draft at the same time, unless a leader saves more than it costs. That depends on the cost
of their forward passes, and on how often one draft settled a recent round. With few answers, a round with a leader must
be shorter than one without. With many, which keep all lanes busy, its cost summed over the members must be clearly
lower. Seconds are measured and rounded, so that runs with the same seed rarely have different leaders.

A round may have a deadline (`EnsembleConfig.round_seconds`). A member that has not answered by then, while others
wait, misses the round. Its stage continues. Once that is done the member is back, and commits the missed text before
it drafts again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specfuse_shared.config import EnsembleConfig
from specfuse_shared.errors import PromptTooLongError, RequestError
from specfuse_shared.members.stages import NOTHING_YET, Close, Member, Op, StageResult, TokenCounts
from specfuse_shared.messages import Message, Tool
from specfuse_shared.policies import first_weights, normalised
from specfuse_shared.types import ExitReason, MemberExit, MemberUsage, Usage

_BYTES_PER_TOKEN = 8
"""A token of one member may take this many of another's (Chinese, emoji); kept free in every context."""
_REENCODED = 16
"""A text takes at most one token per byte. Text before it takes at most this many more tokens than before."""


@dataclass(slots=True)
class Participant:
    """A member's part in an answer. `first`: its weight at the start; `counts`: its lane's last report."""

    member: Member
    prompt: tuple[int, ...]
    first: float
    weight: float
    counts: TokenCounts = NOTHING_YET
    total: float = 0.0
    drafted: int = 0
    alone: int | None = None
    """Tokens of the whole answer, where the member ended it by decoding alone."""


class Participants:
    """All `members` of an answer, `by_name`; the names of those that are `active`, in the members' order, and of those
    among them that sit this round out (`absent`).

    Raises `RequestError` on construction, before any model runs, if the request cannot be served.
    """

    def __init__(
        self,
        config: EnsembleConfig,
        members: Sequence[Member],
        messages: Sequence[Message],
        tools: Sequence[Tool],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._segment = config.longest_segment
        min_tokens = sum(1 for message in messages if message.content.strip())  # each takes a token or more
        for member in members:
            self._check_capacity(member, min_tokens, len(members), at_least=True)
        prompts: list[tuple[int, ...]] = []
        for member in members:
            check()
            prompts.append(tuple(member.encode_prompt(messages, tools)))
            self._check_capacity(member, len(prompts[-1]), len(members))
        sizes = [member.info.report.parameters for member in members]
        weights = first_weights([member.info.weight for member in members], sizes, config.first_weights == "size")
        self.by_name = {m.name: Participant(m, p, w, w) for m, p, w in zip(members, prompts, weights, strict=True)}
        self.active = [member.name for member in members]
        self.absent = set[str]()
        self.reference = self.by_name[config.reference_name]
        self._exits: list[MemberExit] = []
        self._leaving: dict[str, Close] = {}

    def __getitem__(self, name: str) -> Participant:
        return self.by_name[name]

    @property
    def present(self) -> list[str]:
        """The active members that take part in this round."""
        return [name for name in self.active if name not in self.absent]

    @property
    def weights(self) -> dict[str, float]:
        """Of the present members; they sum to 1."""
        present = self.present
        weights = [self[name].weight for name in present]
        return dict(zip(present, weights if len(present) == len(self.active) else normalised(weights), strict=True))

    def weigh(self, weights: Sequence[float], limit: float | None) -> None:
        """New weights of the present members; the ratio of two grows at most by `limit` over its first value.

        Absent members keep theirs, within that limit.
        """
        if len(present := self.present) < len(self.active):
            mass = sum(self[name].weight for name in present)
            new = {name: mass * weight for name, weight in zip(present, weights, strict=True)}
            weights = [new.get(name, self[name].weight) for name in self.active]
        if limit is not None:
            first = [self[name].first for name in self.active]
            largest = max(w / f for w, f in zip(weights, first, strict=True))
            weights = normalised([max(w, f * largest / limit) for w, f in zip(weights, first, strict=True)])
        for name, weight in zip(self.active, weights, strict=True):
            self[name].weight = weight

    @property
    def prompt_tokens(self) -> Mapping[str, int]:
        """Prompt length of each member."""
        return {name: len(participant.prompt) for name, participant in self.by_name.items()}

    def drop(
        self,
        names: Sequence[str],
        round_index: int,
        reason: ExitReason,
        retention: Mapping[str, float] | None = None,
    ) -> None:
        """Members leave in round `round_index`; those who stay share their weight."""
        for name in names:
            self._leaving[name] = Close(remember=reason == "retention")
            self.active.remove(name)
            retained = retention[name] if retention else None
            self._exits.append(MemberExit(name, round_index, reason, retained))
        if self.active:
            for name, weight in zip(self.active, normalised([self[n].weight for n in self.active]), strict=True):
                self[name].weight = weight

    def drop_full(self, round_index: int) -> None:
        """Present members whose context cannot hold another round leave, so that the others can continue."""
        self.drop([name for name in self.present if self._is_full(self[name])], round_index, "context")

    def may_be_full(self, owed: Mapping[str, str]) -> bool:
        """Whether a present member's context may be full once it has committed the text that it owes."""
        max_tokens = {name: len(owed.get(name, "").encode()) + _REENCODED for name in self.present}
        return any(self._is_full(self[name], more) for name, more in max_tokens.items())

    def holds(self, name: str, text: str) -> bool:
        """Whether a member that has committed a part of the answer `text` can hold all of it."""
        participant = self[name]
        return not self._is_full(participant, len(participant.member.codec.encode(text)) - participant.counts.answer)

    @property
    def exits(self) -> tuple[MemberExit, ...]:
        """Exits that no round has reported yet."""
        return tuple(self._exits)

    def take_exits(self) -> list[MemberExit]:
        """Return and clear `exits`; the caller reports them."""
        exits, self._exits = self._exits, []
        return exits

    def take_closes(self) -> dict[str, Close]:
        """Pending `Close` ops of members that left; the caller sends them."""
        closes, self._leaving = self._leaving, {}
        return closes

    def usage(self, text: str) -> Usage:
        """The tokens that each member read, drafted and computed for the answer `text`."""

        def usage(member: Participant) -> MemberUsage:
            answer = member.alone if member.alone is not None else len(member.member.codec.encode(text))
            counts, work = member.counts, (member.counts.forwards, member.counts.guessed, member.counts.accepted)
            return MemberUsage(len(member.prompt), member.drafted, counts.computed, answer, counts.thinking, *work)

        members = {name: usage(participant) for name, participant in self.by_name.items()}
        reference = self.reference.member.name
        return Usage(len(self.reference.prompt), members[reference].answer, reference, members)

    def thinking_limit(self, name: str, max_tokens: int) -> int:
        """Maximum tokens of a member's reasoning: `max_tokens`, or less if its context is small."""
        participant = self[name]
        limit = participant.member.context_limit
        if limit is None:
            return max_tokens
        return max(1, min(max_tokens, limit - len(participant.prompt) - 2 * self._room(len(self.active))))

    def scoring_prompt(self, name: str, texts: Iterable[str], thoughts: str = "") -> tuple[int, ...]:
        """The ids that a member reads before texts that it scores: its prompt and, if it reasons, its `thoughts`.

        Raises `RequestError` if its context does not hold one of them.
        """
        participant = self[name]
        prompt = (*participant.prompt, *participant.member.text.encode_thoughts(thoughts))
        needs = len(prompt) + max(len(participant.member.codec.encode(text)) for text in texts)
        if (limit := participant.member.context_limit) is not None and needs > limit:
            raise RequestError(f"a text exceeds the context of member {name!r}: it holds {limit} tokens, not {needs}")
        return prompt

    def _is_full(self, participant: Participant, more: int = 0) -> bool:
        limit = participant.member.context_limit
        used = len(participant.prompt) + participant.counts.thinking + participant.counts.answer + more
        return limit is not None and used + self._room(len(self.active)) > limit

    def _room(self, members: int) -> int:
        """Free tokens that a round needs in every context."""
        return self._segment * (_BYTES_PER_TOKEN if members > 1 else 1)

    def _check_capacity(self, member: Member, count: int, members: int, at_least: bool = False) -> None:
        segment_tokens, limit = self._room(members), member.context_limit
        if limit is not None and count + segment_tokens > limit:
            raise PromptTooLongError(member.name, limit, count, segment_tokens, at_least=at_least)


_ANSWERS_A_LANE = 2
"""With this many answers per lane, no lane is idle while an answer waits for its leader."""
_CLEARLY = 0.8
"""If all lanes are busy, a leader's round may cost at most this share of a round without a leader: members then wait
for each other, and their stages share fewer forward passes."""
_MEMORY = 0.8


@dataclass(frozen=True, slots=True)
class LaneStats:
    """Which lane runs each member, how many answers are on their way now, mean seconds of each member's steps (none for
    members that have not run yet), the lanes on accelerators, and members behind servers, which take no turns."""

    lane_of: Mapping[str, int]
    answers: Callable[[], int]
    step_seconds: Callable[[], Mapping[str, float]]
    accelerated: frozenset[int] = frozenset()
    elsewhere: frozenset[str] = frozenset()

    def clock_of(self, name: str) -> object:
        """The resource that a member shares: its lane; a server's member shares none."""
        return name if name in self.elsewhere else self.lane_of[name]


@dataclass(slots=True)
class LeaderPolicy:
    """The leaders of one answer. `lane_stats`: the engine's; without it, members run one after another."""

    lane_stats: LaneStats | None = None
    _won: dict[str, float] = field(default_factory=dict)
    _settled: float = 0.0
    """Share of the last rounds for which one draft was enough."""

    def leader(self, participants: Participants, drafters: Sequence[str], tokens: int) -> str | None:
        """The member that should draft this number of tokens first. None: a leader would not pay, or not all active
        members can use its draft."""
        active = participants.present
        if len(active) < 2 or not all(participants[name].member.info.may_guess for name in active):
            return None
        leader = self._choose(participants, drafters)
        if self.lane_stats is None:
            return leader
        lanes = {self.lane_stats.lane_of[name] for name in active}
        concurrent = len(lanes - {self.lane_stats.lane_of[name] for name in self.lane_stats.elsewhere})
        concurrent += len(self.lane_stats.elsewhere & set(active))
        if concurrent == 1:
            return None if self._reads_all(lanes, len(active)) else leader
        is_busy = self.lane_stats.answers() >= _ANSWERS_A_LANE * concurrent
        led, at_once = self._round(sum if is_busy else max, self._steps(participants, active), leader, tokens)
        return leader if led < (_CLEARLY if is_busy else 1) * at_once else None

    def _reads_all(self, lanes: set[int], members: int) -> bool:
        """Whether each member's weights are read for some answer at any time. On an accelerator a forward pass costs
        that much for any number of answers, so a leader saves nothing and only adds stages that wait."""
        assert self.lane_stats is not None
        return lanes <= self.lane_stats.accelerated and self.lane_stats.answers() >= members

    def _round(
        self, together: Callable[[Iterable[float]], float], steps: Mapping[str, float], leader: str, tokens: int
    ) -> tuple[float, float]:
        """Cost of a round with a leader and without one; `together` combines the members' costs.

        Without: all drafts, and a verification unless all are equal. With: the leader's draft and one forward pass of
        each other member that judges it. If that does not settle the round, also the others' drafts and a
        verification.
        """
        unsettled, everybody = 1 - self._settled, together(steps.values())
        followers = together(seconds for name, seconds in steps.items() if name != leader)
        led = tokens * steps[leader] + followers + unsettled * (tokens * followers + everybody)
        return led, (tokens + unsettled) * everybody

    def _steps(self, participants: Participants, names: Sequence[str]) -> dict[str, float]:
        """Cost of a forward pass of each member: measured seconds, or bytes of weights before all have run."""
        measured = self.lane_stats.step_seconds() if self.lane_stats is not None else {}
        if all(measured.get(name) for name in names):
            return {name: 2 ** (round(2 * math.log2(measured[name])) / 2) for name in names}
        return {name: participants[name].member.info.report.memory_bytes or 1 for name in names}

    def _choose(self, participants: Participants, drafters: Sequence[str]) -> str:
        """The member that won most of the last rounds in relation to the cost of its forward passes."""
        steps = self._steps(participants, drafters)
        mean = sum(steps.values()) / len(steps)

        def worth(name: str) -> float:
            return (self._won.get(name, 0.0) + participants[name].weight) / (1 + steps[name] / mean)

        return max(drafters, key=worth)

    def learn(self, drafters: Sequence[str], settled: bool) -> None:
        """These members drafted what became the segment; `settled`: no other draft was needed for it."""
        for name in {*self._won, *drafters}:
            self._won[name] = _MEMORY * self._won.get(name, 0.0) + (1 - _MEMORY) * (name in drafters)
        self._settled = _MEMORY * self._settled + (1 - _MEMORY) * settled


@dataclass(frozen=True, slots=True)
class Deadline:
    """Decides which pending members are late.

    `at`: the end of the round's time, in seconds of `time.monotonic`. `grace`: seconds after the first response in
    which no member is late. `clocks`: member → the resource that it shares; members of one lane are late together.
    `waiting`: members without a pending stage, which could continue. `never_late`: members without a deadline.
    """

    at: float
    grace: float
    clocks: Mapping[str, object]
    waiting: frozenset[str] = frozenset()
    never_late: frozenset[str] = frozenset()

    def late(self, pending: Collection[str], answered: Mapping[str, float]) -> tuple[frozenset[str], float]:
        """The late members of `pending` and the time of the decision. `answered`: the times of other responses.

        If no other member could continue, none is late.
        """
        on_time = {self.clocks[name] for name in answered}
        late = frozenset(n for n in pending if n not in self.never_late and self.clocks[n] not in on_time)
        if answered:
            return late, max(self.at, min(answered.values()) + self.grace)
        if {self.clocks[name] for name in self.waiting} - {self.clocks[name] for name in late}:
            return late, self.at
        return frozenset(), math.inf


Ops = Mapping[str, Op]
"""Stages to run, by member."""
Results = Mapping[str, StageResult]
"""Results by member."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The stages that an answer requests next, by member; awaited, it gives the results.

    The answer waits for all of them, with two exceptions. Members that miss the `deadline` sit out, and their results
    come later. For stages of members in `unwaited`, such as the `Close` of a late member, it does not wait.
    """

    ops: Ops
    deadline: Deadline | None = None
    unwaited: frozenset[str] = frozenset()

    def __await__(self) -> Generator[Wanted, Results, Results]:
        return (yield self)


@dataclass(slots=True)
class Late:
    """Members of one answer that are late: the stage that each still runs, rounds missed in a row, and since when."""

    running: dict[str, Op] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, op: Op) -> None:
        self.running[name] = op
        self.since.setdefault(name, time.monotonic())

    def count(self, active: Collection[str], absent: Collection[str]) -> None:
        """A round is over, which these members of the active ones missed."""
        for name in active:
            if name in absent:
                self.missed[name] = self.missed.get(name, 0) + 1
            else:
                self.missed.pop(name, None)
                self.since.pop(name, None)

    def lost(self, rounds: int, seconds: float) -> list[str]:
        """Members that still run a stage and have missed this number of rounds in a row, for this number of seconds."""
        now = time.monotonic()
        return [n for n in self.running if self.missed.get(n, 0) >= rounds and now - self.since[n] >= seconds]
