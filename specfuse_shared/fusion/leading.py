"""Who drafts first in a round, and whether anybody does.

Members that run beside each other draft at the same time: a lone answer would only wait for a leader. Where they take
turns, or where many answers keep every lane at work, the drafts that a leader's saves are time. Both depend on
nothing that is measured while an answer runs, so that a seed gives the same answer again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from specfuse_shared.fusion.participants import Participants

_ANSWERS_A_LANE = 2
"""With so many answers for each lane, none is idle while an answer waits for its leader."""
_MEMORY = 0.8


@dataclass(frozen=True, slots=True)
class Traffic:
    """Which lane runs each member, and how many answers are on their way now."""

    lane_of: Mapping[str, int]
    answers: Callable[[], int]


@dataclass(slots=True)
class Lead:
    """The leaders of one answer. `traffic`: of the engine; without one, all members take turns."""

    traffic: Traffic | None = None
    _won: dict[str, float] = field(default_factory=dict)

    def is_worth(self, participants: Participants) -> bool:
        """Whether one of the active members should draft first: the others have to be able to make use of it."""
        active = participants.active
        if len(active) < 2 or not all(participants[name].member.info.may_guess for name in active):
            return False
        if self.traffic is None:
            return True
        lanes = {self.traffic.lane_of[name] for name in active}
        return len(lanes) == 1 or self.traffic.answers() >= _ANSWERS_A_LANE * len(lanes)

    def choose(self, participants: Participants, drafters: Sequence[str]) -> str:
        """Who of them won most of the last rounds for what its forwards cost, which is about its weights' size."""
        size = {name: participants[name].member.info.report.memory_bytes or 1 for name in drafters}
        mean = sum(size.values()) / len(size)

        def worth(name: str) -> float:
            return (self._won.get(name, 0.0) + participants[name].weight) / (1 + size[name] / mean)

        return max(drafters, key=worth)

    def learn(self, drafters: Sequence[str]) -> None:
        """These members drafted what became the segment."""
        for name in {*self._won, *drafters}:
            self._won[name] = _MEMORY * self._won.get(name, 0.0) + (1 - _MEMORY) * (name in drafters)
