"""Rows and blocks of the cache: a row is one answer's place in a block, a block holds rows of one capacity."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from specfuse_shared.runtime.cache.sizes import SPARE
from specfuse_shared.runtime.out_of_memory import is_out_of_memory
from specfuse_shared.runtime.transfer import upload

if TYPE_CHECKING:
    from specfuse_shared.runtime.cache.kv_cache import CachePool

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
        return {n: (keys.clone(), values.clone()) for n, (keys, values) in self.view(count).items()}

    def view(self, count: int) -> dict[int, Layer]:
        """The first `count` slots of every layer, (heads, count, head size), until a row moves."""
        return {
            n: (keys[self.index, :, :count], values[self.index, :, :count])
            for n, (keys, values) in self.block.layers.items()
        }

    def load(self, saved: dict[int, Layer], count: int, start: int = 0) -> None:
        """Fill the slots from `start` to `count` with those of a copy."""
        self.reserve(count)
        for n, (keys, values) in saved.items():
            own_keys, own_values = self.block.layer(n, keys[None], values[None])
            own_keys[self.index, :, start:count] = keys[:, start:count]
            own_values[self.index, :, start:count] = values[:, start:count]
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
            except Exception as error:
                if not is_out_of_memory(error) or self.layers or self.size <= len(self.rows):
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


def slot_bytes(slots: Mapping[int, Layer]) -> int:
    """Bytes of one slot of every layer."""
    return sum(t.nbytes for pair in slots.values() for t in pair)
