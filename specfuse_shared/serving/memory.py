"""Memory that nobody uses any more, back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys

import torch


def give_back() -> None:
    """Collect what is left of a closed engine, and return free memory of the process and of its devices.

    glibc keeps what was freed for the process; `malloc_trim` returns it.
    """
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libraries than glibc have none
        if trim is not None:
            trim(0)
