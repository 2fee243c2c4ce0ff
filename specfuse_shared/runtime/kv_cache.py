"""Keys and values of many answers in one model: rows of equal capacity in blocks, so that a batch is a slice.

Every answer owns one row; slots are its tokens. A full row moves to a block of twice the capacity; a freed row is
filled with the last one, so that the rows in use are always the first ones of their block. Every row keeps its last
slot free: steps of fixed shape put there what they compute for answers that sit a step out.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from specfuse_shared.runtime.transfer import upload

_SMALLEST_ROW = {"cpu": 256}
_DEFAULT_SMALLEST_ROW = 1024
"""Coarser where steps are captured, which happens anew for every capacity."""
_SPARE = 1
_LAYERS_A_STACK = 16
"""So many tensors of keys or values are one: more would save calls, but a block grows by copying stack after stack."""

Layer = tuple[torch.Tensor, torch.Tensor]
"""Keys and values (rows, heads, capacity, head size)."""
_Place = tuple[int, int]
"""A layer, and 0 for its keys or 1 for its values."""

_versions = itertools.count(1)


@dataclass(slots=True, eq=False)
class CacheRow:
    """One answer's place in a block: slots 0 … used - 1 hold keys and values."""

    pool: CachePool
    block: CacheBlock
    index: int
    used: int = 0

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots in all."""
        if slots + _SPARE > self.block.capacity:
            self.pool.move(self, slots)

    def keep(self, prefix: int, slots: Sequence[int]) -> None:
        """Keep the first `prefix` slots, then `slots` (ascending, none below `prefix`), and drop the rest."""
        end = prefix + len(slots)
        if slots and list(slots) != list(range(prefix, end)):
            at = upload(slots, self.block.stacks[0].device)
            for stack in self.block.stacks:
                stack[:, self.index, :, prefix:end] = stack[:, self.index].index_select(2, at.to(stack.device))
        self.used = end

    def save(self, count: int) -> dict[int, Layer]:
        """A copy of the first `count` slots of every layer, (heads, count, head size)."""
        return {
            n: (keys[self.index, :, :count].clone(), values[self.index, :, :count].clone())
            for n, (keys, values) in self.block.layers.items()
        }

    def load(self, saved: dict[int, Layer], count: int) -> None:
        """Fill the first `count` slots with those of a saved copy."""
        self.reserve(count)
        for n, (keys, values) in saved.items():
            own_keys, own_values = self.block.layer(n, keys[None], values[None])
            own_keys[self.index, :, :count] = keys[:, :count]
            own_values[self.index, :, :count] = values[:, :count]
        self.used = count

    def free(self) -> None:
        """Give the row back. Safe to call twice."""
        if self.index >= 0:
            self.pool.free(self)


@dataclass(slots=True, eq=False)
class CacheBlock:
    """Rows of one capacity, with room for `size` of them.

    `layers` are views into `stacks` (tensors of layers, rows, heads, capacity, head size), so that what is done to a
    row is done to many layers at once. They appear when first written; `version` changes whenever they do.
    """

    pool: CachePool
    capacity: int
    rows: list[CacheRow] = field(default_factory=list)
    layers: dict[int, Layer] = field(default_factory=dict)
    stacks: list[torch.Tensor] = field(default_factory=list)
    size: int = 1
    version: int = 0
    _places: list[list[_Place]] = field(default_factory=list)

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> Layer:
        """Buffers of a layer, made like `keys` and `values` (1, heads, …, head size) if they are new."""
        if index not in self.layers:
            known = self.pool.slots if not self.layers else {}
            if index not in known:
                known = {index: (keys[:1, :, :1].clone(), values[:1, :, :1].clone())}
                self.pool.slots.update(known)
            self._add(known)
        return self.layers[index]

    def grow(self) -> None:
        """Room for one more row; doubles, so that copies stay rare."""
        if len(self.rows) < self.size:
            return
        for n, places in enumerate(self._places):
            bigger = self._zeros(len(places), 2 * self.size, self.stacks[n])
            bigger[:, : self.size] = self.stacks[n][:, : self.size]
            self.stacks[n] = bigger
            self._show(places, bigger)
        self.size, self.version = 2 * self.size, next(_versions)

    def drop(self) -> None:
        """Give the memory back; it is taken again when something is written."""
        self.layers, self.stacks, self._places, self.size, self.version = {}, [], [], 1, next(_versions)

    def _add(self, slots: Mapping[int, Layer]) -> None:
        """Buffers for layers like `slots` (1, heads, 1, head size), those that are alike in stacks."""
        alike: dict[tuple[object, ...], list[_Place]] = defaultdict(list)
        for index, pair in slots.items():
            for side, like in enumerate(pair):
                alike[like.shape, like.dtype, like.device].append((index, side))
        made: list[tuple[list[_Place], torch.Tensor]] = []
        for found in alike.values():
            for places in (found[n : n + _LAYERS_A_STACK] for n in range(0, len(found), _LAYERS_A_STACK)):
                index, side = places[0]
                made.append((places, self._zeros(len(places), self.size, slots[index][side])))
        for places, stack in made:  # all or none, also where memory runs out
            self._places.append(places)
            self.stacks.append(stack)
            self._show(places, stack)
        self.version = next(_versions)

    def _show(self, places: Sequence[_Place], stack: torch.Tensor) -> None:
        """Let layers be views of a stack."""
        for (index, side), view in zip(places, stack, strict=True):
            keys, values = self.layers.get(index, (view, view))
            self.layers[index] = (keys, view) if side else (view, values)

    def _zeros(self, layers: int, rows: int, like: torch.Tensor) -> torch.Tensor:
        # zeros, because uninitialised memory may hold NaN
        shape = (layers, rows, like.shape[-3], self.capacity, like.shape[-1])
        try:
            return like.new_zeros(shape)
        except torch.OutOfMemoryError:
            if not self.pool.reclaim():
                raise
            return like.new_zeros(shape)


class CachePool:
    """The blocks of one model on a device, by capacity.

    `slots`: one slot of each layer (1, heads, 1, head size), once known; new blocks are made like them. `keeps_empty`
    blocks until `reclaim`, because steps captured over their buffers would be lost with them.
    """

    def __init__(self, device: torch.device, slots: Mapping[int, Layer] | None = None) -> None:
        self._device = device
        self._blocks: dict[int, CacheBlock] = {}
        self.slots = dict(slots or {})
        self.keeps_empty = False

    @torch.inference_mode()
    def row(self, slots: int) -> CacheRow:
        """A new row with room for at least `slots` slots."""
        block = self._block(slots)
        block.grow()
        row = CacheRow(self, block, len(block.rows))
        block.rows.append(row)
        for stack in block.stacks:
            # a NaN that an earlier answer left would reach this one through masked slots: 0 · NaN is NaN
            stack[:, row.index].zero_()
        return row

    @torch.inference_mode()
    def move(self, row: CacheRow, slots: int) -> None:
        """Take `row` to a block with room for `slots` slots."""
        other = self.row(slots)
        for n, (keys, values) in row.block.layers.items():
            new_keys, new_values = other.block.layer(n, keys, values)
            new_keys[other.index, :, : row.used] = keys[row.index, :, : row.used]
            new_values[other.index, :, : row.used] = values[row.index, :, : row.used]
        block, index = other.block, other.index
        self.free(row)
        row.block, row.index = block, index
        block.rows[index] = row

    @torch.inference_mode()
    def free(self, row: CacheRow) -> None:
        """Fill the gap with the block's last row; an empty block gives its memory back."""
        block, last = row.block, row.block.rows.pop()
        if last is not row:
            for stack in block.stacks:
                stack[:, row.index, :, : last.used] = stack[:, last.index, :, : last.used]
            block.rows[row.index] = last
            last.index = row.index
        row.index = -1
        if not block.rows and not self.keeps_empty:
            block.drop()
            del self._blocks[block.capacity]

    def reclaim(self) -> bool:
        """Give the memory of empty blocks back; whether there was any."""
        empty = [block for block in self._blocks.values() if not block.rows and block.stacks]
        for block in empty:
            block.drop()
        return bool(empty)

    @property
    def memory_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(stack.nbytes for block in self._blocks.values() for stack in block.stacks)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot of one row, once something was written."""
        return slot_bytes(self.slots)

    def _block(self, slots: int) -> CacheBlock:
        capacity = row_capacity(slots, smallest_row(self._device))
        return self._blocks.setdefault(capacity, CacheBlock(weakref.proxy(self), capacity))


def slot_bytes(slots: Mapping[int, Layer]) -> int:
    """Bytes of one slot of every layer."""
    return sum(t.nbytes for pair in slots.values() for t in pair)


def row_capacity(slots: int, smallest: int) -> int:
    """Slots of the row that holds `slots` and a spare one: a power of two, at least the smallest row."""
    return max(smallest, 1 << (slots + _SPARE - 1).bit_length())


def smallest_row(device: torch.device) -> int:
    """Slots of the smallest row on a device."""
    return _SMALLEST_ROW.get(device.type, _DEFAULT_SMALLEST_ROW)
