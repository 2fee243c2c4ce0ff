"""Attention of many answers in one forward pass: the visible slots of each query, and a fast kernel call per block.

The tokens of all answers are concatenated, (1, H, T, D); keys and values are in cache rows. A mask plan says which
slots the layers of an architecture see, and how the model expects its masks. There are two kernels: one of this
package for grouped-query heads, and the model's own eager attention.

Symbols: T tokens fed, B answers of a group, Q queries of an answer, K slots, position = place in the token sequence
(≠ slot once a tree is cached).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from specfuse_shared.runtime.kv_cache import CacheBlock
from specfuse_shared.runtime.sampler import upload

_MOST_FOLDED_QUERIES = 128


def choose_kernels(device: torch.device) -> None:
    """Set torch's attention for the whole process, if a member is on `device`.

    On some cards torch prefers cuDNN's attention. It takes 0.4 s to plan for each new shape, and every prompt has one.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def masks_lower_right(device: torch.device) -> bool:
    """Whether a device is known to have a kernel for queries at the end of their keys that takes no mask.

    A CPU has none. On ROCm such kernels have masked from the upper left corner, and MPS was wrong or crashed
    with some lengths (pytorch #149132, #174861). So all devices but CUDA's get masks.
    """
    return device.type == "cuda" and torch.version.hip is None


def grouped_kernel(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention that does not copy keys and values for grouped-query heads, unless a mask comes with
    more than `_MOST_FOLDED_QUERIES` queries.

    Folds the G query heads of a key head into the query dimension: (B, H, Q, D) → (B, H/G, G·Q, D). Long queries
    (prefill) and plain causal calls go to the functions of torch and transformers.
    """
    batch, heads, queries, _ = query.shape
    groups = heads // key.shape[1]
    if isinstance(attention_mask, CausalBias):
        out = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=groups > 1)
        return out.transpose(1, 2).contiguous(), None
    if attention_mask is None or queries > _MOST_FOLDED_QUERIES or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if groups == 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    folded = query.reshape(batch, key.shape[1], groups * queries, query.shape[-1])
    mask = attention_mask if queries == 1 else attention_mask.repeat(1, 1, groups, 1)
    out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, queries, value.shape[-1]).transpose(1, 2).contiguous(), None


def eager_kernel(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """The model's own eager attention (soft caps, attention sinks), which always needs a mask."""
    if attention_mask is None or isinstance(attention_mask, CausalBias):
        queries, slots = query.shape[2], key.shape[2]
        hidden = torch.ones(queries, slots, dtype=torch.bool, device=query.device).triu(1 + slots - queries)
        attention_mask = query.new_zeros(1, 1, queries, slots).masked_fill_(hidden, torch.finfo(query.dtype).min)
    model_kernel = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    output: tuple[torch.Tensor, Any] = model_kernel(module, query, key, value, attention_mask, **kwargs)
    return output


KINDS: tuple[str, ...] = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """How a model takes its masks: one for all layers, or a mapping by layer kind (`as_mapping`)."""

    kinds: tuple[str, ...]
    as_mapping: bool
    window: int | None = None
    chunk: int | None = None

    def restrict(self, kind: str, visible: torch.Tensor, query_at: torch.Tensor, key_at: torch.Tensor) -> torch.Tensor:
        """`visible` (…, Q, K) without what layers of this kind never see, given the positions of queries and slots."""
        queries, keys = query_at[..., :, None], key_at[..., None, :]
        if kind == "sliding_attention" and self.window is not None and key_at.shape[-1] > self.window:
            return visible & (queries - keys < self.window)
        if kind == "chunked_attention" and self.chunk is not None and key_at.shape[-1] > self.chunk:
            return visible & (queries // self.chunk == keys // self.chunk)
        return visible

    def is_plain(self, kind: str, slots: int) -> bool:
        """Whether layers of this kind see everything before a query, with this number of slots."""
        reach = {"sliding_attention": self.window, "chunked_attention": self.chunk}.get(kind)
        return reach is None or slots <= reach

    def markers(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor | dict[str, torch.Tensor]:
        """The masks for the model: tiny tensors whose last dimension gives the attention function the layer kind."""
        made = {k: torch.zeros(1, 1, 1, n + 1, device=device, dtype=dtype) for n, k in enumerate(self.kinds)}
        return made if self.as_mapping else made[self.kinds[0]]


def plans_for(config: Any) -> list[MaskPlan]:
    """Mask plans to probe for a text configuration, most probable first; empty for recurrent architectures."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    kinds = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if any(kind not in KINDS for kind in kinds):
        return []
    single = [MaskPlan(("full_attention",), False)]
    if window is not None:
        single.insert(0, MaskPlan(("sliding_attention",), False, window))
    return [MaskPlan(kinds, True, window, chunk), *single] if kinds else single


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where `visible`, else half the lowest number: kernels multiply it by log₂ e, which must stay finite."""
    hidden = torch.finfo(dtype).min / 2
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, hidden)


GROUPED, EAGER = "specfuse_grouped_sdpa", "specfuse_eager"
_LONG = {"cpu": 4}
_DEFAULT_LONG = 64
"""From this number of queries on, an answer gets a separate kernel call, so that short ones are not padded to its
length. On a CPU the number is low, because there calls cost little. On a GPU padding costs little."""
_MOST_INDEXED = 16
"""A segment with a separate kernel call that has more tokens than this is also written to its row separately."""
_SHORT, _OWN_CALL, _COPIED = range(3)
"""Sizes of segments: those that share a kernel call; those that share only the writes; those that share nothing."""

Kernel = Callable[..., tuple[torch.Tensor, Any]]


@dataclass(slots=True)
class ForwardInput:
    """One answer's input: tokens after the used slots of its cache row.

    `row`: a `CacheRow`, or a `PagedRow` for packed steps. `visible` (Q, K): the slots that each query sees, including
    its own; None: every slot up to its own. `positions` (K): the position of each slot; None: slots are positions.
    `logit_count`: number of last tokens that need logits.
    """

    row: Any
    ids: Sequence[int]
    visible: NDArray[np.bool_] | None = None
    positions: NDArray[np.int64] | None = None
    logit_count: int = 0

    @property
    def slots(self) -> int:
        """K: the slots in use once these tokens are cached."""
        used: int = self.row.used
        return used + len(self.ids)

    def slot_positions(self) -> NDArray[np.int64]:
        return np.arange(self.slots) if self.positions is None else self.positions

    def seen(self) -> NDArray[np.bool_]:
        if self.visible is not None:
            return self.visible
        slots = np.arange(self.slots)
        return np.less_equal(slots[None, :], slots[self.row.used :, None])


@dataclass(slots=True)
class _Group:
    """Answers that share a kernel call: rows `start` … `stop` of a block, each padded to `queries` queries."""

    block: CacheBlock
    start: int
    stop: int
    queries: int
    slots: int
    tokens: slice
    """The fed tokens of the group."""
    masks: dict[str, torch.Tensor | None]
    padding: torch.Tensor | None = None
    """(B · Q): the index of the token in the group for each padded query; None: nothing is padded."""
    padded: torch.Tensor | None = None
    """The index of the padded query for each token."""


class Batch(Cache):
    """One forward pass over the segments of many answers; acts as the model's cache and directs the attention.

    The rows have free slots for the segments. Tokens are fed in the order of `segments`, so that the tokens
    of a kernel call are adjacent: slices cost a fraction of index lookups. `order`: the original index of each
    segment.
    """

    is_packed = False

    def __init__(
        self, segments: Sequence[ForwardInput], plan: MaskPlan, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(layers=[])
        self._plan = plan
        self._device = device
        self._dtype = dtype
        long = _LONG.get(device.type, _DEFAULT_LONG)
        self._knows_lower_right = masks_lower_right(device)
        self._written: list[tuple[CacheBlock, Any, slice]] = []
        self._copies: dict[tuple[int, torch.device], torch.Tensor] = {}
        blocks = list(dict.fromkeys(id(s.row.block) for s in segments))
        places = [(blocks.index(id(s.row.block)), _size_class(s, long), s.row.index) for s in segments]
        self.order = sorted(range(len(segments)), key=places.__getitem__)
        self.segments = [segments[n] for n in self.order]
        self.groups: list[_Group] = []
        start = 0
        for (_, size), alike in groupby(self.order, key=lambda n: places[n][:2]):
            start = self._add([segments[n] for n in alike], size, start)
        self._length: int = max(s.row.used for s in segments)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values (1, H, T, D) into the rows; attention reads them from there."""
        for block, (row, slots), tokens in self._written:
            layer = block.layer(layer_idx, key_states, value_states)
            for cached, new in zip(layer, (key_states, value_states), strict=True):
                fresh = new[0, :, tokens]
                if isinstance(slots, slice):
                    cached[row, :, slots] = fresh
                else:
                    cached[self._near(row, new), :, self._near(slots, new)] = fresh.transpose(0, 1)
        return key_states, value_states

    def attend(
        self, kernel: Kernel, module: Any, query: torch.Tensor, marker: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Attention output (1, T, H, D) of one layer."""
        kind, parts = self._plan.kinds[marker.shape[-1] - 1], []
        for group in self.groups:
            rows, slots = slice(group.start, group.stop), slice(group.slots)
            keys, values = group.block.layers[module.layer_idx]
            keys, values = keys[rows, :, slots], values[rows, :, slots]
            group_query = query[0, :, group.tokens]
            if group.padding is not None:
                group_query = group_query.index_select(1, self._near(group.padding, query))
            group_query = group_query.reshape(len(group_query), -1, group.queries, group_query.shape[-1]).transpose(
                0, 1
            )
            mask = group.masks[kind]
            output = kernel(
                module, group_query, keys, values, None if mask is None else self._near(mask, query), **kwargs
            )[0]
            output = output.flatten(0, 1)
            parts.append(output if group.padded is None else output.index_select(0, self._near(group.padded, query)))
        return (torch.cat(parts) if len(parts) > 1 else parts[0])[None]

    def _add(self, segments: Sequence[ForwardInput], size: int, start: int) -> int:
        """Plan writes and kernel calls for segments of one block and size, from token `start` on; returns their end."""
        counts = [len(s.ids) for s in segments]
        ends = list(accumulate(counts, initial=start))
        tokens = [slice(*pair) for pair in pairwise(ends)]
        block = segments[0].row.block
        if size == _COPIED or len(segments) == 1:
            for segment, span in zip(segments, tokens, strict=True):
                self._written.append((block, (segment.row.index, slice(segment.row.used, segment.slots)), span))
        else:
            rows = [s.row.index for s in segments for _ in s.ids]
            slots = [slot for s in segments for slot in range(s.row.used, s.slots)]
            self._written.append((block, (self._tensor(rows), self._tensor(slots)), slice(start, ends[-1])))
        if size == _SHORT:
            self.groups.append(self._group(segments, slice(start, ends[-1])))
        else:
            self.groups += [self._group([s], span) for s, span in zip(segments, tokens, strict=True)]
        return ends[-1]

    def _group(self, inputs: Sequence[ForwardInput], tokens: slice) -> _Group:
        start, stop = inputs[0].row.index, inputs[-1].row.index + 1
        queries, slots = max(len(s.ids) for s in inputs), max(s.slots for s in inputs)
        group = _Group(inputs[0].row.block, start, stop, queries, slots, tokens, self._masks(inputs, queries, slots))
        padded = [(s.row.index - start) * queries + n for s in inputs for n in range(len(s.ids))]
        if len(padded) < (stop - start) * queries:
            padding = [0] * ((stop - start) * queries)
            for token, at in enumerate(padded):
                padding[at] = token
            group.padding, group.padded = self._tensor(padding), self._tensor(padded)
        return group

    def _masks(self, inputs: Sequence[ForwardInput], queries: int, slots: int) -> dict[str, torch.Tensor | None]:
        """Additive masks (B, 1, Q, K) by kind, in the model's dtype, because eager attention misreads boolean ones."""
        first, rows = inputs[0], inputs[-1].row.index + 1 - inputs[0].row.index
        plain = len(inputs) == 1 and first.visible is None and queries > 1
        masks: dict[str, torch.Tensor | None] = {}
        visible: tuple[torch.Tensor, ...] = ()
        for kind in self._plan.kinds:
            if plain and self._plan.is_plain(kind, slots) and (first.row.used == 0 or self._knows_lower_right):
                # the kernel itself masks causally, so that no mask is made, read or sent
                masks[kind] = causal_lower_right(queries, slots) if first.row.used else None
                continue
            visible = visible or tuple(upload(array, self._device) for array in _seen_by(inputs, rows, queries, slots))
            masks[kind] = additive(self._plan.restrict(kind, *visible), self._dtype)[:, None]
        return masks

    def _near(self, tensor: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
        """`tensor` on the device of a layer. If a model is split over devices, each gets one copy per forward pass."""
        if tensor.device == layer.device or isinstance(tensor, CausalBias):
            return tensor
        key = id(tensor), layer.device
        if key not in self._copies:
            self._copies[key] = tensor.to(layer.device)
        return self._copies[key]

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return upload(values, self._device)


def _seen_by(inputs: Sequence[ForwardInput], rows: int, queries: int, slots: int) -> tuple[NDArray[Any], ...]:
    """The slots that each query of these segments' rows sees (B, Q, K), its position (B, Q), and the slots' (B, K)."""
    visible = np.zeros((rows, queries, slots), dtype=bool)
    # rows of other answers, and padding, see one slot: a softmax over nothing gives NaN
    visible[:, :, 0] = True
    at, places = np.zeros((rows, queries), dtype=np.int64), np.tile(np.arange(slots), (rows, 1))
    for segment in inputs:
        row, count, slot_positions = segment.row.index - inputs[0].row.index, len(segment.ids), segment.slot_positions()
        visible[row, :count, : segment.slots] = segment.seen()
        at[row, :count], places[row, : segment.slots] = slot_positions[-count:], slot_positions
    return visible, at, places


class Attending(Protocol):
    """A forward pass whose attention reads cache rows. `is_packed`: it is a packed step."""

    is_packed: bool

    def attend(
        self, kernel: Kernel, module: Any, query: torch.Tensor, marker: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Attention output (1, T, H, D) of one layer for queries (1, H, T, D)."""
        ...


def _size_class(segment: ForwardInput, long: int) -> int:
    if len(segment.ids) < long:
        return _SHORT
    return _OWN_CALL if len(segment.ids) <= _MOST_INDEXED else _COPIED


class _Running(threading.local):
    batch: Attending | None = None


_running = _Running()


@contextmanager
def running(batch: Attending) -> Iterator[None]:
    """While this is active, `batch` computes the attention of models that this thread calls."""
    _running.batch = batch
    try:
        yield
    finally:
        _running.batch = None


def is_in_packed_step() -> bool:
    """Whether this thread's forward pass is a packed step."""
    return _running.batch is not None and _running.batch.is_packed


def _in_batches(kernel: Kernel) -> Kernel:
    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Any]:
        if (batch := _running.batch) is None:
            return kernel(module, query, key, value, attention_mask, **kwargs)
        return batch.attend(kernel, module, query, attention_mask, **kwargs), None

    return attention


AttentionInterface.register(GROUPED, _in_batches(grouped_kernel))
AttentionInterface.register(EAGER, _in_batches(eager_kernel))
AttentionMaskInterface.register(GROUPED, sdpa_mask)
AttentionMaskInterface.register(EAGER, eager_mask)
