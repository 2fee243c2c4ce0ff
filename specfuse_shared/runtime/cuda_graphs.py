"""CUDA graphs: a captured step is replayed by a single launch, and gives the same numbers as an eager run.

A step that cannot be captured runs kernel by kernel, with a reason, as every step does on other devices.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specfuse_shared.runtime.cuda_streams import own_stream
from specfuse_shared.runtime.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

_TOLERANCE = 0.05
"""Largest difference between a replay and the run that was captured, as a share of the largest number."""
_COMPARED_ROWS = 8
_MOST_FAILURES = 4
"""Number of consecutive captures that may fail for temporary reasons."""
_one_at_a_time = threading.Lock()
"""Captures of different threads would take part in each other's memory."""


class ReplayError(ArithmeticError):
    """A replay gave other numbers than a run of the same step."""


class UncapturableError(RuntimeError):
    """No capture of a step can succeed, for example because it makes the host wait for the device."""


class Graphs:
    """Captures steps of member `member` on `device`; `reason`: why capturing is off, None while it is on.

    All graphs of a member are freed together (`drop`), because they are captured in one stream. With any of them,
    torch frees the workspace for that stream's matrix products: a graph that outlived another would write to freed
    memory.
    """

    def __init__(self, device: torch.device, member: str, reason: str | None = None) -> None:
        self._device = device
        self._member = member
        self.reason = reason if device.type == "cuda" else "paged execution without a CUDA device"
        self._pool: Any = None
        self._stream: Any = None
        self._kept: list[torch.cuda.CUDAGraph] = []
        self._failures = 0
        self._has_captured = False

    @property
    def report(self) -> str:
        """ "captured", or "eager: " and why."""
        return "captured" if self.reason is None else f"eager: {self.reason}"

    @property
    def count(self) -> int:
        """Graphs since the last `drop`, including unused and failed ones."""
        return len(self._kept)

    def capture(self, step: Callable[[], None], output: torch.Tensor, ids: torch.Tensor) -> Callable[[], None] | None:
        """A replay of `step`, which ran before with these `ids` and wrote `output` (T, V); None if that cannot be.

        The step must be a function of buffers that stay where they are, and may run any number of times. Some reasons
        do not last, such as insufficient memory, or another thread that waits for the device meanwhile. Then another
        step, or this one later, can still be captured.
        """
        if self.reason is not None:
            return None
        try:
            with _one_at_a_time, torch.cuda.device(self._device):
                graph = self._captured(step)
            self._compare(graph, step, output, ids)
            self._failures, self._has_captured = 0, True
            return partial(_replay, weakref.ref(graph))
        except (ReplayError, UncapturableError) as error:
            self.give_up(_line(error))
        except Exception as error:  # a driver's errors have no common class
            self._failures += not is_out_of_memory(error)
            if is_out_of_memory(error):
                self._pool = None
                logger.warning("member %s: no memory to capture a step (%s)", self._member, _line(error))
            elif self._failures >= _MOST_FAILURES:
                self.give_up(_line(error))
            else:
                logger.warning("member %s: a capture failed and will be tried again (%s)", self._member, _line(error))
        step()
        return None

    def give_up(self, reason: str) -> None:
        """Capture nothing more, and say why."""
        self.reason = reason
        logger.warning("member %s runs without CUDA graphs (%s)", self._member, reason)

    def holds(self, step: Callable[[], None], output: torch.Tensor) -> bool:
        """Whether a replay, which wrote `output` just now, gave what `step` gives. If not, no replay is used again.

        In both cases `output` then holds what the step gave.
        """
        replayed = output.clone()
        step()
        if _alike(replayed, output):
            return True
        self.give_up(_line(ReplayError("a replay gave other numbers than a run of the same step")))
        return False

    def drop(self) -> None:
        """Free all graphs, after waiting for those that run. None of their replays may be called again."""
        if not self._kept:
            return
        here = torch.cuda.current_stream(self._device)
        for stream in filter(None, (here, self._stream)):
            stream.synchronize()  # not the device: that would break what another thread captures
        self._kept.clear()
        self._pool = None

    def _compare(
        self, graph: torch.cuda.CUDAGraph, step: Callable[[], None], output: torch.Tensor, ids: torch.Tensor
    ) -> None:
        """Raises `ReplayError` unless a replay with other ids gives what the step gives with them.

        A kernel that the capture missed would have left the right numbers for the same ids, and for others if the step
        itself went first.
        """
        step_ids = ids.clone()
        try:
            ids.add_(1).remainder_(output.shape[-1])
            output.zero_()
            graph.replay()
            replayed = output.clone()
            step()
            if not _alike(replayed, output):
                raise ReplayError("a replay gave other numbers than the run that was captured")
        finally:
            ids.copy_(step_ids)
        graph.replay()  # so that the caches hold what they held before

    def _captured(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if self._stream is None:
            self._stream = own_stream(self._device, self)
            if self._stream is None:
                raise UncapturableError("no exclusive CUDA stream is left")
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()  # torch does not reuse a pool without users
        here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        self._stream.wait_stream(here)
        try:
            # a capture that fails half-way leaves the allocator in disorder; one step's failure does not rule out
            # others
            watched = nullcontext() if self._has_captured else NoWaiting(self._device)
            with torch.cuda.stream(self._stream):
                with watched:
                    # sets up libraries for the stream; compiled layers must have run before, outside of `watched`
                    step()
                self._stream.synchronize()
                torch.cuda.empty_cache()
                self._kept.append(graph)  # also one that fails, until `drop`
                self._record(graph, step)
        finally:
            here.wait_stream(self._stream)
        return graph

    def _record(self, graph: torch.cuda.CUDAGraph, step: Callable[[], None]) -> None:
        try:
            # other threads (members on other devices, the application) may allocate meanwhile
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            step()
        except BaseException:
            with suppress(Exception):
                self._end(graph)
            self._pool = None  # its contents are unknown
            raise
        self._end(graph)

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except Exception:
            with suppress(Exception):  # else the allocator would believe for ever that a capture is under way
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            self._pool = None
            raise


def _replay(reference: weakref.ref[torch.cuda.CUDAGraph]) -> None:
    graph = reference()
    assert graph is not None, "its generation was dropped"
    graph.replay()


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


class NoWaiting(TorchDispatchMode):
    """While this is active, what this thread runs on `device` raises `UncapturableError` if the host must wait."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            output = func.decompose(*args, **(kwargs or {}))
        if output is not NotImplemented:
            return output
        tensors = _tensors((args, kwargs))
        if any(t.device.type == self._device.type for t in tensors) and _waits(func, tensors):
            raise UncapturableError(f"{func} makes the host wait for the device")
        output = func(*args, **(kwargs or {}))
        if func in _COPIES and len({t.device.type for t in tensors + _tensors(output)}) > 1:
            raise UncapturableError(f"{func} makes the host wait for the device")
        return output


_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _waits(func: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the host needs the values, or the size of the output. Indexing needs it only with a boolean mask."""
    if func is torch.ops.aten.index.Tensor:
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])
    return bool(_WAITING.intersection(func.tags))


def _alike(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits (T, V) agree, a few rows at a time: in float32 they take as much memory as a small model."""
    pieces = (torch.split(rows, _COMPARED_ROWS) for rows in (actual, expected))
    for actual_piece, expected_piece in zip(*pieces, strict=True):
        scale = float(expected_piece.float().abs().nan_to_num().max())
        if not torch.allclose(
            actual_piece.float(), expected_piece.float(), rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True
        ):
            return False
    return True
