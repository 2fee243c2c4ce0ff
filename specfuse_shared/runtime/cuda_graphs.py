"""CUDA graphs of one model's steps: captured once, then replayed by a single launch.

What cannot be captured runs as it is, and says why. Nothing here knows what a step computes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

logger = logging.getLogger(__name__)

_TOLERANCE = 0.05
"""Largest difference between a replay and the run that was captured, as a share of the largest number."""
_one_at_a_time = threading.Lock()
"""Captures of different threads would take part in each other's memory."""


class Graphs:
    """Captures steps of member `member` on `device`; `reason`: why it does not, None while it does."""

    def __init__(self, device: torch.device, member: str, reason: str | None = None) -> None:
        self._device, self._member = device, member
        self.reason = reason if device.type == "cuda" else "static execution without a CUDA device"
        self._pool: Any = None
        self._stream: Any = None

    @property
    def report(self) -> str:
        """ "captured", or "eager: " and why."""
        return "captured" if self.reason is None else f"eager: {self.reason}"

    def capture(self, step: Callable[[], None], output: torch.Tensor) -> Callable[[], None] | None:
        """A replay of `step`, which ran before with the same inputs and wrote `output`; None if that cannot be.

        The step must be a function of buffers that stay where they are, and may run any number of times.
        """
        if self.reason is not None:
            return None
        expected = output.clone()
        try:
            with _one_at_a_time, torch.cuda.device(self._device):
                graph = self._captured(step)
            output.zero_()
            graph.replay()
            if not _alike(output, expected):
                raise ArithmeticError("a replay gave other numbers than the run that was captured")
            return graph.replay
        except Exception as error:  # a driver's errors have no common class
            self.reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            logger.warning("member %s runs without CUDA graphs (%s)", self._member, self.reason)
            output.copy_(expected)
            return None

    def wait(self) -> None:
        """Until nothing that was replayed runs any more."""
        if self.reason is None:
            torch.cuda.synchronize(self._device)

    def _captured(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                with NoWaiting(self._device):  # a capture that fails half-way leaves the allocator in disorder
                    step()  # libraries set themselves up for a stream at their first call on it
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                # other threads (members on other devices, the application) may allocate meanwhile
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    self._end(graph)
        finally:
            here.wait_stream(self._stream)
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except Exception:
            with suppress(Exception):  # else the allocator would believe for ever that a capture is under way
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            raise


class NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this lasts, an operation of this thread that makes the host wait for `device` raises `RuntimeError`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            found = func.decompose(*args, **(kwargs or {}))
        if found is not NotImplemented:
            return found
        tensors = _tensors((args, kwargs))
        if any(t.device.type == self._device.type for t in tensors) and _waits(func, tensors):
            raise RuntimeError(f"{func} makes the host wait for the device")
        found = func(*args, **(kwargs or {}))
        if func in _COPIES and len({t.device.type for t in tensors + _tensors(found)}) > 1:
            raise RuntimeError(f"{func} makes the host wait for the device")
        return found


_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _waits(func: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the host has to know numbers, or how many come out; indexing only does if it selects by true or false."""
    if func is torch.ops.aten.index.Tensor:
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])
    return bool(_WAITING.intersection(func.tags))


def _alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    scale = float(expected.float().abs().nan_to_num().max())
    return torch.allclose(found.float(), expected.float(), rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)
