"""One engine for one configuration in the whole process, whoever asks; freed when the last holder lets go.

After a fork the child starts afresh: neither threads nor device contexts survive one.
"""

from __future__ import annotations

import os
import threading
from typing import Self

from specfuse_shared.config import EnsembleConfig
from specfuse_shared.serving.engine import EnsembleEngine


class EngineLease:
    """A holder's share in an engine. When the last holder closes its own, the engine is closed.

    A lease that is dropped without `close` gives its share back but leaves the engine loaded for whoever asks next.
    """

    def __init__(self, engine: EnsembleEngine) -> None:
        self.engine = engine
        self._open = True

    def close(self) -> None:
        """Let go. Safe to call twice."""
        if self._open:
            self._open = False
            _registry.release(self.engine, close=True)

    def __del__(self) -> None:
        if self._open:
            self._open = False
            _registry.release(self.engine, close=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Registry:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.RLock()  # a lease may be collected while another one is made
        self._engines: list[EnsembleEngine] = []
        self._holders: dict[int, int] = {}

    def lease(self, config: EnsembleConfig) -> EngineLease:
        with self._lock:
            self._engines = [engine for engine in self._engines if not engine.closed]
            engine = next((engine for engine in self._engines if engine.config == config), None)
            if engine is None:
                engine = EnsembleEngine(config)
                self._engines.append(engine)
                self._holders[id(engine)] = 0
            self._holders[id(engine)] += 1
            return EngineLease(engine)

    def release(self, engine: EnsembleEngine, *, close: bool) -> None:
        with self._lock:
            left = max(0, self._holders.get(id(engine), 0) - 1)
            self._holders[id(engine)] = left
            if left or not close:
                return
            del self._holders[id(engine)]
            self._engines = [known for known in self._engines if known is not engine]
        engine.close()


_registry = _Registry()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_registry.reset)


def lease_engine(config: EnsembleConfig) -> EngineLease:
    """A share in this process's engine for a configuration; it loads on first use."""
    return _registry.lease(config)
