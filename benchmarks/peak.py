"""The most memory that this process has taken, on any system."""

from __future__ import annotations

import sys

import psutil


def peak_bytes() -> int:
    """Of this process, since it began."""
    memory = psutil.Process().memory_info()
    if (peak := getattr(memory, "peak_wset", None)) is not None:  # Windows
        return int(peak)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
