"""Prefix reuse: what recent answers left in a model's cache, for prompts that begin the same way.

The next turn of a conversation, the next step of an agent loop and questions over one passage share most of their
prompt. Copies live outside the cache rows, bounded in bytes, least recently used first out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specfuse_shared.runtime.cache.blocks import CacheRow, Layer

SHORTEST_PREFIX = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    ids: tuple[int, ...]
    layers: dict[int, Layer]
    nbytes: int


class PrefixCache:
    """Token sequences with their keys and values. `limit`: bytes; 0 keeps nothing."""

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self._entries: list[_Entry] = []
        self.reused_tokens = 0

    @property
    def memory_bytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries)

    def fill(self, row: CacheRow, prompt: Sequence[int]) -> int:
        """Fill an empty row with the longest known prefix of `prompt` but its last token; how many tokens that is."""
        wanted = tuple(prompt[:-1])
        sizes = [common_length(entry.ids, wanted) for entry in self._entries]
        size = max(sizes, default=0)
        if size < SHORTEST_PREFIX:
            return 0
        entry = self._entries[sizes.index(size)]
        self._entries.remove(entry)  # first: what is loaded may have to make room
        self._entries.append(entry)
        row.load(entry.layers, size)
        self.reused_tokens += size
        return size

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
