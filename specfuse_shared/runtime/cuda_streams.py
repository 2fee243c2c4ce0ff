"""A CUDA stream for each model, so that the small kernels of one run in parallel with the matrices of another.

torch cycles through 32 streams of a device, and its matrix library keeps one workspace for each: a capture in a
stream that another user works in shares the workspace. So streams are created here, and each is assigned once.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch

from specfuse_shared.runtime.mps import is_mps

_WORKSPACE_BYTES = 32 << 20
_IN_TURN = 32
"""Streams of one priority that torch has for a device."""
_PRIORITIES = (0, -1)
_owners: WeakValueDictionary[int, object] = WeakValueDictionary()
"""Who has each stream. Streams themselves must not be referred to weakly: torch leaves such references dangling when
one goes (pytorch #183403), and the interpreter then ends with a segmentation fault."""
_lock = threading.Lock()


def own_stream(device: torch.device, owner: object) -> Any:
    """A stream of a CUDA device, exclusive while `owner` lives; None if there is none left."""
    with _lock:
        for priority in _PRIORITIES:
            for _ in range(_IN_TURN):
                stream: Any = torch.cuda.Stream(device, priority=priority)
                if stream.cuda_stream not in _owners:
                    _owners[stream.cuda_stream] = owner
                    return stream
    return None


class Stopwatch:
    """The seconds of the work queued in `stream` between creation and `stop`: device time, not queuing time.

    Without a stream, wall-clock time. `on_mps`: of its only stream.
    """

    def __init__(self, stream: Any, on_mps: bool = False) -> None:
        self._began = time.monotonic()
        self._seconds = 0.0
        self._stream = stream
        self._on_mps = on_mps
        self._events = list[Any]()
        self._note()

    def stop(self) -> None:
        self._seconds = time.monotonic() - self._began
        self._note()

    @property
    def seconds(self) -> float | None:
        """None while the device is not through; waits for nothing."""
        if not self._events:
            return self._seconds
        start, end = self._events
        return float(start.elapsed_time(end)) / 1000 if end.query() else None

    def _note(self) -> None:
        if self._stream is not None:
            event: Any = torch.cuda.Event(enable_timing=True)
            event.record(self._stream)
            self._events.append(event)
        elif self._on_mps:
            event = torch.mps.Event(enable_timing=True)
            event.record()
            self._events.append(event)


class ModelStream:
    """The queue for the work of one model on `device`; a processor has no streams.

    A model has to allocate and use its memory in here: freed memory returns to its stream, whose
    next user is queued after the last one.
    """

    _on_mps = False

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        self._on_mps = is_mps(device)
        if device.type == "cuda":
            self._stream = own_stream(device, self)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # its weights may still be on their way

    def entered(self) -> AbstractContextManager[Any]:
        """While this lasts, what this thread asks of the device is queued in this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def timed(self) -> Stopwatch:
        """Start timing the work queued from now on."""
        return Stopwatch(self._stream, self._on_mps)

    def wait(self) -> None:
        """Until all that was queued is done."""
        if self._stream is not None:
            self._stream.synchronize()

    @property
    def reserve_bytes(self) -> int:
        """Workspace of the library's matrix products for this stream, and for the stream of captures."""
        return 0 if self._stream is None else 2 * _WORKSPACE_BYTES
