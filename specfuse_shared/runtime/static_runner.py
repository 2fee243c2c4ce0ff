"""Static execution: drafts and verifications as steps of fixed shape, which CUDA graphs replay.

A step is one forward pass over cache rows of many answers. A verification is one step. A draft takes one step per
token, except that its first token comes from logits of an earlier forward pass. Each chosen token is copied into the
next step on the device, so that the host waits once, for all tokens of all answers. Tokens after EOS are computed, then
discarded.

- `StaticStep` feeds the first rows of each block that it needs, with the same number of tokens in each. That number is
  rounded up generously, so that few shapes occur. Everything it reads is in its own buffers. Rows that do not take
  part, and the padding of others, are inert tokens: they see slot 0 and are written into their row's spare slot.
- `Graphs` captures the steps of one model, each once. A replay is a single launch. Steps that cannot be captured run
  eagerly, with a reason, as they do on a CPU.
- `StaticRunner` keeps the steps, and runs or replays them.

Symbols: B answers, R rows of a part, Q tokens of each row, K slots of each row, T tokens of a step, V vocabulary.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Cache

from specfuse_shared.runtime.attention import ForwardInput, Kernel, MaskPlan, additive, running
from specfuse_shared.runtime.cuda_streams import own_stream
from specfuse_shared.runtime.kv_cache import CacheBlock, CacheRow, Row
from specfuse_shared.runtime.out_of_memory import is_out_of_memory
from specfuse_shared.runtime.sampler import NOT_FINITE, BatchSampling, Download, NotFiniteError, Sampler, upload

_MOST_TOKENS = {"cuda": 1024}
_DEFAULT_MOST_TOKENS = 256
"""Tokens of the longest step on other devices than CUDA's. A longer forward pass is bound by arithmetic, not by
launches, so that padding would only cost time: it runs unpadded. On a CUDA device, 32 answers fit, also if one of them
has a guess."""
CAPTURE_AT = 3
"""The use of a step at which it is captured. Many shapes occur only once."""
_QUERIES = (8, 32, 64, 128)
"""Numbers of tokens of a row in a verification: some padding costs less than another shape to capture."""
WARMED_QUERIES = _QUERIES[:3]
"""Usual numbers of tokens in one answer's verifications."""


def most_tokens(device: torch.device) -> int:
    """Tokens of the longest step, padding included."""
    return _MOST_TOKENS.get(device.type, _DEFAULT_MOST_TOKENS)


@dataclass(frozen=True, slots=True)
class Shape:
    """R rows of a block, Q tokens of each."""

    block: CacheBlock
    rows: int
    queries: int

    @property
    def tokens(self) -> int:
        return self.rows * self.queries


@dataclass(slots=True)
class _Part:
    """A shape in a step: its tokens are `start` … `stop` - 1.

    `visible` (R, Q, K): the slots that each token sees; None in a draft, where a token sees every slot up to its own.
    `places` (R, K): the position of each slot; in a draft, slots are positions. `version`: of the block's buffers when
    the step was made.
    """

    shape: Shape
    start: int
    version: int
    row_at: torch.Tensor
    slots: torch.Tensor
    visible: torch.Tensor | None
    places: torch.Tensor
    masks: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.start + self.shape.tokens

    def first(self, row: CacheRow) -> int:
        """Number of the row's first token."""
        return self.start + row.index * self.shape.queries


class StaticStep(Cache):
    """One forward pass over parts of fixed shape; acts as the model's cache.

    `inputs` (3, T): ids, positions and slots to write to. `moving` (T): 1 where a draft continues.
    """

    def __init__(self, shapes: Sequence[Shape], plan: MaskPlan, device: torch.device, dtype: torch.dtype, tree: bool):
        super().__init__(layers=[])
        self._plan = plan
        self._dtype = dtype
        self.tokens = sum(shape.tokens for shape in shapes)
        self.inputs = torch.zeros(3, self.tokens, dtype=torch.long, device=device)
        self.ids, self.positions, self._slots = self.inputs
        self.moving = torch.zeros(self.tokens, dtype=torch.long, device=device)
        self.logit_tokens: torch.Tensor | None = None
        self.logits: torch.Tensor | None = None
        self.replay: Callable[[], None] | None = None
        self.uses = 0
        self.capture_at = CAPTURE_AT
        self.replays = 0
        self.parts: list[_Part] = []
        start = 0
        for shape in shapes:
            self.parts.append(self._part(shape, start, tree))
            start += shape.tokens

    def _part(self, shape: Shape, start: int, tree: bool) -> _Part:
        rows, queries, capacity, device = shape.rows, shape.queries, shape.block.capacity, self.inputs.device
        return _Part(
            shape,
            start,
            shape.block.version,
            row_at=torch.arange(rows, device=device)[:, None],
            slots=self._slots[start : start + shape.tokens].view(rows, queries),
            visible=torch.zeros(rows, queries, capacity, dtype=torch.bool, device=device) if tree else None,
            places=torch.arange(capacity, device=device).repeat(rows, 1),
        )

    @property
    def is_valid(self) -> bool:
        """Whether the blocks still have the buffers for which the step was made."""
        return all(part.version == part.shape.block.version for part in self.parts)

    def part_of(self, row: CacheRow) -> _Part:
        return next(part for part in self.parts if part.shape.block is row.block)

    def fill(self, segments: Sequence[ForwardInput]) -> torch.Tensor:
        """Copy the inputs of answers into the step. Returns the indices of tokens that need logits, on the device."""
        inputs = self._inert()
        visible = [np.zeros(part.visible.shape, dtype=bool) for part in self.parts if part.visible is not None]
        places = [np.tile(np.arange(part.places.shape[1]), (len(part.places), 1)) for part in self.parts]
        for mask in visible:
            mask[:, :, 0] = True
        logit_rows: list[int] = []
        for segment in segments:
            part, row, count = self.part_of(segment.row), segment.row, len(segment.ids)
            first, number, at = part.first(row), self.parts.index(part), segment.slot_positions()
            inputs[:, first : first + count] = segment.ids, at[-count:], np.arange(row.used, segment.slots)
            visible[number][row.index, :count, : segment.slots] = segment.seen()
            places[number][row.index, : segment.slots] = at
            logit_rows += range(first + count - segment.logit_count, first + count)
        self.inputs.copy_(upload(inputs, self.inputs.device))
        for part, mask, at in zip(self.parts, visible, places, strict=True):
            assert part.visible is not None
            part.visible.copy_(upload(mask, self.inputs.device))
            part.places.copy_(upload(at, self.inputs.device))
        return upload(logit_rows, self.inputs.device)

    def begin(self, rows: Sequence[CacheRow]) -> torch.Tensor:
        """Start drafts after the contents of these rows; returns the number of each one's token, on the device."""
        inputs, numbers = self._inert(), [self.part_of(row).first(row) for row in rows]
        moving = np.zeros(self.tokens, dtype=np.int64)
        for row, number in zip(rows, numbers, strict=True):
            inputs[1:, number] = row.used
            moving[number] = 1
        self.inputs.copy_(upload(inputs, self.inputs.device))
        self.moving.copy_(upload(moving, self.inputs.device))
        return upload(numbers, self.inputs.device)

    def advance(self) -> None:
        """Move every draft on by one position and slot."""
        self.inputs[1:].add_(self.moving)

    def _inert(self) -> NDArray[np.int64]:
        inputs = np.zeros((3, self.tokens), dtype=np.int64)
        for part in self.parts:
            inputs[2, part.start : part.stop] = part.shape.block.capacity - 1
        return inputs

    def make_masks(self) -> None:
        """Additive masks (R, 1, Q, K) of every layer kind."""
        for part in self.parts:
            at = self.positions[part.start : part.stop].view(part.shape.rows, part.shape.queries)
            visible = part.places[:, None, :] <= at[:, :, None] if part.visible is None else part.visible
            for kind in self._plan.kinds:
                part.masks[kind] = additive(self._plan.restrict(kind, visible, at, part.places), self._dtype)[:, None]

    def drop_masks(self) -> None:
        """Free the masks after a step, so that in a pool of graphs the next masks take their place."""
        for part in self.parts:
            part.masks.clear()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values (1, H, T, D) into the rows; attention reads them from there."""
        for part in self.parts:
            for cached, new in zip(part.shape.block.layers[layer_idx], (key_states, value_states), strict=True):
                fresh = new[0, :, part.start : part.stop].transpose(0, 1)
                cached[part.row_at, :, part.slots] = fresh.reshape(*part.slots.shape, *fresh.shape[1:])
        return key_states, value_states

    def attend(
        self, kernel: Kernel, module: Any, query: torch.Tensor, marker: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Attention output (1, T, H, D) of one layer."""
        kind, outputs = self._plan.kinds[marker.shape[-1] - 1], []
        for part in self.parts:
            keys, values = (t[: part.shape.rows] for t in part.shape.block.layers[module.layer_idx])
            part_query = query[0, :, part.start : part.stop]
            part_query = part_query.reshape(len(part_query), *part.slots.shape, part_query.shape[-1]).transpose(0, 1)
            outputs.append(kernel(module, part_query, keys, values, part.masks[kind], **kwargs)[0].flatten(0, 1))
        return (torch.cat(outputs) if len(outputs) > 1 else outputs[0])[None]


def shapes_of(requests: Sequence[tuple[CacheRow, int]], tree: bool) -> list[Shape]:
    """Shapes that cover these rows, each with as many tokens as the longest input needs; one in a draft."""
    longest = max(count for _, count in requests)
    queries = next((n for n in _QUERIES if n >= longest), longest) if tree else 1
    return [Shape(block, rows, queries) for block, rows in requests[0][0].pool.covering([row for row, _ in requests])]


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
        self.reason = reason if device.type == "cuda" else "static execution without a CUDA device"
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
        do not last, such as a lack of memory, or another thread that waits for the device meanwhile. Then another
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
                    step()  # the first call on a stream sets up libraries for it
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


_MOST_STEPS, _MOST_GRAPHS = 128, 64
_USUAL_TOKENS = 256
_USUAL_STEPS = 24
_GRAPH_BYTES = 8 << 20
_MASKED_SLOTS = 4096
_FIRST_CHECK, _NEXT_CHECK = 64, 8
"""A replay is compared with a run at the 64th replay of its step, and then each time the count has grown eightfold."""
_ACTIVATIONS = 64
"""Activations of one token that are alive at once, in multiples of the hidden size; rather too many."""

Forward = Callable[..., torch.Tensor]
"""(ids (T), cache, positions (T), masks) → logits (T, V)."""


@dataclass(frozen=True, slots=True)
class DraftInput:
    """A draft of `count` tokens after the contents of `row`. `logits` (V) are those for the first one.

    `history`: the ids before the draft, if the sampler asks for them. `blocked` (N): ids that it must not choose.
    """

    row: Row
    logits: torch.Tensor
    history: Sequence[int]
    sampler: Sampler
    blocked: torch.Tensor | None
    count: int


class DraftRun:
    """Tokens of many drafts (`chosen`: B per step) and the logits after all but the last (B, V), on the device."""

    def __init__(self, chosen: Sequence[torch.Tensor], logits_after: Sequence[torch.Tensor]) -> None:
        self._behind = logits_after
        self._sent = Download(torch.stack(list(chosen)))
        self._rows: list[list[int]] | None = None

    def tokens(self, column: int, count: int, stop_ids: Sequence[int]) -> tuple[list[int], bool]:
        """The first `count` tokens of a draft, up to the end of its turn, and whether the turn ended.

        The first call waits for the device. Raises `NotFiniteError` if logits before the end were not finite.
        """
        if self._rows is None:
            self._rows = self._sent.read()
        ids: list[int] = []
        for row in self._rows[:count]:
            if row[column] == NOT_FINITE:
                raise NotFiniteError
            if row[column] in stop_ids:
                return ids, True
            ids.append(row[column])
        return ids, False

    def logits(self, column: int, place: int) -> torch.Tensor:
        """Logits (V) after the token at position `place` of a draft."""
        return self._behind[place][column]


class Step(Protocol):
    """A forward pass of fixed shape; acts as the model's cache.

    `logit_tokens`: the indices of the tokens whose logits are computed; None: of all.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    moving: torch.Tensor
    logit_tokens: torch.Tensor | None
    logits: torch.Tensor | None
    replay: Callable[[], None] | None
    uses: int
    replays: int
    capture_at: int

    @property
    def is_valid(self) -> bool:
        """Whether the buffers for which the step was made are still in place."""
        ...

    def begin(self, rows: Sequence[Any]) -> torch.Tensor:
        """Start drafts after the contents of these rows; returns the number of each one's token, on the device."""
        ...

    def advance(self) -> None:
        """Move every draft on by one position and slot."""
        ...

    def make_masks(self) -> None: ...

    def drop_masks(self) -> None: ...

    def attend(
        self, kernel: Kernel, module: Any, query: torch.Tensor, marker: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor: ...


class StaticRunner:
    """Runs the steps of one model. `forward`: calls the model. `graphs`: captures steps, where possible."""

    def __init__(
        self, forward: Forward, plan: MaskPlan, device: torch.device, dtype: torch.dtype, graphs: Graphs
    ) -> None:
        self._forward = forward
        self._plan = plan
        self._device = device
        self._dtype = dtype
        self.graphs = graphs
        self._markers = plan.markers(device, dtype)
        self._steps: OrderedDict[tuple[object, ...], Step] = OrderedDict()
        self._most = most_tokens(device)
        self._logits: dict[int, torch.Tensor] = {}
        self.replayed = self.ran = 0
        """Numbers of fixed-shape forward passes that were replayed, and that ran eagerly."""

    def fits(self, segments: Sequence[ForwardInput]) -> bool:
        """Whether these inputs should use a step: none is a prompt, and the step would not be too long."""
        if any(s.visible is None for s in segments):
            return False
        shapes = shapes_of([(s.row, len(s.ids)) for s in segments], tree=True)
        return sum(shape.tokens for shape in shapes) <= self._most

    def step(self, segments: Sequence[ForwardInput]) -> list[torch.Tensor]:
        """Feed all inputs in one step. Returns the logits (`logit_count`, V) of each."""
        step = self._step([(s.row, len(s.ids)) for s in segments], tree=True)
        assert isinstance(step, StaticStep)
        logit_rows = step.fill(segments)
        return list(torch.split(self._run(step).index_select(0, logit_rows), [s.logit_count for s in segments]))

    def draft(self, drafts: Sequence[DraftInput]) -> DraftRun:
        """Choose and feed the tokens of many drafts, up to the longest `count`, without waiting for the device.

        `row.used` then counts all tokens of a draft but the last, also those after the end of its turn. The caller
        corrects it once it has read the tokens.
        """
        chosen, logits_after = self._chosen(drafts, max(draft.count for draft in drafts))
        for draft in drafts:
            draft.row.used += draft.count - 1
        return DraftRun(chosen, logits_after)

    def _chosen(self, drafts: Sequence[DraftInput], count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """`count` tokens of every draft, a tensor (B) each, and the logits (B, V) after all but the last."""
        rows, logits = [draft.row for draft in drafts], torch.stack([draft.logits for draft in drafts])
        choose = BatchSampling([d.sampler for d in drafts], [d.blocked for d in drafts], [d.history for d in drafts])
        chosen, logits_after = [choose(logits, 0)], list[torch.Tensor]()
        if count > 1:
            for draft in drafts:
                draft.row.reserve(draft.row.used + draft.count)
            numbers_of = defaultdict[int, list[int]](list)  # by the count of drafts that end before others
            for number, draft in enumerate(drafts):
                numbers_of[draft.count].append(number)
            step = self._step([(row, 1) for row in rows], tree=False)
            at = step.begin(rows)
            for offset in range(1, count):
                step.ids.index_copy_(0, at, chosen[-1].clamp(min=0))
                logits_after.append(self._run(step).index_select(0, at))
                chosen.append(choose(logits_after[-1], offset))
                if offset in numbers_of:  # no further: there may be no position or page for it
                    step.moving.index_fill_(0, at[upload(numbers_of[offset], self._device)], 0)
                step.advance()
        return chosen, logits_after

    def warm_up(self, row: Any) -> None:
        """Run and capture the steps for a draft after this row, and for verifications of up to 64 tokens."""
        for count, tree in ((1, False), *((count, True) for count in WARMED_QUERIES)):
            step = self._step([(row, count)], tree)
            step.begin([row])
            step.uses = step.capture_at
            self._run(step)

    def reserve_bytes(self, width: int, vocabulary: int) -> int:
        """Bytes that captured steps may take, for a model of hidden size `width`; a generous estimate.

        It counts the logits of the largest step and of its comparison, its activations and masks, the inputs of each
        step, and the graphs.
        """
        if self.graphs.reason is not None:
            return 0
        size = torch.empty((), dtype=self._dtype).element_size()
        masks = _MASKED_SLOTS * (size * len(self._plan.kinds) + _USUAL_STEPS)
        return self._most * ((2 * vocabulary + _ACTIVATIONS * width) * size + masks) + _USUAL_STEPS * _GRAPH_BYTES

    def drop(self) -> bool:
        """Free the memory of all steps, none of which may still run. Returns whether any was captured."""
        had = self.graphs.count > 0
        self._steps.clear()
        self._logits.clear()
        self.graphs.drop()
        return had

    def _run(self, step: Step) -> torch.Tensor:
        """Logits (T, V) of the step, until the next one runs."""
        if step.replay is not None and self.graphs.reason is None:
            self._replay(step, step.replay)
        else:
            self._feed(step)
            self.ran += 1
        assert step.logits is not None
        if step.replay is None and step.uses >= step.capture_at:
            self._capture(step, step.logits)
        return step.logits

    def _replay(self, step: Step, replay: Callable[[], None]) -> None:
        replay()
        self.replayed += 1
        step.replays += 1
        assert step.logits is not None
        if _is_checked(step.replays):
            self.graphs.holds(lambda: self._feed(step), step.logits)

    def _capture(self, step: Step, logits: torch.Tensor) -> None:
        step.replay = self.graphs.capture(lambda: self._feed(step), logits, step.ids)
        if step.replay is None:  # memory may have been insufficient: try again, later
            step.capture_at = 4 * step.uses

    def _feed(self, step: Step) -> None:
        """Run the step eagerly, from its buffers to its logits."""
        step.make_masks()
        with running(step):
            keep = {} if step.logit_tokens is None else {"logits_to_keep": step.logit_tokens}
            logits = self._forward(step.ids, step, step.positions, self._markers, **keep)
        step.drop_masks()
        if step.logits is None:
            step.logits = self._output(len(logits), logits)
        step.logits.copy_(logits)

    def _output(self, tokens: int, like: torch.Tensor) -> torch.Tensor:
        """A buffer for logits (T, V). Usual steps share one; longer ones, up to the limit, share another."""
        if tokens > self._most:
            return torch.empty_like(like)
        size = _USUAL_TOKENS if tokens <= _USUAL_TOKENS else self._most
        if size not in self._logits:
            self._logits[size] = like.new_empty(size, like.shape[-1])
        return self._logits[size][:tokens]

    def _step(self, requests: Sequence[tuple[Any, int]], tree: bool) -> Step:
        """The step of the smallest shapes that hold these numbers of tokens of these rows; made if there is none."""
        shapes = shapes_of(requests, tree)
        key = (tree, *((id(shape.block), shape.rows, shape.queries) for shape in shapes))
        step = self._steps.get(key)
        if step is None or not step.is_valid:
            self._make_place()
            step = self._steps[key] = StaticStep(shapes, self._plan, self._device, self._dtype, tree)
        self._steps.move_to_end(key)
        step.uses += 1
        return step

    def _make_place(self) -> None:
        """Make room for one more step. With too many graphs, all steps go. With too many steps, invalid ones go.

        If these do not suffice, the oldest steps without a graph go.
        """
        if self.graphs.count >= _MOST_GRAPHS:
            self.drop()
        if len(self._steps) < _MOST_STEPS:
            return
        self._steps = OrderedDict((key, step) for key, step in self._steps.items() if step.is_valid)
        if len(self._steps) >= _MOST_STEPS:
            spare = [key for key, step in self._steps.items() if step.replay is None]
            for key in spare[: len(self._steps) - _MOST_STEPS + 1]:
                del self._steps[key]


def _is_checked(replays: int) -> bool:
    at = _FIRST_CHECK
    while at < replays:
        at *= _NEXT_CHECK
    return at == replays
