"""Recognises out-of-memory errors, which differ between devices and systems."""

from __future__ import annotations

import errno

import torch

_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "memoryerror")
"""Of CUDA and MPS, of torch's allocators on Linux and Windows, and of mapped files."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on any device and system."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error).lower()
    return isinstance(error, (RuntimeError, OSError)) and any(words in text for words in _WORDS)
