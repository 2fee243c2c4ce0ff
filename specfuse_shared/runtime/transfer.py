"""Between the host and a device, without waiting for what the device still has to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specfuse_shared.runtime.mps import forget_read, is_mps, keep_until_read


def upload(values: Sequence[int] | NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor, an array, or numbers as int64, on `device`.

    Page-locked memory on the way to a CUDA device: from pageable memory the driver may wait for all that is queued.
    MPS reads the source after this has returned: what it reads is a copy, which is kept until the next `Download`.
    """
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(values)
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.long)
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    elif is_mps(device):
        tensor = tensor if isinstance(values, Sequence) else tensor.clone()  # a caller may change what it gave
        keep_until_read(tensor)
    return tensor.to(device, non_blocking=True)


class Download:
    """Numbers that are sent to the host as soon as they are computed; what is queued later does not delay them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._sent = None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._sent = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> list[Any]:
        """The numbers as nested lists, once they are there."""
        if self._sent is not None:
            self._sent.synchronize()
        numbers = list(self._tensor.tolist())
        if is_mps(self._tensor.device):
            forget_read()
        return numbers
