"""Keys and values of many answers in one model: rows of equal capacity in blocks, so that a batch is a slice.

Every answer owns one row; slots are its tokens. A full row moves to a block of twice the capacity; a freed row is
filled with the last one, so that the rows in use are always the first ones of their block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

SMALLEST_ROW = 256

Layer = tuple[torch.Tensor, torch.Tensor]
"""Keys and values (rows, heads, capacity, head size)."""


@dataclass(slots=True, eq=False)
class CacheRow:
    """One answer's place in a block: slots 0 … used - 1 hold keys and values."""

    pool: CachePool
    block: CacheBlock
    index: int
    used: int = 0

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots in all."""
        if slots > self.block.capacity:
            self.pool.move(self, slots)

    def keep(self, prefix: int, slots: Sequence[int]) -> None:
        """Keep the first `prefix` slots, then `slots` (ascending, none below `prefix`), and drop the rest."""
        end = prefix + len(slots)
        if slots and list(slots) != list(range(prefix, end)):
            for keys, values in self.block.layers.values():
                at = torch.tensor(slots, device=keys.device)
                keys[self.index, :, prefix:end] = keys[self.index].index_select(1, at)
                values[self.index, :, prefix:end] = values[self.index].index_select(1, at)
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
    """Rows of one capacity. Buffers of a layer appear when it is first written, with room for `size` rows."""

    capacity: int
    rows: list[CacheRow] = field(default_factory=list)
    layers: dict[int, Layer] = field(default_factory=dict)
    size: int = 1

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> Layer:
        """Buffers of a layer, made like `keys` and `values` (1, heads, …, head size) if they are new."""
        if index not in self.layers:
            self.layers[index] = (_buffer(keys, self.size, self.capacity), _buffer(values, self.size, self.capacity))
        return self.layers[index]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one slot of one row takes over all layers."""
        return sum(t[0, :, 0].nbytes for pair in self.layers.values() for t in pair)

    def grow(self) -> None:
        """Room for one more row; doubles, so that copies stay rare."""
        if len(self.rows) < self.size:
            return
        for index, buffers in self.layers.items():
            keys, values = (_buffer(old, 2 * self.size, self.capacity) for old in buffers)
            keys[: self.size], values[: self.size] = buffers
            self.layers[index] = keys, values
        self.size *= 2


class CachePool:
    """The blocks of one model, by capacity."""

    def __init__(self) -> None:
        self._blocks: dict[int, CacheBlock] = {}

    @torch.inference_mode()
    def row(self, slots: int) -> CacheRow:
        """A new row with room for at least `slots` slots."""
        block = self._block(slots)
        block.grow()
        row = CacheRow(self, block, len(block.rows))
        block.rows.append(row)
        for keys, values in block.layers.values():
            # a NaN that an earlier answer left would reach this one through masked slots: 0 · NaN is NaN
            keys[row.index].zero_()
            values[row.index].zero_()
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
            for keys, values in block.layers.values():
                keys[row.index, :, : last.used] = keys[last.index, :, : last.used]
                values[row.index, :, : last.used] = values[last.index, :, : last.used]
            block.rows[row.index] = last
            last.index = row.index
        row.index = -1
        if not block.rows:
            del self._blocks[block.capacity]

    @property
    def memory_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.nbytes for block in self._blocks.values() for pair in block.layers.values() for t in pair)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot of one row, once something was written."""
        return max((block.bytes_per_slot for block in self._blocks.values()), default=0)

    def _block(self, slots: int) -> CacheBlock:
        capacity = row_capacity(slots)
        return self._blocks.setdefault(capacity, CacheBlock(capacity))


def row_capacity(slots: int) -> int:
    """Slots of the row that holds `slots`: the next power of two, at least `SMALLEST_ROW`."""
    return max(SMALLEST_ROW, 1 << (slots - 1).bit_length())


def _buffer(like: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
    # zeros, because uninitialised memory may hold NaN
    return like.new_zeros((rows, like.shape[1], capacity, like.shape[-1]))
