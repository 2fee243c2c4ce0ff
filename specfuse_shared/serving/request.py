"""One answer in the scheduler: what its members do for it now, and who listens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from specfuse_shared.events import Event
from specfuse_shared.fusion.participants import Deadline
from specfuse_shared.fusion.round import ScoringSession
from specfuse_shared.fusion.session import AnswerSession, Work
from specfuse_shared.members.stages import StageResult
from specfuse_shared.serving.admission import Need

Deliver = Callable[[Event | Exception], None]


@dataclass(eq=False)
class Request:
    """One answer in the scheduler; `deliver` is called from the worker with its events, last with its end."""

    session: AnswerSession | ScoringSession
    deliver: Deliver
    deadline: float | None = None
    number: int = 0
    needs: Need = field(default_factory=Need)
    submitted: float = field(default_factory=time.monotonic)
    work: Work | None = None
    asked: set[str] = field(default_factory=set)
    """Members that run a stage for it now, and that it waits for."""
    late: set[str] = field(default_factory=set)
    """Members that run a stage for it still, and that it does not wait for."""
    round_deadline: Deadline | None = None
    """When those that it waits for are late."""
    answered: dict[str, float] = field(default_factory=dict)
    """When the others came to something."""
    results: dict[str, StageResult] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    """Members that hold a cache for it."""
    faulty: set[str] = field(default_factory=set)
    """Members that failed in a stage; nothing of theirs is remembered."""
    closing: set[str] = field(default_factory=set)
    """Members that were asked to let it go."""
    cancelled: bool = False
    begun: bool = False
    over: bool = False
    """Nothing is told of it any more; it goes once no member holds a cache for it."""

    def next_late(self) -> tuple[frozenset[str], float]:
        """Which of its members will be late next, and when."""
        if self.over or self.round_deadline is None:
            return frozenset(), math.inf
        clocks = self.round_deadline.clocks  # those that only let the answer go have none
        answered = {name: at for name, at in self.answered.items() if name in clocks}
        late, at = self.round_deadline.late(self.asked & clocks.keys(), answered)
        return late, at if late else math.inf
