"""Members at the same time: those of one accelerator run in turn, those on the processor share out its cores.

Small steps gain little from more cores, because waking a thread costs as much as what it takes over; so members on a
processor run beside each other, each on its share of the cores. With one lane there is no thread and nothing to wait
for. With several, a turn takes as long as the slowest.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

from specfuse_shared.members.base import Member

T = TypeVar("T")


class Lanes(Generic[T]):
    """The members of an engine by what they compute on; the first lane runs in the thread that takes turns."""

    def __init__(self, members: Sequence[Member]) -> None:
        (self._own, self._cores), *others = lanes_of(members)
        self._others = [_Lane[T](lane, cores) for lane, cores in others]

    def turn(self, step: Callable[[Sequence[Member]], T]) -> list[T]:
        """Run `step` for the members of every lane; what it gave each, once all are done, even if one raises."""
        if self._cores is not None:
            use_cores(self._cores)
            self._cores = None
        running = [lane.start(step) for lane in self._others]
        try:
            own = step(self._own)
        finally:
            errors = [future.exception() for future in running]
        for error in filter(None, errors):
            raise error
        return [own, *(future.result() for future in running)]

    def close(self) -> None:
        """Let the threads end. No turn may be running."""
        for lane in self._others:
            lane.close()


class _Lane(Generic[T]):
    """Members that take turns, and the thread that runs them; `cores`: how many it may use, None: as it is."""

    def __init__(self, members: Sequence[Member], cores: int | None) -> None:
        self._members, self._cores = tuple(members), cores
        self._todo: SimpleQueue[tuple[Callable[[Sequence[Member]], T], Future[T]] | None] = SimpleQueue()
        name = f"specfuse lane {'+'.join(devices_of(members[0]))}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def start(self, step: Callable[[Sequence[Member]], T]) -> Future[T]:
        future: Future[T] = Future()
        self._todo.put((step, future))
        return future

    def close(self) -> None:
        """Wait for the thread's end: one that is still on its way when Python ends would take the process with it."""
        self._todo.put(None)
        self._thread.join()

    @torch.inference_mode()
    def _work(self) -> None:
        if self._cores is not None:
            use_cores(self._cores)
        while (job := self._todo.get()) is not None:
            step, future = job
            try:
                future.set_result(step(self._members))
            except BaseException as error:
                future.set_exception(error)


def lanes_of(members: Sequence[Member]) -> list[tuple[list[Member], int | None]]:
    """Members that take turns, and the cores of each such lane where the processor has several; None: no limit.

    A core is never shared, so with more members than cores some take turns, the large ones by themselves.
    """
    lanes: dict[tuple[str, ...], list[Member]] = defaultdict(list)
    for member in members:
        lanes[devices_of(member)].append(member)
    beside = lanes.pop(("cpu",), [])
    found: list[tuple[list[Member], int | None]] = [(lane, None) for lane in lanes.values()]
    most = cores()
    count = min(len(beside), most)
    shared: list[list[Member]] = [[] for _ in range(count)]
    for member in sorted(beside, key=_size, reverse=True):
        min(shared, key=lambda lane: sum(map(_size, lane))).append(member)
    return found + [(lane, most // count if count > 1 else None) for lane in shared]


def cores() -> int:
    """How many cores torch uses in this thread."""
    return torch.get_num_threads()


def use_cores(count: int) -> None:
    """Let torch use so many cores in this thread, which keeps to them from now on; others stay as they are."""
    with _setting_cores:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        # that is also what threads made later would begin with, unless another thread says otherwise
        other = threading.Thread(target=torch.set_num_threads, args=(before,))
        other.start()
        other.join()


_setting_cores = threading.Lock()


def devices_of(member: Member) -> tuple[str, ...]:
    """The devices on which a member computes."""
    return tuple(member.devices)


def _size(member: Member) -> int:
    return member.report.memory_bytes
