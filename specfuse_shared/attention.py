"""Attention of many answers in one forward: which slot a query may see, and a fast kernel call for each block.

The tokens of all answers lie in a row, (1, H, T, D); keys and values lie in cache rows. Symbols: T tokens fed,
B answers of a group, Q queries of an answer, K slots, position = place in the token sequence (≠ slot once a tree
is cached).
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from specfuse_shared.cache import CacheBlock, CacheRow
from specfuse_shared.masks import MaskPlan, additive
from specfuse_shared.transfer import upload

GROUPED, EAGER = "specfuse_grouped_sdpa", "specfuse_eager"
_MOST_FOLDED_QUERIES = 128
_LONG = {"cpu": 4}
_DEFAULT_LONG = 64
"""From this many queries on, an answer gets a kernel call of its own, so that short ones are not padded to it: calls
cost little on a CPU, and padding little on a GPU."""

Kernel = Callable[..., tuple[torch.Tensor, Any]]


@dataclass(slots=True)
class Segment:
    """What one answer feeds: tokens behind the used slots of its cache row.

    `visible` (Q, K): the slots each query sees, itself among them; None: every slot up to itself. `positions`
    (K): the place of each slot; None: slots are places. `wanted`: how many of the last tokens' logits are needed.
    """

    row: CacheRow
    ids: Sequence[int]
    visible: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    wanted: int = 0

    @property
    def slots(self) -> int:
        """K: slots in use once these tokens are cached."""
        return self.row.used + len(self.ids)

    def slot_positions(self) -> torch.Tensor:
        return torch.arange(self.slots) if self.positions is None else self.positions

    def seen(self) -> torch.Tensor:
        if self.visible is not None:
            return self.visible
        slots = torch.arange(self.slots)
        return slots[None, :] <= slots[self.row.used :, None]


@dataclass(slots=True)
class _Group:
    """Answers that share a kernel call: rows `start` … `stop` of a block, each padded to `queries` queries."""

    block: CacheBlock
    start: int
    stop: int
    queries: int
    slots: int
    gather: torch.Tensor | None
    """(B · Q) which fed token each padded query is; None: the group is the whole batch, one token after another."""
    masks: dict[str, torch.Tensor | None]
    padded: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    """Padded queries that are real, and the fed tokens they are; None with `gather`."""


class Batch(Cache):
    """One forward over the segments of many answers; passes for the model's cache and tells attention where to look.

    There is room in the rows for what the segments feed.
    """

    def __init__(self, segments: Sequence[Segment], plan: MaskPlan, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(layers=[])
        self._plan, self._device, self._dtype = plan, device, dtype
        self._written: list[tuple[CacheBlock, Any, torch.Tensor | slice]] = []
        self._copies: dict[tuple[int, torch.device], torch.Tensor] = {}
        starts, total = [], 0
        for segment in segments:
            starts.append(total)
            total += len(segment.ids)
        self.tokens = total
        self._plan_writes(segments, starts)
        self.groups = self._plan_groups(segments, starts)
        self._length = max(s.row.used for s in segments)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values (1, H, T, D) into the rows; attention reads them from there."""
        for block, place, tokens in self._written:
            keys, values = block.layer(layer_idx, key_states, value_states)
            row, slots = place
            if isinstance(tokens, slice):
                keys[row, :, slots] = key_states[0, :, tokens]
                values[row, :, slots] = value_states[0, :, tokens]
            else:
                row, slots, tokens = (self._near(t, key_states) for t in (row, slots, tokens))
                keys[row, :, slots] = key_states[0, :, tokens].transpose(0, 1)
                values[row, :, slots] = value_states[0, :, tokens].transpose(0, 1)
        return key_states, value_states

    def attend(
        self, kernel: Kernel, module: Any, query: torch.Tensor, marker: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Attention output (1, T, H, D) of one layer."""
        kind = self._plan.kinds[marker.shape[-1] - 1]
        heads, out = query.shape[1], None
        for group in self.groups:
            keys, values = (t[group.start : group.stop, :, : group.slots] for t in group.block.layers[module.layer_idx])
            if group.gather is None:
                q = query.reshape(heads, -1, group.queries, query.shape[-1]).transpose(0, 1)
            else:
                picked = query[0].index_select(1, self._near(group.gather, query))
                q = picked.view(heads, -1, group.queries, query.shape[-1]).transpose(0, 1)
            mask = group.masks[kind]
            found = kernel(module, q, keys, values, None if mask is None else self._near(mask, query), **kwargs)[0]
            found = found.reshape(-1, heads, found.shape[-1])
            if group.gather is None:
                return found[None]
            if out is None:
                out = found.new_empty(1, self.tokens, heads, found.shape[-1])
            assert group.tokens is not None
            kept = found if group.padded is None else found[self._near(group.padded, query)]
            out[0, self._near(group.tokens, query)] = kept
        assert out is not None
        return out

    def _plan_writes(self, segments: Sequence[Segment], starts: Sequence[int]) -> None:
        by_block: dict[int, list[tuple[Segment, int]]] = defaultdict(list)
        for segment, start in zip(segments, starts, strict=True):
            by_block[id(segment.row.block)].append((segment, start))
        for members in by_block.values():
            block = members[0][0].row.block
            if len(members) == 1:
                segment, start = members[0]
                place = segment.row.index, slice(segment.row.used, segment.slots)
                self._written.append((block, place, slice(start, start + len(segment.ids))))
                continue
            rows = [s.row.index for s, _ in members for _ in s.ids]
            slots = [slot for s, _ in members for slot in range(s.row.used, s.slots)]
            tokens = [t for s, start in members for t in range(start, start + len(s.ids))]
            self._written.append((block, (self._tensor(rows), self._tensor(slots)), self._tensor(tokens)))

    def _plan_groups(self, segments: Sequence[Segment], starts: Sequence[int]) -> list[_Group]:
        short: dict[int, list[tuple[Segment, int]]] = defaultdict(list)
        groups: list[list[tuple[Segment, int]]] = []
        for segment, start in zip(segments, starts, strict=True):
            if len(segment.ids) >= _LONG.get(self._device.type, _DEFAULT_LONG):
                groups.append([(segment, start)])
            else:
                short[id(segment.row.block)].append((segment, start))
        groups += [sorted(found, key=lambda pair: pair[0].row.index) for found in short.values()]
        return [self._group(found) for found in groups]

    def _group(self, found: Sequence[tuple[Segment, int]]) -> _Group:
        start, stop = found[0][0].row.index, found[-1][0].row.index + 1
        queries, slots = max(len(s.ids) for s, _ in found), max(s.slots for s, _ in found)
        gather = [0] * ((stop - start) * queries)
        padded, tokens = [], []
        for segment, at in found:
            first = (segment.row.index - start) * queries
            for n in range(len(segment.ids)):
                gather[first + n] = at + n
                padded.append(first + n)
                tokens.append(at + n)
        group = _Group(found[0][0].row.block, start, stop, queries, slots, None, self._masks(found, queries, slots))
        if gather == list(range(self.tokens)) and len(padded) == self.tokens:
            return group
        group.gather, group.tokens = self._tensor(gather), self._tensor(tokens)
        group.padded = None if len(padded) == len(gather) else self._tensor(padded)
        return group

    def _masks(self, found: Sequence[tuple[Segment, int]], queries: int, slots: int) -> dict[str, torch.Tensor | None]:
        """Additive masks (B, 1, Q, K) by kind, in the model's dtype, because eager attention misreads boolean ones."""
        first, rows = found[0][0], found[-1][0].row.index + 1 - found[0][0].row.index
        fresh = len(found) == 1 and first.visible is None and first.row.used == 0
        masks: dict[str, torch.Tensor | None] = {}
        parts = [(s.row.index - first.row.index, s, s.seen(), s.slot_positions()) for s, _ in found]
        for kind in self._plan.kinds:
            if fresh and queries > 1 and self._plan.is_plain(kind, slots):
                masks[kind] = None
                continue
            visible = torch.zeros(rows, queries, slots, dtype=torch.bool)
            # rows of other answers, and padding, see one slot: a softmax over nothing is not a number
            visible[:, :, 0] = True
            for row, segment, seen, at in parts:
                query_at = at[len(at) - len(segment.ids) :]
                visible[row, : len(segment.ids), : segment.slots] = self._plan.restrict(kind, seen, query_at, at)
            masks[kind] = upload(additive(visible, self._dtype), self._device)[:, None]
        return masks

    def _near(self, tensor: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
        """`tensor` on the device of a layer: those of a split model copy it once a forward."""
        if tensor.device == layer.device:
            return tensor
        key = id(tensor), layer.device
        if key not in self._copies:
            self._copies[key] = tensor.to(layer.device)
        return self._copies[key]

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return upload(values, self._device)


class Attending(Protocol):
    """A forward whose attention looks into cache rows."""

    def attend(
        self, kernel: Kernel, module: Any, query: torch.Tensor, marker: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Attention output (1, T, H, D) of one layer for queries (1, H, T, D)."""
        ...


class _Running(threading.local):
    batch: Attending | None = None


_running = _Running()


@contextmanager
def running(batch: Attending) -> Iterator[None]:
    """While this lasts, attention of models called in this thread belongs to `batch`."""
    _running.batch = batch
    try:
        yield
    finally:
        _running.batch = None


def grouped_kernel(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention that never copies keys and values for grouped-query heads.

    Folds the G query heads of a key head into the query dimension: (B, H, Q, D) → (B, H/G, G·Q, D). Long queries
    (prefill) and plain causal calls go to the library's own function.
    """
    batch, heads, queries, _ = query.shape
    groups = heads // key.shape[1]
    if attention_mask is None or groups == 1 or queries > _MOST_FOLDED_QUERIES or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    out = scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], groups * queries, query.shape[-1]),
        key,
        value,
        attn_mask=attention_mask if queries == 1 else attention_mask.repeat(1, 1, groups, 1),
        scale=scaling,
    )
    return out.reshape(batch, heads, queries, value.shape[-1]).transpose(1, 2).contiguous(), None


def eager_kernel(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """The model's own plain attention (soft caps, attention sinks), which always wants a mask."""
    if attention_mask is None:
        queries = query.shape[2]
        hidden = torch.ones(queries, queries, dtype=torch.bool, device=query.device).triu(1)
        attention_mask = query.new_zeros(1, 1, queries, queries).masked_fill_(hidden, torch.finfo(query.dtype).min)
    own = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    found: tuple[torch.Tensor, Any] = own(module, query, key, value, attention_mask, **kwargs)
    return found


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
