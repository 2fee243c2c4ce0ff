"""Who takes part in one answer: every member's side of it, who is still active, what each is worth, who left and why.

Members without room refuse a prompt before any model runs, and leave once their context is full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from specfuse_shared.errors import PromptTooLongError, RequestError
from specfuse_shared.members.base import Member
from specfuse_shared.members.stages import NOTHING_YET, Close, TokenCounts
from specfuse_shared.messages import Message, Tool
from specfuse_shared.policies import normalised
from specfuse_shared.settings.config import EnsembleConfig
from specfuse_shared.types import ExitReason, MemberExit, MemberUsage, Usage

_ROOM_PER_TOKEN = 8
"""A token of one member may take this many of another's (Chinese, emoji); kept free in every context."""
_REENCODED = 16
"""A text takes at most a token a byte, and what stood before it at most so many more than it did."""


@dataclass(slots=True)
class Participant:
    """A member's part in an answer. `first`: its weight at the start; `counts`: what its lane last said of it."""

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
    """The sides of all `members`, by name; the names of those that are `active`, in the members' order, and of those
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
        least = sum(1 for message in messages if message.content.strip())  # each takes a token or more
        for member in members:
            self._check_room(member, least, len(members), at_least=True)
        prompts: list[tuple[int, ...]] = []
        for member in members:
            check()
            prompts.append(tuple(member.encode_prompt(messages, tools)))
            self._check_room(member, len(prompts[-1]), len(members))
        weights = _first_weights(members, config.first_weights == "size")
        self.sides = {m.name: Participant(m, p, w, w) for m, p, w in zip(members, prompts, weights, strict=True)}
        self.active = [member.name for member in members]
        self.absent = set[str]()
        self.reference = self.sides[config.reference_name]
        self._exits: list[MemberExit] = []
        self._leaving: dict[str, Close] = {}

    def __getitem__(self, name: str) -> Participant:
        return self.sides[name]

    @property
    def present(self) -> list[str]:
        """The active members that take part in this round."""
        return [name for name in self.active if name not in self.absent]

    @property
    def weights(self) -> dict[str, float]:
        """Of the present members; they sum to 1."""
        present = self.present
        weights = [self.sides[name].weight for name in present]
        return dict(zip(present, weights if len(present) == len(self.active) else normalised(weights), strict=True))

    def weigh(self, weights: Sequence[float], limit: float | None) -> None:
        """New weights of the present members; the ratio of two is at most `limit` times that of their first ones.

        Those of the absent ones stay, but for that limit.
        """
        if len(present := self.present) < len(self.active):
            mass = sum(self.sides[name].weight for name in present)
            new = {name: mass * weight for name, weight in zip(present, weights, strict=True)}
            weights = [new.get(name, self.sides[name].weight) for name in self.active]
        if limit is not None:
            first = [self.sides[name].first for name in self.active]
            most = max(w / f for w, f in zip(weights, first, strict=True))
            weights = normalised([max(w, f * most / limit) for w, f in zip(weights, first, strict=True)])
        for name, weight in zip(self.active, weights, strict=True):
            self.sides[name].weight = weight

    @property
    def prompt_tokens(self) -> Mapping[str, int]:
        """Prompt length of each member."""
        return {name: len(side.prompt) for name, side in self.sides.items()}

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
            kept = retention[name] if retention else None
            self._exits.append(MemberExit(name, round_index, reason, kept))
        if self.active:
            for name, weight in zip(self.active, normalised([self.sides[n].weight for n in self.active]), strict=True):
                self.sides[name].weight = weight

    def drop_full(self, round_index: int) -> None:
        """Present members without room for another round leave, so that the others can go on."""
        self.drop([name for name in self.present if self._is_full(self.sides[name])], round_index, "context")

    def may_be_full(self, owed: Mapping[str, str]) -> bool:
        """Whether a present member may lack room for another round once it has committed the text that it owes."""
        most = {name: len(owed.get(name, "").encode()) + _REENCODED for name in self.present}
        return any(self._is_full(self.sides[name], more) for name, more in most.items())

    def holds(self, name: str, text: str) -> bool:
        """Whether a member that committed only a part of the answer `text` has room for all of it."""
        side = self.sides[name]
        return not self._is_full(side, len(side.member.codec.encode(text)) - side.counts.answer)

    @property
    def exits(self) -> tuple[MemberExit, ...]:
        """Exits that no round has told of yet."""
        return tuple(self._exits)

    def take_exits(self) -> list[MemberExit]:
        """`exits`, which the caller will tell of."""
        exits, self._exits = self._exits, []
        return exits

    def take_closes(self) -> dict[str, Close]:
        """What those who left still hold, which the caller will let go."""
        closes, self._leaving = self._leaving, {}
        return closes

    def usage(self, text: str) -> Usage:
        """What each member read, drafted and computed for the answer `text`."""

        def usage(side: Participant) -> MemberUsage:
            answer = side.alone if side.alone is not None else len(side.member.codec.encode(text))
            counts, work = side.counts, (side.counts.forwards, side.counts.guessed, side.counts.accepted)
            return MemberUsage(len(side.prompt), side.drafted, counts.computed, answer, counts.thinking, *work)

        members = {name: usage(side) for name, side in self.sides.items()}
        reference = self.reference.member.name
        return Usage(len(self.reference.prompt), members[reference].answer, reference, members)

    def thinking_room(self, name: str, most: int) -> int:
        """Tokens that a member's thoughts may have, `most` where its context holds them."""
        side = self.sides[name]
        limit = side.member.context_limit
        if limit is None:
            return most
        return max(1, min(most, limit - len(side.prompt) - 2 * self._room(len(self.active))))

    def scoring_prompt(self, name: str, texts: Iterable[str], thoughts: str = "") -> tuple[int, ...]:
        """What a member reads before texts that it shall judge: its prompt and its thoughts, or none where it has none.

        Raises `RequestError` if its context does not hold one of them.
        """
        side = self.sides[name]
        prompt = (*side.prompt, *side.member.text.encode_thoughts(thoughts))
        needs = len(prompt) + max(len(side.member.codec.encode(text)) for text in texts)
        if (held := side.member.context_limit) is not None and needs > held:
            raise RequestError(
                f"a text ends behind the context of member {name!r}: it holds {held} tokens, not {needs}"
            )
        return prompt

    def _is_full(self, side: Participant, more: int = 0) -> bool:
        limit = side.member.context_limit
        used = len(side.prompt) + side.counts.thinking + side.counts.answer + more
        return limit is not None and used + self._room(len(self.active)) > limit

    def _room(self, members: int) -> int:
        """Free tokens that a round needs in every context."""
        return self._segment * (_ROOM_PER_TOKEN if members > 1 else 1)

    def _check_room(self, member: Member, count: int, members: int, at_least: bool = False) -> None:
        room, limit = self._room(members), member.context_limit
        if limit is not None and count + room > limit:
            raise PromptTooLongError(member.name, limit, count, room, at_least=at_least)


_SIZE_POWER = 1.5
"""By parameters alone, two members may outvote one that is far better; by their square, the largest decides alone."""


def _first_weights(members: Sequence[Member], by_size: bool) -> list[float]:
    """Weights (Σ = 1) before any round: of the configuration; `by_size`, times parameters^1.5 where all are known."""
    sizes = [member.info.report.parameters for member in members]
    shares = [size**_SIZE_POWER if by_size and all(sizes) else 1.0 for size in sizes]
    return normalised([member.info.weight * share for member, share in zip(members, shares, strict=True)])
