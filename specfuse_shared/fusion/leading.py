"""Who drafts first in a round, and whether anybody does.

Where members take turns, one leads: what its draft saves the others is time, unless they are on an accelerator with as
many answers as members. Members that run beside each other draft at the same time, unless a leader pays there too, by
what forwards of each take and by how often one draft settled a round lately: a lone answer must have its drafts
earlier, and many answers that keep all lanes at work must cost clearly less. Seconds are measured and rounded, so that
a seed seldom meets another leader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specfuse_shared.fusion.participants import Participants

_ANSWERS_A_LANE = 2
"""With so many answers for each lane, none is idle while an answer waits for its leader."""
_CLEARLY = 0.8
"""Lanes wait for each other's answers, which meet in fewer forwards then: so much less the work has to be."""
_MEMORY = 0.8


@dataclass(frozen=True, slots=True)
class Traffic:
    """Which lane runs each member, how many answers are on their way now, mean seconds of each member's steps (none for
    members that have not run yet), the lanes on accelerators, and members behind servers, which take no turns."""

    lane_of: Mapping[str, int]
    answers: Callable[[], int]
    step_seconds: Callable[[], Mapping[str, float]]
    accelerated: frozenset[int] = frozenset()
    elsewhere: frozenset[str] = frozenset()

    def clock_of(self, name: str) -> object:
        """What a member shares its time with: its lane, or nothing behind a server."""
        return name if name in self.elsewhere else self.lane_of[name]


@dataclass(slots=True)
class Lead:
    """The leaders of one answer. `traffic`: of the engine; without one, all members take turns."""

    traffic: Traffic | None = None
    _won: dict[str, float] = field(default_factory=dict)
    _settled: float = 0.0
    """Share of the last rounds for which one draft was enough."""

    def leader(self, participants: Participants, drafters: Sequence[str], tokens: int) -> str | None:
        """Who of these should draft so many tokens first; None: nobody, as it does not pay, or not all active members
        can make use of them."""
        active = participants.present
        if len(active) < 2 or not all(participants[name].member.info.may_guess for name in active):
            return None
        leader = self._choose(participants, drafters)
        if self.traffic is None:
            return leader
        lanes = {self.traffic.lane_of[name] for name in active}
        beside = len(lanes - {self.traffic.lane_of[name] for name in self.traffic.elsewhere})
        beside += len(self.traffic.elsewhere & set(active))
        if beside == 1:
            return None if self._reads_all(lanes, len(active)) else leader
        is_busy = self.traffic.answers() >= _ANSWERS_A_LANE * beside
        led, at_once = self._round(sum if is_busy else max, self._steps(participants, active), leader, tokens)
        return leader if led < (_CLEARLY if is_busy else 1) * at_once else None

    def _reads_all(self, lanes: set[int], members: int) -> bool:
        """Whether every member's weights are read for some answer at any time: on an accelerator that is what a forward
        costs, however many answers share it, so a leader spares nothing and only adds stages that wait."""
        assert self.traffic is not None
        return lanes <= self.traffic.accelerated and self.traffic.answers() >= members

    def _round(
        self, together: Callable[[Iterable[float]], float], steps: Mapping[str, float], leader: str, tokens: int
    ) -> tuple[float, float]:
        """What a round costs with a leader, and what without, members' costs taken `together`.

        Without: all drafts, and a verification unless all are equal. With: the leader's draft, one forward of the
        others that judges it, and where that does not settle the round, their drafts and a verification as well.
        """
        again, everybody = 1 - self._settled, together(steps.values())
        others = together(seconds for name, seconds in steps.items() if name != leader)
        led = tokens * steps[leader] + others + again * (tokens * others + everybody)
        return led, (tokens + again) * everybody

    def _steps(self, participants: Participants, names: Sequence[str]) -> dict[str, float]:
        """What a forward of each of these members costs: measured seconds, or bytes of weights before all have run."""
        measured = self.traffic.step_seconds() if self.traffic is not None else {}
        if all(measured.get(name) for name in names):
            return {name: 2 ** (round(2 * math.log2(measured[name])) / 2) for name in names}
        return {name: participants[name].member.info.report.memory_bytes or 1 for name in names}

    def _choose(self, participants: Participants, drafters: Sequence[str]) -> str:
        """Who of them won most of the last rounds for what its forwards cost."""
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
