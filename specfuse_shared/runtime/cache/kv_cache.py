"""Keys and values of many answers in one model: rows of equal capacity in blocks, so that a batch is a slice.

Every answer owns one row; slots are its tokens. A full row moves to a block of twice the capacity; a freed row is
filled with the last one of its capacity, so that the rows in use are always the first ones. Where steps are captured,
blocks never move or grow: one that is full is followed by another. Every row keeps its last slot free: steps of fixed
shape put there what they compute for answers that sit a step out.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from specfuse_shared.runtime.cache.blocks import CacheBlock, CacheRow, Layer, slot_bytes
from specfuse_shared.runtime.cache.sizes import fixed_rows, row_capacity, smallest_row
from specfuse_shared.runtime.out_of_memory import is_out_of_memory


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
            except Exception as error:
                if not is_out_of_memory(error) or (not self.make_room() and tries):
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
