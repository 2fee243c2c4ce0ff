"""Memory that nobody uses any more, back to the system."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading

import torch

from specfuse_shared.placement.sizing import only_cpu
from specfuse_shared.runtime.mps import empty_cache

KERNELS_ENV, KERNELS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", 128
"""oneDNN compiles a kernel for each shape of a product and keeps 1,024 of them: memory in use grew by some 20 MiB with
each demo engine that was loaded, answered and was closed. With so many it stays, and answers take as long."""
TRIM_SECONDS = 5.0
"""Without an answer; then the memory that answers gave back is returned to the system."""


def bound_kernels() -> None:
    """Have oneDNN keep few kernels, unless the environment says how many. It is read with the first product."""
    os.environ.setdefault(KERNELS_ENV, str(KERNELS))


def release() -> None:
    """Collect what is left of a closed engine, and return free memory of the process and of its devices."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available() and not only_cpu():
        empty_cache()
    trim()


def settle() -> None:
    """Have the garbage collector skip what lives now: the libraries and models of a process that loads no more.

    It would search some 400,000 objects every few rounds of many answers, and no answer goes on in those 0.35 s.
    """
    gc.collect()
    gc.freeze()


def trim() -> None:
    """Return free memory of the process: glibc keeps it otherwise. Takes some 0.1 s for a gigabyte."""
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libraries than glibc have none
        if malloc_trim is not None:
            malloc_trim(0)


class IdleTrim:
    """Trims once nothing has been answered for a while; trimming earlier would slow the next answer."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def busy(self) -> None:
        """An answer begins, or the engine is closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def idle(self) -> None:
        """The last answer is over."""
        self.busy()
        self._timer = threading.Timer(TRIM_SECONDS, trim)
        self._timer.daemon = True
        self._timer.start()
