"""Prefix reuse: what recent answers left in a model's cache, and what running ones hold, for prompts that begin alike.

The next turn of a conversation, the next step of an agent loop and questions over one passage share most of their
prompt. Copies of what ended live outside the cache rows, bounded in bytes, least recently used first out. What a
running answer has read is copied from its row.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specfuse_shared.runtime.cache.blocks import CacheRow, Layer

SHORTEST_PREFIX = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    ids: tuple[int, ...]
    layers: dict[int, Layer]
    nbytes: int


class Holder(Protocol):
    """An answer that runs."""

    @property
    def cached(self) -> tuple[CacheRow, tuple[int, ...]] | None:
        """Its row and the committed ids in it; None where they cannot be copied."""
        ...


class PrefixCache:
    """Token sequences with their keys and values. `limit`: bytes of those that ended; 0 keeps none of them.

    `holders`: answers that run, whose prefixes are copied from their rows, without a limit.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self._entries: list[_Entry] = []
        self.holders = weakref.WeakSet[Holder]()
        self.reused_tokens = 0

    @property
    def memory_bytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries)

    def fill(self, row: CacheRow, prompt: Sequence[int]) -> int:
        """Put more of `prompt`, but not its last token, into a row that holds its beginning; how many it holds then."""
        wanted = tuple(prompt[:-1])
        sizes = [common_length(entry.ids, wanted) for entry in self._entries]
        held = [(common_length(ids, wanted), other) for other, ids in self._held(row)]
        kept, size = max(sizes, default=0), max((size for size, _ in held), default=0)
        if max(kept, size) < row.used + SHORTEST_PREFIX:
            return row.used
        self.reused_tokens += max(kept, size) - row.used
        if size >= kept:
            row.reserve(size)  # first: rows may move for it
            source = next(other for count, other in held if count == size)
            row.load(source.view(size), size, row.used)
            return size
        entry = self._entries[sizes.index(kept)]
        self._entries.remove(entry)  # first: what is loaded may have to make room
        self._entries.append(entry)
        row.load(entry.layers, kept, row.used)
        return kept

    def _held(self, row: CacheRow) -> list[tuple[CacheRow, tuple[int, ...]]]:
        """What running answers hold in other rows."""
        cached = [holder.cached for holder in self.holders]
        return [found for found in cached if found is not None and found[0] is not row and len(found[1]) > row.used]

    def store(self, row: CacheRow, ids: Sequence[int]) -> None:
        """Keep a copy of a row that holds `ids`, in place of entries that it begins with."""
        ids = tuple(ids)
        if not self.limit or len(ids) < SHORTEST_PREFIX:
            return
        sizes = {id(entry): common_length(entry.ids, ids) for entry in self._entries}
        if any(sizes[id(entry)] == len(ids) for entry in self._entries):
            return
        nbytes = row.pool.bytes_per_slot * len(ids)
        if nbytes > self.limit:
            return
        self._entries = [entry for entry in self._entries if sizes[id(entry)] < len(entry.ids)]
        self.shrink(self.limit - nbytes)
        self._entries.append(_Entry(ids, row.save(len(ids)), nbytes))

    def shrink(self, limit: int = 0) -> None:
        """Drop the least recently used entries until the rest takes at most `limit` bytes."""
        while self._entries and self.memory_bytes > limit:
            self._entries.pop(0)


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
