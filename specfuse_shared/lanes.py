"""Members of different devices at the same time: those of one device run in turn, each device in a thread of its own.

With one device there is no thread and nothing to wait for. With several, a turn takes as long as the slowest device.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

from specfuse_shared.member import Member

T = TypeVar("T")


class Lanes(Generic[T]):
    """The members of an engine by the devices on which they compute."""

    def __init__(self, members: Sequence[Member]) -> None:
        lanes: dict[tuple[str, ...], list[Member]] = defaultdict(list)
        for member in members:
            lanes[devices_of(member)].append(member)
        self._own, *others = lanes.values()
        self._others = [_Lane[T](lane) for lane in others]

    def turn(self, step: Callable[[Member], T]) -> Iterator[T]:
        """Run `step` for every member; its results, in no particular order of devices.

        With one device, each as it comes, before the next member's step. With several, once all are done, even if one
        of them raises.
        """
        if not self._others:
            yield from map(step, self._own)
            return
        running = [lane.start(step) for lane in self._others]
        try:
            found = [step(member) for member in self._own]
        finally:
            outcomes = [(future.exception(), future) for future in running]
        for error, _ in outcomes:
            if error is not None:
                raise error
        yield from found
        for _, future in outcomes:
            yield from future.result()

    def close(self) -> None:
        """Let the threads end. No turn may be running."""
        for lane in self._others:
            lane.close()


class _Lane(Generic[T]):
    """One device's members and the thread that runs them."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = tuple(members)
        self._todo: SimpleQueue[tuple[Callable[[Member], T], Future[list[T]]] | None] = SimpleQueue()
        name = f"specfuse lane {'+'.join(devices_of(members[0]))}"
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def start(self, step: Callable[[Member], T]) -> Future[list[T]]:
        future: Future[list[T]] = Future()
        self._todo.put((step, future))
        return future

    def close(self) -> None:
        self._todo.put(None)

    @torch.inference_mode()
    def _work(self) -> None:
        while (job := self._todo.get()) is not None:
            step, future = job
            try:
                future.set_result([step(member) for member in self._members])
            except BaseException as error:
                future.set_exception(error)


def devices_of(member: Member) -> tuple[str, ...]:
    """The devices on which a member computes."""
    return tuple(member.devices)
