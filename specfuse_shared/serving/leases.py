"""One engine per configuration and process, shared by all callers and freed with its last lease.

After a fork the child starts afresh: neither threads nor device contexts survive one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

from specfuse_shared.serving.engine import EnsembleEngine
from specfuse_shared.settings.config import EnsembleConfig


@dataclass(slots=True, eq=False)
class _Shared:
    """An engine of this process, and how many hold it."""

    engine: EnsembleEngine
    holders: int = 0


class EngineLease:
    """A share in an engine. The engine closes with its last lease.

    A lease that is dropped without `close` leaves the engine loaded for the next caller, or until
    `close_idle_engines`.
    """

    def __init__(self, engine: EnsembleEngine, release: Callable[[bool], None]) -> None:
        self.engine = engine
        self._give_back: Callable[[bool], None] | None = release

    def close(self) -> None:
        """Give the share back. Safe to call twice."""
        self._release(close=True)

    def _release(self, close: bool) -> None:
        release, self._give_back = self._give_back, None
        if release is not None:
            release(close)

    def __del__(self) -> None:
        self._release(close=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Registry:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.RLock()  # a lease may be collected while another one is made
        self._shared: list[_Shared] = []

    def lease(self, config: EnsembleConfig) -> EngineLease:
        with self._lock:
            dead = [shared for shared in self._shared if shared.engine.closed]
            self._shared = [shared for shared in self._shared if shared not in dead]
            for shared in dead:
                shared.engine.close()  # one that broke still holds its weights
            found = next((shared for shared in self._shared if shared.engine.config == config), None)
            if found is None:
                found = _Shared(EnsembleEngine(config))
                self._shared.append(found)
            found.holders += 1
            return EngineLease(found.engine, partial(self.release, found))

    def release(self, shared: _Shared, close: bool) -> None:
        with self._lock:
            shared.holders -= 1
            if shared not in self._shared or shared.holders or not close:
                return
            self._shared.remove(shared)
        shared.engine.close()

    def close_idle(self) -> int:
        with self._lock:
            idle = [shared for shared in self._shared if not shared.holders]
            self._shared = [shared for shared in self._shared if shared.holders]
        for shared in idle:
            shared.engine.close()
        return len(idle)


_registry = _Registry()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_registry.reset)


def lease_engine(config: EnsembleConfig) -> EngineLease:
    """A share in this process's engine for a configuration. The engine loads on first use."""
    return _registry.lease(config)


def close_idle_engines() -> int:
    """Close the engines of this process that have no lease, such as those of models that were dropped without `close`.

    Returns how many were closed.
    """
    return _registry.close_idle()
