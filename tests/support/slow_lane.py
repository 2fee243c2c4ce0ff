"""A lane with delayed stages: their thread sleeps, or never starts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from specfuse_shared.members.stages import CacheUse, Close, Fault, Lane, Member, MemberInfo, Reply, StageRequest

NEVER = 1e6
"""Delay of a stage that does not begin during a test."""


class SlowLane:
    """Delays the requests to `lane`. `delay`: seconds for a request; a `Close` overtakes waiting requests."""

    def __init__(self, lane: Lane, delay: Callable[[StageRequest], float]) -> None:
        self._lane = lane
        self._delay = delay
        self._timers: dict[tuple[int, str], threading.Timer] = {}

    @property
    def members(self) -> Sequence[MemberInfo]:
        return self._lane.members

    def parties(self) -> tuple[Member, ...]:
        """The coordinator's view of the members of a fake lane."""
        return self._lane.parties()  # type: ignore[attr-defined, no-any-return]

    def memory(self) -> Mapping[str, int]:
        return self._lane.memory()

    def remember(self, limits: Mapping[str, int]) -> None:
        self._lane.remember(limits)

    def reply_to(self, reply: Reply) -> None:
        self._lane.reply_to(reply)

    def submit(self, requests: Sequence[StageRequest]) -> None:
        for request in requests:
            key, seconds = (request.answer, request.member), self._delay(request)
            if isinstance(request.op, Close) and (timer := self._timers.pop(key, None)) is not None:
                timer.cancel()
            if seconds:
                self._timers[key] = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._begin, [request])
                self._timers[key].daemon = True
                self._timers[key].start()
            else:
                self._lane.submit([request])

    def _begin(self, request: StageRequest) -> None:
        self._timers.pop((request.answer, request.member), None)
        self._lane.submit([request])

    def cache_use(self) -> CacheUse:
        return self._lane.cache_use()

    @property
    def fault(self) -> Fault | None:
        return self._lane.fault

    def close(self) -> None:
        for timer in list(self._timers.values()):
            timer.cancel()
        self._lane.close()
