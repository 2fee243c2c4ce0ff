"""The cache of a model as one arena of pages for each layer, which all answers share.

An answer has a list of pages. Answers that share a prefix share its pages: each page counts its owners. Only the last,
incomplete page of a prefix is copied. The arena never moves or grows, so captured steps stay valid.

Symbols: N slots of the arena, J heads of keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from specfuse_shared.runtime.kv_cache import TREE_CAPACITY, Layer, slot_bytes
from specfuse_shared.runtime.packed_layout import PAGE
from specfuse_shared.runtime.sampler import upload


class OutOfPagesError(torch.OutOfMemoryError):
    """No page is free, and nothing could be given back."""

    def __init__(self, pages: int) -> None:
        super().__init__(f"out of memory: all {pages - 1} pages of the cache ({PAGE} tokens each) are in use")


@dataclass(slots=True, eq=False)
class PagedRow:
    """One answer's pages: slots 0 … used - 1 hold keys and values.

    Attributes:
        arena: Where its pages are.
        pages: Their numbers, in order.
        used: Number of slots in use.
        reach: Tokens that are sure to come; see `LongRope`.
    """

    arena: PageArena
    pages: list[int] = field(default_factory=list)
    used: int = 0
    reach: int = 0
    is_free: bool = False

    @property
    def capacity(self) -> int:
        """Slots of its pages."""
        return len(self.pages) * PAGE

    def place(self, slot: int) -> int:
        """The slot of the arena that holds a slot of the answer."""
        return self.pages[slot // PAGE] * PAGE + slot % PAGE

    def places(self, start: int, stop: int) -> list[int]:
        """The slots of the arena from `start` to `stop`."""
        return [self.place(slot) for slot in range(start, stop)]

    def reserve(self, slots: int) -> None:
        """Take pages for `slots` slots in all. Pages that will be written belong to this answer alone afterwards."""
        self._own_from(self.used)
        missing = self.arena.pages_of(slots) - len(self.pages)
        if missing > 0:
            self.pages += self.arena.take(missing)

    def keep(self, prefix: int, slots: Sequence[int]) -> None:
        """Keep the first `prefix` slots, then `slots` (ascending, none below `prefix`), and drop the rest."""
        end = prefix + len(slots)
        if slots and list(slots) != list(range(prefix, end)):
            self._own_from(prefix)
            self.arena.copy([self.place(slot) for slot in slots], self.places(prefix, end))
        self.used = end

    @property
    def room(self) -> int:
        """Slots after those in use that its pages have, or that free pages could add for a round's tokens."""
        return self.capacity - self.used + min(self.arena.free_pages * PAGE, TREE_CAPACITY)

    @property
    def pieces(self) -> Mapping[Hashable, int]:
        """Bytes of each of its pages, by number: pages that several answers share have the same."""
        return dict.fromkeys(self.pages, PAGE * self.arena.bytes_per_slot)

    def bytes_of(self, count: int) -> int:
        """Bytes of the pages of `count` slots."""
        return self.arena.pages_of(count) * PAGE * self.arena.bytes_per_slot

    def save(self, count: int) -> PagedRow:
        """The first `count` slots, to keep when this row is gone."""
        kept = PagedRow(self.arena)
        kept.load(self, count)
        return kept

    def load(self, saved: PagedRow, count: int) -> None:
        """Hold the first `count` slots of another row, which begins as this one does.

        Whole pages are held by both, the last one is copied.
        """
        start, whole = self.used // PAGE, count // PAGE
        # all of them first: to take a page, the arena may forget `saved`
        shared = self.arena.hold(saved.pages[start : self.arena.pages_of(count)])
        try:
            last = self.arena.take(1) if count > whole * PAGE else []
        except OutOfPagesError:
            self.arena.give(shared)
            raise
        self.arena.give(self.pages[start:])
        if last:
            copied = shared.pop()
            self.arena.copy_page(copied, last[0])
            self.arena.give([copied])
        self.pages[start:] = [*shared, *last]
        self.used = count

    def load_from(self, row: PagedRow, count: int) -> None:
        """Hold the first `count` slots of another answer's row."""
        self.load(row, count)

    def free(self) -> None:
        """Give the pages back. Safe to call twice."""
        if not self.is_free:
            self.is_free = True
            self.arena.give(self.pages)
            self.pages = []

    def _own_from(self, slot: int) -> None:
        """Copy pages from this slot's on that another answer holds too: they are about to be written."""
        for number in range(slot // PAGE, len(self.pages)):
            page = self.pages[number]
            if self.arena.owners[page] > 1:
                [own] = self.arena.take(1)
                self.arena.copy_page(page, own)
                self.arena.give([page])
                self.pages[number] = own


class PageArena:
    """All pages of a model on its device. Page 0 belongs to nobody: padding is written there.

    Args:
        slots: One slot of each layer, keys and values (1, J, 1, D).
        pages: Number of pages, the first one included.
    """

    def __init__(self, slots: Mapping[int, Layer], pages: int) -> None:
        self.slots = dict(slots)
        self.layers: dict[int, Layer] = {}
        for index, (keys, values) in slots.items():
            # zeros, because uninitialised memory may hold NaN
            self.layers[index] = (
                keys.new_zeros(pages * PAGE, keys.shape[1], keys.shape[3]),
                values.new_zeros(pages * PAGE, values.shape[1], values.shape[3]),
            )
        self.pages = pages
        self.owners = [0] * pages
        self._free = list(range(pages - 1, 0, -1))
        self.reclaim_memory: Callable[[], bool] = lambda: False
        self.reclaim_pages: Callable[[], bool] = lambda: False
        """Gives back pages that only save time; whether there were any. Other memory is of no use here."""

    @staticmethod
    def pages_of(slots: int) -> int:
        """Number of pages for a number of slots."""
        return -(-slots // PAGE)

    def row(self, slots: int = 0) -> PagedRow:
        """A new answer. It takes its pages when they are about to be written, so that shared ones are never taken."""
        return PagedRow(self)

    def reclaim(self) -> bool:
        """Nothing to give back: the arena's memory is its own for good."""
        return False

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the pages in use."""
        return (self.pages - 1 - len(self._free)) * PAGE * self.bytes_per_slot

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot of every layer."""
        return slot_bytes(self.slots)

    def take(self, count: int) -> list[int]:
        """Pages that are now owned once. Raises `OutOfPagesError`; then none is taken."""
        while len(self._free) < count:
            if not self.reclaim_pages():
                raise OutOfPagesError(self.pages)
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self.owners[page] = 1
        return taken

    def hold(self, pages: Sequence[int]) -> list[int]:
        """The same pages, with one more owner each."""
        for page in pages:
            self.owners[page] += 1
        return list(pages)

    def give(self, pages: Sequence[int]) -> None:
        """One owner of each of these pages less; pages without any are free again."""
        for page in pages:
            self.owners[page] -= 1
            if not self.owners[page]:
                self._free.append(page)

    def copy_page(self, source: int, target: int) -> None:
        """Copy the contents of a page to another."""
        self.copy(range(source * PAGE, (source + 1) * PAGE), range(target * PAGE, (target + 1) * PAGE))

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots to slots, all at once, in every layer."""
        pairs = [tensor for pair in self.layers.values() for tensor in pair]
        at: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        for tensor in pairs:
            if tensor.device not in at:
                at[tensor.device] = upload(list(sources), tensor.device), upload(list(targets), tensor.device)
            source, target = at[tensor.device]
            tensor.index_copy_(0, target, tensor.index_select(0, source))
