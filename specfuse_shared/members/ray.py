"""Lanes on the nodes of a Ray cluster: an actor runs a member and exchanges the messages of a pipe.

An actor that dies is a broken pipe: its member leaves the running answers. Ray starts it again on a node with free
resources, and then the member is back. No call is repeated, since the actor's state died with it.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import ray as untyped_ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from specfuse_shared.config import MemberConfig
from specfuse_shared.errors import MemberLoadError
from specfuse_shared.members.pipe import PipedLane, serve_members
from specfuse_shared.members.stages import OnForward
from specfuse_shared.placement.plan import format_bytes

ray: Any = untyped_ray

_SECONDS_TO_START = 120.0
"""Maximum time for a node to have free resources for an actor and to start it."""
_BETWEEN_LOOKS = 0.5
"""Seconds between two looks whether an actor is back."""
MemoryOf = Callable[[MemberConfig], int | None]
"""Bytes of main memory that a member takes; None where that is not known."""
_NAMED = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Resources that Ray has separate options for; others are custom resources of nodes."""


class _ActorEnd:
    """The member's end of the wire."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.outbox: SimpleQueue[Any] = SimpleQueue()
        self.send = self.outbox.put
        self._seen: deque[Any] = deque()

    def recv(self) -> Any:
        return self._seen.popleft() if self._seen else self.inbox.get()

    def poll(self, timeout: float = 0.0, /) -> bool:
        if not self._seen:
            with suppress(Empty):
                self._seen.append(self.inbox.get(timeout=timeout) if timeout > 0 else self.inbox.get_nowait())
        return bool(self._seen)


class MemberActor:
    """Loads a member on its node and runs its stages in a separate thread, so that calls do not wait."""

    def __init__(
        self, config: MemberConfig, execution: str, cores: int | None, cache_bytes: int | None, share: float
    ) -> None:
        self._end = _ActorEnd()
        settings = config, execution, cores, cache_bytes, share
        threading.Thread(target=self._serve, args=settings, daemon=True).start()

    def started(self) -> None:
        """It has its place, and loads."""

    def receive(self, message: Any) -> None:
        """Take a message of the coordinator; they come in their order."""
        self._end.inbox.put(message)

    def take(self) -> list[Any]:
        """The messages for the coordinator, once there are any."""
        messages = [self._end.outbox.get()]
        while not self._end.outbox.empty():
            messages.append(self._end.outbox.get())
        return messages

    def _serve(self, config: MemberConfig, *settings: Any) -> None:
        try:
            serve_members(self._end, [config], *settings)
            self._end.outbox.put(EOFError())
        except BaseException as error:
            self._end.outbox.put(_sendable(error))


class ActorWire:
    """The coordinator's end: `recv` raises what the actor raised, and `EOFError` where it is gone."""

    def __init__(
        self, config: MemberConfig, execution: str, needs: Mapping[str, float], cache_bytes: int | None
    ) -> None:
        options = actor_options(needs)
        self._needs = needs
        cores = max(1, int(options["num_cpus"]))
        groups = {"in": 1, "out": 1}
        kind = ray.remote(max_restarts=-1, max_task_retries=0, concurrency_groups=groups, **options)(MemberActor)
        self._actor: Any = kind.remote(config, execution, cores, cache_bytes, min(1.0, needs.get("GPU") or 1.0))
        self._arrived: deque[Any] = deque()
        self._closed = self._broken = False

    def wait_for_place(self, member: MemberConfig) -> None:
        """Raises `MemberLoadError` if no node has free resources for long."""
        try:
            ray.get(self._actor.started.options(concurrency_group="in").remote(), timeout=_SECONDS_TO_START)
        except GetTimeoutError as error:
            raise MemberLoadError(
                f"member {member.label!r} waited {_SECONDS_TO_START:g} s for {_said(self._needs)} on a node of the Ray "
                "cluster: close what holds them, or start another node"
            ) from error

    def send(self, message: Any) -> None:
        self._actor.receive.options(concurrency_group="in").remote(message)

    def recv(self) -> Any:
        while not self._arrived:
            try:
                self._arrived.extend(ray.get(self._actor.take.options(concurrency_group="out").remote()))
            except RayActorError as error:
                raise EOFError(str(error)) from error
            except Exception:
                self._broken = True
                raise
        message = self._arrived.popleft()
        if isinstance(message, BaseException):
            self._broken = True
            raise message
        return message

    def reopened(self) -> Any:
        """The first message of the actor once it runs again. Raises `EOFError` when the wire is closed.

        An actor whose members broke lives on, and would load no others: it is ended, and Ray starts it again.
        """
        if self._broken and not self._closed:
            self._broken = False
            self._arrived.clear()
            ray.kill(self._actor, no_restart=False)
        while not self._closed:
            try:
                return self.recv()
            except EOFError:
                time.sleep(_BETWEEN_LOOKS)
        raise EOFError

    def close(self) -> None:
        self._closed = True
        with suppress(RayError):  # it may be gone already
            ray.kill(self._actor)


def _sendable(error: BaseException) -> BaseException:
    """The error, or a description of one that cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def ray_lanes(
    members: Sequence[MemberConfig],
    memory_of: MemoryOf,
    address: str | None,
    execution: str,
    cache_bytes: int | None,
    on_forward: OnForward,
) -> list[PipedLane]:
    """A lane for each member, on a node with the required resources. All load at the same time.

    `memory_of` is called for members without a card that do not state their memory. Raises `MemberLoadError` if a
    member cannot be loaded, or no node has the resources.
    """
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cards = any(node.get("GPU") for node in nodes)
    needs = [needs_of(member, memory_of, cards) for member in members]
    for member, need in zip(members, needs, strict=True):
        _check_capacity(member, need, nodes)
    wires = [ActorWire(member, execution, need, cache_bytes) for member, need in zip(members, needs, strict=True)]
    lanes: list[PipedLane] = []
    try:
        for member, wire in zip(members, wires, strict=True):
            wire.wait_for_place(member)
            lanes.append(PipedLane(member.label, wire, on_forward, wire.reopened))
    except BaseException as error:
        for wire in wires:
            wire.close()
        if isinstance(error, EOFError):
            name = members[len(lanes)].label
            raise MemberLoadError(f"member {name!r}: its Ray actor died while it was loaded: {error}") from error
        raise
    return lanes


def needs_of(member: MemberConfig, memory_of: MemoryOf, cards: bool) -> dict[str, float]:
    """A member's required resources: its `resources`, and by default a core and a card, if the cluster has
    `cards` and its device may be one, else main memory for its model."""
    card = member.resources.get("GPU", float(cards and member.device.split(":")[0] in ("auto", "cuda")))
    defaults = {"CPU": 1.0}
    if card:
        defaults["GPU"] = card
    elif "memory" not in member.resources and (memory := memory_of(member)):
        defaults["memory"] = float(memory)
    return {**defaults, **member.resources}


def actor_options(needs: Mapping[str, float]) -> dict[str, Any]:
    """Ray's options of an actor with these needs."""
    named = {_NAMED[name]: amount for name, amount in needs.items() if name in _NAMED}
    return {**named, "resources": {name: amount for name, amount in needs.items() if name not in _NAMED}}


def _check_capacity(member: MemberConfig, needs: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> None:
    """Check that a node has the required total resources, free or not: otherwise its actor would wait forever."""
    if not any(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes):
        raise MemberLoadError(
            f"member {member.label!r} needs {_said(needs)}, and no node of the Ray cluster has that much: start one "
            "that has, or change MemberConfig(resources=…)"
        )


def _said(needs: Mapping[str, float]) -> str:
    return ", ".join(f"{k} {format_bytes(v) if k == 'memory' else format(v, 'g')}" for k, v in needs.items())
