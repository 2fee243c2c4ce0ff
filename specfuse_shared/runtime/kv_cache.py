"""KV caches of a model: rows in blocks, and prefix reuse. Paged execution has pages instead of blocks (`pages.py`).

Every answer owns one row, and each slot of it holds one token. A block contains rows of equal capacity, so that a batch
is a slice. A full row moves to a block of twice the capacity. If a row is freed, the last one of its block moves
into the gap, so that the rows in use are always the first ones.

The next turn of a conversation, the next step of an agent loop and questions over one passage share most of their
prompt. So prefixes of ended answers are copied out of the rows. Their bytes are limited, and the least recently used
one is dropped first. A prefix of a running answer is copied from its row.

Admission (`serving/admission.py`) counts the same rows and blocks, by `row_capacity` and `grown`.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from specfuse_shared.runtime.out_of_memory import is_out_of_memory
from specfuse_shared.runtime.sampler import upload

_SMALLEST_ROW = {"cpu": 256}
_DEFAULT_SMALLEST_ROW = 1024
TREE_CAPACITY = 64
"""Slots of a new row after the prompt, for the tokens that a round tries."""


def row_capacity(slots: int, smallest: int) -> int:
    """Slots of the row that holds `slots`: a power of two, at least the smallest row."""
    return max(smallest, 1 << max(0, slots - 1).bit_length())


def grown(rows: int) -> int:
    """Rows of a block that was full with `rows`: twice as many, so that copies stay rare."""
    return max(1, 2 * rows)


def smallest_row(device: torch.device) -> int:
    """Slots of the smallest row on a device."""
    return _SMALLEST_ROW.get(device.type, _DEFAULT_SMALLEST_ROW)


_LAYERS_A_STACK = 16
"""Key or value tensors in one stack. More would save calls, but a block grows by copying one stack after another."""

Layer = tuple[torch.Tensor, torch.Tensor]
"""Keys and values (rows, heads, capacity, head size)."""
_Place = tuple[int, int]
"""A layer, and 0 for its keys or 1 for its values."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedSlots:
    """The first slots of a row: keys and values of each layer (heads, slots, head size). `nbytes`: 0 for views."""

    layers: dict[int, Layer]
    nbytes: int

    @property
    def pieces(self) -> Mapping[Hashable, int]:
        return {id(self): self.nbytes}

    def free(self) -> None:
        """Nothing to do: the memory is freed with the tensors."""


@dataclass(slots=True, eq=False)
class CacheRow:
    """One answer's row in a block: slots 0 … used - 1 hold keys and values. `reach`: see `PagedRow`."""

    pool: CachePool
    block: CacheBlock
    index: int
    used: int = 0
    reach: int = 0

    def reserve(self, slots: int) -> None:
        """Grow to `slots` slots in all."""
        if slots > self.block.capacity:
            self.pool.move(self, slots)

    def bytes_of(self, count: int) -> int:
        """Bytes of a copy of `count` slots."""
        return self.pool.bytes_per_slot * count

    def keep(self, prefix: int, slots: Sequence[int]) -> None:
        """Keep the first `prefix` slots, then `slots` (ascending, none below `prefix`), and drop the rest."""
        end = prefix + len(slots)
        if slots and list(slots) != list(range(prefix, end)):
            at = upload(slots, self.block.stacks[0].device)
            for stack in self.block.stacks:  # if memory runs out, only this stack is retried: others are done already
                moved = self.pool.retried(lambda s=stack: s[:, self.index].index_select(2, at.to(s.device)))  # type: ignore[misc]
                stack[:, self.index, :, prefix:end] = moved
        self.used = end

    @property
    def capacity(self) -> int:
        """Slots that it has without moving."""
        return self.block.capacity

    @property
    def spare_slots(self) -> int:
        """Free slots that it has without moving."""
        return self.block.capacity - self.used

    def save(self, count: int) -> SavedSlots:
        """A copy of the first `count` slots of every layer."""
        copied = {n: (keys.clone(), values.clone()) for n, (keys, values) in self.view(count).layers.items()}
        return SavedSlots(copied, self.pool.bytes_per_slot * count)

    def view(self, count: int) -> SavedSlots:
        """Views of the first `count` slots of every layer, valid until a row moves."""
        layers = {
            n: (keys[self.index, :, :count], values[self.index, :, :count])
            for n, (keys, values) in self.block.layers.items()
        }
        return SavedSlots(layers, 0)

    def load(self, saved: SavedSlots, count: int) -> None:
        """Fill the slots from `used` to `count` from a copy."""
        start = self.used
        self.reserve(count)
        for n, (keys, values) in saved.layers.items():
            own_keys, own_values = self.block.layer(n, keys[None], values[None])
            own_keys[self.index, :, start:count] = keys[:, start:count]
            own_values[self.index, :, start:count] = values[:, start:count]
        self.used = count

    def load_from(self, row: CacheRow, count: int) -> None:
        """Copy the slots from `used` to `count` of another row."""
        self.reserve(count)  # before the view is taken: it may move rows
        self.load(row.view(count), count)

    def free(self) -> None:
        """Give the row back. Safe to call twice."""
        if self.index >= 0:
            self.pool.free(self)


@dataclass(slots=True, eq=False)
class CacheBlock:
    """Up to `size` rows of one capacity.

    `layers` are views into `stacks` (tensors of layers, rows, heads, capacity, head size), so that an operation on a
    row covers many layers at once. They are created on first write.
    """

    pool: CachePool
    capacity: int
    size: int = 1
    rows: list[CacheRow] = field(default_factory=list)
    layers: dict[int, Layer] = field(default_factory=dict)
    stacks: list[torch.Tensor] = field(default_factory=list)
    _places: list[list[_Place]] = field(default_factory=list)

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> Layer:
        """Buffers of a layer; if it has none, they are made like `keys` and `values` (1, heads, …, head size)."""
        if index not in self.layers:
            samples = self.pool.slots if not self.layers else {}
            if index not in samples:
                samples = {index: (keys[:1, :, :1].clone(), values[:1, :, :1].clone())}
                self.pool.slots.update(samples)
            self._add_what_fits(samples)
        return self.layers[index]

    @property
    def is_full(self) -> bool:
        return len(self.rows) >= self.size

    def grow(self) -> None:
        """Make place for more rows."""
        size = grown(self.size)
        for n, places in enumerate(self._places):
            if self.stacks[n].shape[1] > self.size:  # it grew before memory ran out, in an earlier attempt
                continue
            bigger = self._zeros(len(places), size, self.stacks[n])
            bigger[:, : self.size] = self.stacks[n][:, : self.size]
            self.stacks[n] = bigger
            self._show(places, bigger)
        self.size = size

    def drop(self) -> None:
        """Free the buffers; the next write makes new ones."""
        self.layers, self.stacks, self._places = {}, [], []

    def _add_what_fits(self, slots: Mapping[int, Layer]) -> None:
        """Make the buffers, for fewer rows if memory is insufficient for all."""
        while True:
            try:
                return self._add(slots)
            except Exception as error:
                if not is_out_of_memory(error) or self.layers or self.size <= len(self.rows):
                    raise
                self.size = max(len(self.rows), self.size // 2)

    def _add(self, slots: Mapping[int, Layer]) -> None:
        """Make buffers for layers like `slots` (1, heads, 1, head size); layers of equal shape share stacks."""
        alike: dict[tuple[object, ...], list[_Place]] = defaultdict(list)
        for index, pair in slots.items():
            for side, like in enumerate(pair):
                alike[like.shape, like.dtype, like.device].append((index, side))
        made: list[tuple[list[_Place], torch.Tensor]] = []
        for layers_alike in alike.values():
            for places in (layers_alike[n : n + _LAYERS_A_STACK] for n in range(0, len(layers_alike), _LAYERS_A_STACK)):
                index, side = places[0]
                made.append((places, self._zeros(len(places), self.size, slots[index][side])))
        for places, stack in made:  # only now: if memory runs out above, no layer has a buffer
            self._places.append(places)
            self.stacks.append(stack)
            self._show(places, stack)

    def _show(self, places: Sequence[_Place], stack: torch.Tensor) -> None:
        """Make the layers at these places views of a stack."""
        for (index, side), view in zip(places, stack, strict=True):
            keys, values = self.layers.get(index, (view, view))
            self.layers[index] = (keys, view) if side else (view, values)

    def _zeros(self, layers: int, rows: int, like: torch.Tensor) -> torch.Tensor:
        # zeros, because uninitialised memory may hold NaN
        shape = (layers, rows, like.shape[-3], self.capacity, like.shape[-1])
        return self.pool.retried(lambda: like.new_zeros(shape))


def slot_bytes(slots: Mapping[int, Layer]) -> int:
    """Bytes of one slot of every layer."""
    return sum(t.nbytes for pair in slots.values() for t in pair)


class CachePool:
    """The blocks of one model on a device, one for each capacity of its rows.

    `slots`: one slot of each layer (1, heads, 1, head size), once known; new blocks are made like them.
    `reclaim_memory` frees memory that only saves time.
    """

    def __init__(self, device: torch.device, slots: Mapping[int, Layer] | None = None) -> None:
        self._smallest = smallest_row(device)
        self._blocks: dict[int, CacheBlock] = {}
        self.slots = dict(slots or {})
        self.reclaim_memory: Callable[[], bool] = lambda: False

    @torch.inference_mode()
    def row(self, slots: int) -> CacheRow:
        """A new row of at least `slots` slots."""
        block = self._block(row_capacity(slots, self._smallest))
        row = CacheRow(self, block, len(block.rows))
        block.rows.append(row)
        for stack in block.stacks:
            # an earlier answer may have left a NaN, which masked slots let through: 0 · NaN is NaN
            stack[:, row.index].zero_()
        return row

    @torch.inference_mode()
    def move(self, row: CacheRow, slots: int) -> None:
        """Move `row` to a block with at least `slots` slots."""
        target = self.row(slots)
        try:
            for n, (keys, values) in row.block.layers.items():
                new_keys, new_values = target.block.layer(n, keys, values)
                new_keys[target.index, :, : row.used] = keys[row.index, :, : row.used]
                new_values[target.index, :, : row.used] = values[row.index, :, : row.used]
        except Exception:
            self.free(target)
            raise
        block, index = target.block, target.index
        self.free(row)
        row.block, row.index = block, index
        block.rows[index] = row

    @torch.inference_mode()
    def free(self, row: CacheRow) -> None:
        """Fill the gap with the last row of its block; an empty block gives its memory back."""
        block, index = row.block, row.index
        last = block.rows.pop()
        if last is not row:
            for stack in block.stacks:
                stack[:, index, :, : last.used] = stack[:, last.index, :, : last.used]
                stack[:, index, :, last.used :] = 0
            block.rows[index] = last
            last.index = index
        row.index = -1
        if not block.rows:
            block.drop()
            del self._blocks[block.capacity]

    def retried(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of `work`. If memory runs out, it is tried once again, and then while something can be freed."""
        for tries in itertools.count():
            try:
                return work()
            except Exception as error:
                if not is_out_of_memory(error) or (not self.reclaim_memory() and tries):
                    raise
        raise AssertionError("never reached")

    @property
    def memory_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(stack.nbytes for block in self._blocks.values() for stack in block.stacks)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot of a row in all layers; 0 until the layers are known."""
        return slot_bytes(self.slots)

    def _block(self, capacity: int) -> CacheBlock:
        """The block of a capacity with a free row: it is made, or grows, if there is none."""
        block = self._blocks.get(capacity)
        if block is None:
            block = self._blocks[capacity] = CacheBlock(weakref.proxy(self), capacity)
        elif block.is_full:
            block.grow()
        return block


SHORTEST_PREFIX = 16
"""Fewest tokens of a prefix that is worth copying."""


class Kept(Protocol):
    """The remembered first slots of an ended answer."""

    @property
    def pieces(self) -> Mapping[Hashable, int]:
        """Bytes of each piece of memory; a piece that several entries share has the same key in all of them."""
        ...

    def free(self) -> None:
        """Give their memory back."""
        ...


class Row(Protocol):
    """One answer's slots, of which the first `used` hold keys and values."""

    used: int
    reach: int

    @property
    def capacity(self) -> int:
        """Slots that it can hold without more memory."""
        ...

    @property
    def spare_slots(self) -> int:
        """Free slots that it can have without more memory."""
        ...

    def reserve(self, slots: int) -> None:
        """Grow to `slots` slots in all."""
        ...

    def keep(self, prefix: int, slots: Sequence[int]) -> None:
        """Keep the first `prefix` slots, then `slots` (ascending, none below `prefix`), and drop the rest."""
        ...

    def bytes_of(self, count: int) -> int:
        """Bytes that `save` takes for `count` slots."""
        ...

    def save(self, count: int) -> Any:
        """The first `count` slots as `Kept`, which stays when the row is freed."""
        ...

    def load(self, saved: Any, count: int) -> None:
        """Fill the slots from `used` to `count` from `saved`."""
        ...

    def load_from(self, row: Any, count: int) -> None:
        """Fill the slots from `used` to `count` from another row."""
        ...

    def free(self) -> None:
        """Give the row back. Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    ids: tuple[int, ...]
    kept: Kept


class Holder(Protocol):
    """A running answer."""

    @property
    def cached(self) -> tuple[Row, tuple[int, ...]] | None:
        """Its row and the committed ids in it; None if they cannot be copied."""
        ...


class PrefixCache:
    """Prefixes of earlier answers with their keys and values.

    `limit`: bytes for prefixes of ended answers; 0: none is remembered. `holders`: running answers, whose prefixes are
    copied from their rows and count towards no limit.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self._entries: list[_Entry] = []
        self.holders = weakref.WeakSet[Holder]()
        self.reused_tokens = 0

    @property
    def memory_bytes(self) -> int:
        pieces: dict[Hashable, int] = {}
        for entry in self._entries:
            pieces.update(entry.kept.pieces)
        return sum(pieces.values())

    def fill(self, row: Row, prompt: Sequence[int]) -> int:
        """Fill a row that holds the beginning of `prompt` with more of it, from other answers.

        Returns the number of tokens that it holds then. The last token is never filled in: its logits are needed.
        """
        prefix = tuple(prompt[:-1])
        sizes = [common_length(entry.ids, prefix) for entry in self._entries]
        running = [(common_length(ids, prefix), row_read) for row_read, ids in self._held(row)]
        remembered, size = max(sizes, default=0), max((size for size, _ in running), default=0)
        if max(remembered, size) < row.used + SHORTEST_PREFIX:
            return row.used
        self.reused_tokens += max(remembered, size) - row.used
        if size >= remembered:
            row.load_from(next(row_read for count, row_read in running if count == size), size)
            return size
        entry = self._entries[sizes.index(remembered)]
        self._entries.remove(entry)  # most recently used before it loads: loading may have to drop others
        self._entries.append(entry)
        row.load(entry.kept, remembered)
        return remembered

    def _held(self, row: Row) -> list[tuple[Row, tuple[int, ...]]]:
        """Prefixes of running answers in other rows."""
        cached = [holder.cached for holder in self.holders]
        return [entry for entry in cached if entry is not None and entry[0] is not row and len(entry[1]) > row.used]

    def store(self, row: Row, ids: Sequence[int]) -> None:
        """Remember a row that holds `ids`. Entries that are a prefix of it are dropped."""
        ids = tuple(ids)
        if not self.limit or len(ids) < SHORTEST_PREFIX:
            return
        sizes = {id(entry): common_length(entry.ids, ids) for entry in self._entries}
        if any(sizes[id(entry)] == len(ids) for entry in self._entries):
            return
        nbytes = row.bytes_of(len(ids))
        if nbytes > self.limit:
            return
        for entry in [entry for entry in self._entries if sizes[id(entry)] == len(entry.ids)]:
            self._drop(entry)
        self.shrink(self.limit - nbytes)
        self._entries.append(_Entry(ids, row.save(len(ids))))

    def shrink(self, limit: int = 0) -> None:
        """Drop the least recently used entries until the rest takes at most `limit` bytes."""
        while self.memory_bytes > limit and self.drop_oldest():
            pass

    def drop_oldest(self) -> bool:
        """Drop the least recently used entry; whether there was one."""
        if self._entries:
            self._drop(self._entries[0])
            return True
        return False

    def _drop(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        entry.kept.free()


def common_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the longest common prefix, by bisection over slices."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
