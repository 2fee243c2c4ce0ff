"""A lane in another process, reached through a pipe. The messages are the stages in `members.stages`.

`serve_members` is the remote end; `PipedLane` is the lane for the coordinator. If its process dies, the lane fails
every stage, so that its members leave the answers and the others continue.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from specfuse_shared.config import MemberConfig
from specfuse_shared.members.loading import load_in_process
from specfuse_shared.members.local.lane import LocalLane
from specfuse_shared.members.stages import (
    CacheUse,
    Closed,
    Fault,
    MemberInfo,
    OnForward,
    Reply,
    StageRequest,
    StageResult,
    ignore_results,
    ignore_steps,
    unanswered,
)

logger = logging.getLogger(__name__)

_SECONDS_TO_CLOSE = 10.0


@dataclass(frozen=True, slots=True)
class Ready:
    """The first message of the other end: its members, and free bytes of each device."""

    members: tuple[MemberInfo, ...]
    memory: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Answered:
    """Results, the use of caches, and the forward passes since the last message (member, answers, seconds)."""

    results: tuple[StageResult, ...]
    use: CacheUse
    forwards: tuple[tuple[str, int, float], ...]


class Wire(Protocol):
    """One end of a connection: a pipe between processes, or an actor on another node."""

    def send(self, message: Any, /) -> None: ...

    def recv(self) -> Any:
        """The next message; waits for it. Raises `EOFError` or `OSError` where the other end is gone."""
        ...


class OwnWire(Wire, Protocol):
    """The coordinator's end."""

    def close(self) -> None: ...


class PolledWire(Wire, Protocol):
    """The members' end."""

    def poll(self, timeout: float = 0.0, /) -> bool:
        """Whether there is a message to receive, or comes within `timeout` seconds."""
        ...


class PipedLane:
    """The lane at the end of `connection`; its devices are not this process's and are called `name`/device.

    Waits for the other end to be ready. Raises `EOFError` if that ends instead. `reopened`: waits until a lost end
    is ready again, for wires that support it; it raises `EOFError` when it should stop waiting.
    """

    def __init__(
        self,
        name: str,
        connection: OwnWire,
        on_forward: OnForward = ignore_steps,
        reopened: Callable[[], Ready] | None = None,
    ) -> None:
        self._name = name
        self._connection = connection
        self._on_forward = on_forward
        self._reopened = reopened
        self._limits = dict[str, int]()
        self._closed = False
        self._reply: Reply = ignore_results
        self._asked: dict[tuple[int, str], StageRequest] = {}
        self._lock = threading.Lock()
        self._lost: Fault | None = None
        self._use = CacheUse()
        ready = connection.recv()
        self._members = tuple(map(self._named, ready.members))
        self._memory = ready.memory
        self._reader = threading.Thread(target=self._read, name=f"specfuse pipe {name}", daemon=True)
        self._reader.start()

    @property
    def members(self) -> Sequence[MemberInfo]:
        return self._members

    def memory(self) -> Mapping[str, int]:
        return {self._device(device): size for device, size in self._memory.items()}

    def remember(self, limits: Mapping[str, int]) -> None:
        self._limits = dict(limits)
        self._send(self._limits)

    def reply_to(self, reply: Reply) -> None:
        self._reply = reply

    def submit(self, requests: Sequence[StageRequest]) -> None:
        with self._lock:
            lost = self._lost
            if lost is None:
                self._asked.update({(request.answer, request.member): request for request in requests})
        if lost is None and (lost := self._send(tuple(requests))) is not None:
            requests = self._withdrawn(requests)
        if lost is not None:
            self._reply([unanswered(request, lost) for request in requests])

    def cache_use(self) -> CacheUse:
        return self._use

    @property
    def fault(self) -> Fault | None:
        return self._lost

    def close(self) -> None:
        self._closed = True
        self._send(None)
        self._reader.join(_SECONDS_TO_CLOSE)
        self._connection.close()

    def _send(self, message: object) -> Fault | None:
        """Why the message could not be sent; None where it was, or the reader will find that the other end is gone."""
        try:
            with self._lock:
                self._connection.send(message)
        except OSError:
            return None
        except Exception as error:
            return Fault.of(error)
        return None

    def _read(self) -> None:
        """Fail pending requests after any error."""
        while True:
            try:
                while True:
                    self._take(self._connection.recv())
            except (EOFError, OSError):
                self._fail_pending(Fault("EOFError", f"the process of {self._name} is gone"))
            except Exception as error:
                logger.warning("the lane of %s broke: %s", self._name, type(error).__name__)
                self._fail_pending(Fault.of(error))
            if not self._is_back():
                return

    def _take(self, answered: Answered) -> None:
        self._use = answered.use
        for forward in answered.forwards:
            self._on_forward(*forward)
        self._give(answered.results)

    def _is_back(self) -> bool:
        """Wait until what was lost is there again; False where it will not be."""
        if self._closed or self._reopened is None:
            return False
        try:
            self._reopened()
        except Exception as error:
            if not isinstance(error, EOFError):
                logger.error("the lane of %s cannot be opened again: %s", self._name, type(error).__name__)
            return False
        with self._lock:
            self._lost = None
        self._send(self._limits)
        return True

    def _give(self, results: Sequence[StageResult]) -> None:
        answered: list[StageResult] = []
        with self._lock:
            for result in results:
                key = result.answer, result.member
                if key not in self._asked:
                    logger.warning("the lane of %s answers what it was not asked", self._name)
                    continue
                if isinstance(result.value, Closed):
                    del self._asked[key]
                answered.append(result)
        self._reply(answered)

    def _withdrawn(self, requests: Sequence[StageRequest]) -> list[StageRequest]:
        """The unanswered requests among these; the lane will not answer them any more."""
        with self._lock:
            return [r for r in requests if self._asked.pop((r.answer, r.member), None) is not None]

    def _fail_pending(self, fault: Fault) -> None:
        with self._lock:
            self._lost, open_requests, self._asked, self._use = fault, self._asked, {}, CacheUse()
        self._reply([unanswered(request, fault) for request in open_requests.values()])

    def _named(self, info: MemberInfo) -> MemberInfo:
        return replace(info, devices={self._device(device): share for device, share in info.devices.items()})

    def _device(self, device: str) -> str:
        return f"{self._name}/{device}"


def serve_members(
    connection: PolledWire,
    members: Sequence[MemberConfig],
    execution: str = "auto",
    cores: int | None = None,
    cache_bytes: int | None = None,
    share: float = 1.0,
) -> None:
    """Load members and run their stages, until the coordinator closes the lane or is gone.

    `cores`: to compute on. `cache_bytes`: see `EnsembleConfig`. `share`: of the device, if other processes use it, too.
    """
    forwards: list[tuple[str, int, float]] = []

    def counted(member: str, answers: int, seconds: float, steps: int = 1) -> None:
        forwards.append((member, answers, seconds))

    loaded = [load_in_process(member, execution=execution) for member in members]
    lane = LocalLane(loaded, cores, counted, cache_bytes, share)

    def reply(results: Sequence[StageResult]) -> None:
        connection.send(Answered(tuple(results), lane.cache_use(), tuple(forwards)))
        forwards.clear()

    lane.reply_to(reply)
    connection.send(Ready(tuple(lane.members), lane.memory()))
    try:
        while _take(connection, lane):
            lane.step()
    except (EOFError, OSError):
        pass  # the coordinator is gone
    lane.close()


def _take(connection: PolledWire, lane: LocalLane) -> bool:
    """Pass on received messages, and wait if idle; False once the lane is closed."""
    while (wait_seconds := lane.wait_seconds) != 0 or connection.poll():
        if wait_seconds and not connection.poll(wait_seconds):
            continue
        message = connection.recv()
        if message is None:
            return False
        if isinstance(message, dict):
            lane.remember(message)
        else:
            lane.submit(message)
    return True
