"""Keys and values of many answers in one model: rows of equal capacity in blocks, so that a batch is a slice.

Every answer owns one row; slots are its tokens. A full row moves to a block of twice the capacity; a freed row is
filled with the last one of its capacity, so that the rows in use are always the first ones. Where steps are captured,
blocks never move or grow: one that is full is followed by another. Every row keeps its last slot free: steps of fixed
shape put there what they compute for answers that sit a step out.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from specfuse_shared.runtime.cache.sizes import SPARE, fixed_rows, row_capacity, smallest_row
from specfuse_shared.runtime.transfer import upload

_LAYERS_A_STACK = 16
"""So many tensors of keys or values are one: more would save calls, but a block grows by copying stack after stack."""

Layer = tuple[torch.Tensor, torch.Tensor]
"""Keys and values (rows, heads, capacity, head size)."""
_Place = tuple[int, int]
"""A layer, and 0 for its keys or 1 for its values."""

_versions = itertools.count(1)


@dataclass(slots=True, eq=False)
class CacheRow:
    """One answer's place in a block: slots 0 … used - 1 hold keys and values. `reach`: tokens that are sure to come."""

    pool: CachePool
    block: CacheBlock
    index: int
    used: int = 0
    reach: int = 0

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots in all."""
        if slots + SPARE > self.block.capacity:
            self.pool.move(self, slots)

    def keep(self, prefix: int, slots: Sequence[int]) -> None:
        """Keep the first `prefix` slots, then `slots` (ascending, none below `prefix`), and drop the rest."""
        end = prefix + len(slots)
        if slots and list(slots) != list(range(prefix, end)):
            at = upload(slots, self.block.stacks[0].device)
            for stack in self.block.stacks:  # where memory runs out half-way, what is done must not be done again
                kept = self.pool.retried(lambda s=stack: s[:, self.index].index_select(2, at.to(s.device)))  # type: ignore[misc]
                stack[:, self.index, :, prefix:end] = kept
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
    size: int = 1
    rows: list[CacheRow] = field(default_factory=list)
    layers: dict[int, Layer] = field(default_factory=dict)
    stacks: list[torch.Tensor] = field(default_factory=list)
    version: int = 0
    _places: list[list[_Place]] = field(default_factory=list)

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> Layer:
        """Buffers of a layer, made like `keys` and `values` (1, heads, …, head size) if they are new."""
        if index not in self.layers:
            known = self.pool.slots if not self.layers else {}
            if index not in known:
                known = {index: (keys[:1, :, :1].clone(), values[:1, :, :1].clone())}
                self.pool.slots.update(known)
            self._add_what_fits(known)
        return self.layers[index]

    @property
    def is_full(self) -> bool:
        return len(self.rows) >= self.size

    def grow(self) -> None:
        """Room for twice as many rows, so that copies stay rare."""
        self.version = next(_versions)  # first: if memory runs out half-way, some buffers are others already
        for n, places in enumerate(self._places):
            if self.stacks[n].shape[1] > self.size:  # memory ran out behind this one, the last time
                continue
            bigger = self._zeros(len(places), 2 * self.size, self.stacks[n])
            bigger[:, : self.size] = self.stacks[n][:, : self.size]
            self.stacks[n] = bigger
            self._show(places, bigger)
        self.size *= 2

    def drop(self) -> None:
        """Give the memory back; it is taken again when something is written."""
        self.layers, self.stacks, self._places, self.version = {}, [], [], next(_versions)

    def _add_what_fits(self, slots: Mapping[int, Layer]) -> None:
        """Buffers with room for fewer rows where memory for all is not there."""
        while True:
            try:
                return self._add(slots)
            except torch.OutOfMemoryError:
                if self.layers or self.size <= len(self.rows):
                    raise
                self.size = max(len(self.rows), self.size // 2)

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
        return self.pool.retried(lambda: like.new_zeros(shape))


class CachePool:
    """The blocks of one model on a device, by capacity, in the order in which they are filled.

    `slots`: one slot of each layer (1, heads, 1, head size), once known; new blocks are made like them. `is_fixed`:
    blocks stay where they are, and another one follows a full one. `keeps_empty` blocks until `reclaim`, because steps
    captured over their buffers would be lost with them. `make_room` gives back what only saves time.
    """

    def __init__(self, device: torch.device, slots: Mapping[int, Layer] | None = None) -> None:
        self._smallest = smallest_row(device)
        self._blocks: dict[int, list[CacheBlock]] = {}
        self.slots = dict(slots or {})
        self.is_fixed = self.keeps_empty = False
        self.make_room: Callable[[], bool] = lambda: False

    @torch.inference_mode()
    def row(self, slots: int) -> CacheRow:
        """A new row with room for at least `slots` slots."""
        block = self._block(row_capacity(slots, self._smallest))
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
        try:
            for n, (keys, values) in row.block.layers.items():
                new_keys, new_values = other.block.layer(n, keys, values)
                new_keys[other.index, :, : row.used] = keys[row.index, :, : row.used]
                new_values[other.index, :, : row.used] = values[row.index, :, : row.used]
        except Exception:
            self.free(other)
            raise
        block, index = other.block, other.index
        self.free(row)
        row.block, row.index = block, index
        block.rows[index] = row

    @torch.inference_mode()
    def free(self, row: CacheRow) -> None:
        """Fill the gap with the last row of its capacity; an empty block gives its memory back."""
        block, blocks = row.block, self._blocks[row.block.capacity]
        source = [other for other in blocks if other.rows][-1] if block.layers else block
        last = source.rows.pop()
        if last is not row:
            _copy_row(source, last, block, row.index)
            block.rows[row.index] = last
            last.block, last.index = block, row.index
        row.index = -1
        if not source.rows and not self.keeps_empty:
            source.drop()
            blocks.remove(source)

    def covering(self, rows: Sequence[CacheRow]) -> list[tuple[CacheBlock, int]]:
        """Blocks and how many of their first rows, so that these rows are among them; few such coverings occur.

        A capacity is covered up to its first row, its first block, its second … The capacities that occur are all
        covered alike, as far as they have blocks.
        """
        found: dict[int, int] = {}
        for row in rows:
            number = self._blocks[row.block.capacity].index(row.block)
            level = number + 1 if number or row.index else 0
            found[row.block.capacity] = max(level, found.get(row.block.capacity, 0))
        most = max(found.values())
        covered: list[tuple[CacheBlock, int]] = []
        for capacity in sorted(found):
            blocks = [block for block in self._blocks[capacity] if block.rows]
            covered += [(block, block.size) for block in blocks[:most]] or [(blocks[0], 1)]
        return covered

    def retried(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `work` makes; if memory is short, once more, and again as long as there is something to free."""
        for tries in itertools.count():
            try:
                return work()
            except torch.OutOfMemoryError:
                if not self.make_room() and tries:
                    raise
        raise AssertionError("never reached")

    def reclaim(self) -> bool:
        """Give the memory of empty blocks back; whether there were any."""
        empty = [block for blocks in self._blocks.values() for block in blocks if not block.rows and block.stacks]
        for block in empty:
            block.drop()
            self._blocks[block.capacity].remove(block)
        return bool(empty)

    @property
    def memory_bytes(self) -> int:
        """Bytes of all buffers."""
        every = (block for blocks in self._blocks.values() for block in blocks)
        return sum(stack.nbytes for block in every for stack in block.stacks)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot of one row, once something was written."""
        return slot_bytes(self.slots)

    def _block(self, capacity: int) -> CacheBlock:
        """The first block with a free row; one that grows, or is new, if there is none."""
        blocks = self._blocks.setdefault(capacity, [])
        for block in blocks:
            if not block.is_full:
                return block
        if blocks and not self.is_fixed:
            blocks[0].grow()
            return blocks[0]
        size = fixed_rows(len(blocks), capacity, self._smallest) if self.is_fixed else 1
        blocks.append(CacheBlock(weakref.proxy(self), capacity, size))
        return blocks[-1]


def _copy_row(source: CacheBlock, row: CacheRow, block: CacheBlock, index: int) -> None:
    """What `row` holds in `source` goes to row `index` of `block`, and nothing of an earlier answer stays there."""
    pairs = [(stack, stack) for stack in block.stacks] if source is block else []
    if source is not block:
        pairs = [
            (own[None], other[None])
            for n, pair in source.layers.items()
            for own, other in zip(block.layers[n], pair, strict=True)
        ]
    for own, other in pairs:
        own[:, index, :, : row.used] = other[:, row.index, :, : row.used]
        own[:, index, :, row.used :] = 0


def slot_bytes(slots: Mapping[int, Layer]) -> int:
    """Bytes of one slot of every layer."""
    return sum(t.nbytes for pair in slots.values() for t in pair)
