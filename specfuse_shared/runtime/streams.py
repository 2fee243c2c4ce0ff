"""A CUDA stream for each model, so that the small kernels of one run beside the matrices of another."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_WORKSPACE_BYTES = 32 << 20


class ModelStream:
    """Where the work of one model on `device` is queued; on a processor there are no streams.

    Whatever a model allocates has to be allocated and used in here: memory that is freed goes back to its stream, whose
    next user is queued behind the last one.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))  # its weights may still be on their way

    def entered(self) -> AbstractContextManager[Any]:
        """While this lasts, what this thread asks of the device is queued in this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Until all that was queued is done."""
        if self._stream is not None:
            self._stream.synchronize()

    @property
    def reserve_bytes(self) -> int:
        """What the library's matrix products may keep for this stream, and for that of captures."""
        return 0 if self._stream is None else 2 * _WORKSPACE_BYTES
