"""Requirements of Apple's MPS alone. The engine has never run there: see docs/where.md.

Two threads that use MPS at once end the process (pytorch #197805), and a copy to the device reads its source after the
call has returned (pytorch #83015, #139550).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

logger = logging.getLogger(__name__)

mps_lock = threading.RLock()
"""Held for every step, load and release of a member on MPS. Hold it around your own work there, such as embeddings:
`with mps_lock: vectors = encoder.encode(texts)`."""
_MOST_KEPT_BYTES = 64 << 20


def is_mps(device: str | torch.device) -> bool:
    return str(device).partition(":")[0] == "mps"


def mps_turn(devices: Iterable[str | torch.device]) -> AbstractContextManager[object]:
    """`mps_lock` where one of `devices` is MPS; else nothing to wait for."""
    return mps_lock if any(map(is_mps, devices)) else nullcontext()


@cache
def warn_untested() -> None:
    """Warn once per process that the engine has never run on MPS."""
    logger.warning(
        "MPS is untested: this engine has never run on an Apple GPU, and answers may be wrong. Compare some with "
        'device="cpu", or use llama.cpp, which has kernels for Metal'
    )


_MOST_SCORE_BYTES = 1 << 30
"""Metal ends the process at 4 GiB (pytorch #149261)."""


def piece_on_mps(size: int, used: int, heads: int) -> int:
    """Prompt tokens of one forward pass after `used` slots: the scores of all heads exist at once, in float32."""
    piece = size
    while piece > 1 and 4 * heads * _rounded(piece) * _rounded(used + piece) > _MOST_SCORE_BYTES:
        piece //= 2
    return piece


def _rounded(count: int) -> int:
    """The next power of two: attention in packed steps rounds its shapes up."""
    return 1 << (count - 1).bit_length()


class _Kept(threading.local):
    def __init__(self) -> None:
        self.sources = list[torch.Tensor]()
        self.size = 0


_kept = _Kept()


def keep_until_read(source: torch.Tensor) -> None:
    """Keep the source of a copy to MPS that is queued, until this thread has waited for the device."""
    if _kept.size > _MOST_KEPT_BYTES:
        torch.mps.synchronize()
        forget_read()
    _kept.sources.append(source)
    _kept.size += source.nbytes


def forget_read() -> None:
    """This thread has waited for the device: no copy reads its source any more."""
    _kept.sources, _kept.size = [], 0


def empty_cache() -> None:
    """Return memory that torch holds on MPS without a use for it."""
    with mps_lock:
        torch.mps.empty_cache()
