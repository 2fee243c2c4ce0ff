"""Requirements of tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch


def needs_cuda(gib: float, what: str) -> Callable[[Any], Any]:
    """Marks a test that needs a CUDA device with this much free memory; `what` describes other needs."""
    lacking = pytest.mark.skipif(_free_gib() < gib, reason=f"needs a CUDA device with {gib:g} GiB free: {what}")
    unplanned = pytest.mark.skipif(find_spec("accelerate") is None, reason="members are placed by accelerate")
    return lambda test: pytest.mark.gpu(lacking(unplanned(test)))


@cache
def _free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0.0
