"""A local lane in a thread of its own, which waits for no other lane."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from specfuse_shared.members.base import CacheUse, MemberInfo
from specfuse_shared.members.local.cores import devices_of
from specfuse_shared.members.local.lane import LocalLane
from specfuse_shared.members.stages import Closed, Fault, Reply, StageRequest, StageResult, nobody_waits, unanswered


class LaneThread:
    """Runs the steps of `lane`, which belongs to this thread from now on."""

    def __init__(self, lane: LocalLane) -> None:
        self._lane = lane
        self._changed = threading.Condition()
        self._reply: Reply = nobody_waits
        self._open: set[tuple[int, str]] = set()  # answers that were not closed, by member
        lane.reply_to(self._give)
        self._closed = False
        self._fault: Fault | None = None
        name = f"specfuse lane {'+'.join(devices_of(next(iter(lane.local.values()))))}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def members(self) -> Sequence[MemberInfo]:
        return self._lane.members

    def memory(self) -> Mapping[str, int]:
        return self._lane.memory()

    def remember(self, limits: Mapping[str, int]) -> None:
        self._lane.remember(limits)

    def reply_to(self, reply: Reply) -> None:
        self._reply = reply

    def submit(self, requests: Sequence[StageRequest]) -> None:
        with self._changed:
            if self._fault is None:
                self._open.update((request.answer, request.member) for request in requests)
                self._lane.submit(requests)
                self._changed.notify()
                return
        self._reply([unanswered(request, self._fault) for request in requests])

    def cache_use(self) -> CacheUse:
        return self._lane.cache_use()

    @property
    def fault(self) -> Fault | None:
        return self._fault

    def close(self) -> None:
        """Wait for the thread's end: one that is still on its way when Python ends would take the process with it."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        try:
            while self._await_work():
                self._lane.step()
        except BaseException as error:
            self._die(error)
        self._lane.close()

    def _await_work(self) -> bool:
        with self._changed:
            while not self._closed and (patience := self._lane.patience) != 0:
                self._changed.wait(patience)
            return not self._closed

    def _give(self, results: Sequence[StageResult]) -> None:
        with self._changed:
            self._open.difference_update((r.answer, r.member) for r in results if isinstance(r.value, Closed))
        self._reply(results)

    def _die(self, error: BaseException) -> None:
        """Nobody may wait for a lane that is gone, whatever ended it."""
        with self._changed:
            self._fault = fault = Fault.of(error, is_fatal=True)
            left, self._open = self._open, set()
        self._reply([StageResult(answer, member, error=fault) for answer, member in left])
