"""Who is late in a round, and what members that were late missed.

A round has a deadline (`EnsembleConfig.round_seconds`). A member that has not answered by then, while others wait, sits
the round out. Its stage goes on: once that is over it is back, and commits what it missed before it drafts again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from specfuse_shared.members.stages import Op


@dataclass(frozen=True, slots=True)
class Deadline:
    """When members that were asked are late.

    `at`: when the round's time is over, in seconds of `time.monotonic`. `grace`: seconds that the others have, in any
    case, behind the first answer. `clocks`: member → what it shares its time with; members of one lane are late
    together or not at all. `waiting`: members that were asked for nothing, and could go on. `never_late`: members that
    are waited for in any case.
    """

    at: float
    grace: float
    clocks: Mapping[str, object]
    waiting: frozenset[str] = frozenset()
    never_late: frozenset[str] = frozenset()

    def late(self, asked: Collection[str], answered: Mapping[str, float]) -> tuple[frozenset[str], float]:
        """Who of `asked`, without an answer so far, will be late, and when. `answered`: when others have answered.

        Without another member that can go on, none is late.
        """
        on_time = {self.clocks[name] for name in answered}
        late = frozenset(n for n in asked if n not in self.never_late and self.clocks[n] not in on_time)
        if answered:
            return late, max(self.at, min(answered.values()) + self.grace)
        if {self.clocks[name] for name in self.waiting} - {self.clocks[name] for name in late}:
            return late, self.at
        return frozenset(), math.inf


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an answer wants next: stages to run, by member. It waits for all of them, but for two kinds.

    Members that are late by the `deadline` sit out: their results come with later ones. Those in `unwaited` let go of
    the answer in their own time.
    """

    ops: Mapping[str, Op]
    deadline: Deadline | None = None
    unwaited: frozenset[str] = frozenset()


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
        """Who still runs a stage, and has missed so many rounds in a row, for so many seconds."""
        now = time.monotonic()
        return [n for n in self.running if self.missed.get(n, 0) >= rounds and now - self.since[n] >= seconds]
