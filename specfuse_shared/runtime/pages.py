"""The cache of a model as one arena of pages for each layer, which all answers share.

An answer has a list of pages (a block table). Answers that share a prefix share its pages: each page counts its owners,
and a shared page is copied before it is written. So only the last, incomplete page of a prefix is copied. The arena
never moves or grows, so captured steps stay valid.

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
    """No page is free, and no remembered prefix is left to drop."""

    def __init__(self, pages: int) -> None:
        super().__init__(f"out of memory: all {pages - 1} pages of the cache ({PAGE} tokens each) are in use")


@dataclass(slots=True, eq=False)
class PagedRow:
    """One answer's pages: slots 0 … used - 1 hold keys and values.

    Attributes:
        arena: The arena of its pages.
        pages: Their numbers, in order.
        used: Number of slots in use.
        reach: More than the limit of `LongRope` once the text needs the long set of frequencies; else 0.
        is_free: Whether `free` was called.
    """

    arena: PageArena
    pages: list[int] = field(default_factory=list)
    used: int = 0
    reach: int = 0
    is_free: bool = False

    @property
    def capacity(self) -> int:
        """Number of slots in its pages."""
        return len(self.pages) * PAGE

    def place(self, slot: int) -> int:
        """The arena's slot for a slot of the answer."""
        return self.pages[slot // PAGE] * PAGE + slot % PAGE

    def places(self, start: int, stop: int) -> list[int]:
        """The arena's slots for the answer's slots `start` … `stop` - 1."""
        return [self.place(slot) for slot in range(start, stop)]

    def reserve(self, slots: int) -> None:
        """Take pages until there are `slots` slots. Afterwards no page that will be written is shared."""
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
    def spare_slots(self) -> int:
        """Free slots: those left in its pages, and those that free pages could add, at most for a round's tokens."""
        return self.capacity - self.used + min(self.arena.free_pages * PAGE, TREE_CAPACITY)

    @property
    def pieces(self) -> Mapping[Hashable, int]:
        """Bytes of each page by its number, which is the same in all answers that share the page."""
        return dict.fromkeys(self.pages, PAGE * self.arena.bytes_per_slot)

    def bytes_of(self, count: int) -> int:
        """Bytes of the pages of `count` slots."""
        return self.arena.pages_of(count) * PAGE * self.arena.bytes_per_slot

    def save(self, count: int) -> PagedRow:
        """The first `count` slots as a separate row, which stays when this row is freed."""
        kept = PagedRow(self.arena)
        kept.load(self, count)
        return kept

    def load(self, saved: PagedRow, count: int) -> None:
        """Hold the first `count` slots of `saved`, which begins with the contents of this row.

        Whole pages are shared. The last, incomplete one is copied.
        """
        start, whole = self.used // PAGE, count // PAGE
        # hold all pages first: to take a new one, the arena may drop `saved`
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
        """Copy shared pages, from the page of `slot` on, because they are about to be written."""
        for number in range(slot // PAGE, len(self.pages)):
            page = self.pages[number]
            if self.arena.owners[page] > 1:
                [own] = self.arena.take(1)
                self.arena.copy_page(page, own)
                self.arena.give([page])
                self.pages[number] = own


class PageArena:
    """All pages of a model on its device. Page 0 belongs to no answer: padding is written there.

    Args:
        slots: Example keys and values (1, J, 1, D) of each layer, for one slot.
        pages: Number of pages, including page 0.
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
        """Drops a remembered prefix; whether there was one. Other memory than pages does not help."""

    @staticmethod
    def pages_of(slots: int) -> int:
        """Number of pages for a number of slots."""
        return -(-slots // PAGE)

    def row(self, slots: int = 0) -> PagedRow:
        """A row for a new answer. It takes pages only when it writes, so that a shared prefix needs no new ones."""
        return PagedRow(self)

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
        """Take free pages; each has one owner then. If it raises `OutOfPagesError`, none is taken."""
        while len(self._free) < count:
            if not self.reclaim_pages():
                raise OutOfPagesError(self.pages)
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self.owners[page] = 1
        return taken

    def hold(self, pages: Sequence[int]) -> list[int]:
        """Add an owner to each page; returns the pages."""
        for page in pages:
            self.owners[page] += 1
        return list(pages)

    def give(self, pages: Sequence[int]) -> None:
        """Remove an owner from each page; a page without owners is free again."""
        for page in pages:
            self.owners[page] -= 1
            if not self.owners[page]:
                self._free.append(page)

    def copy_page(self, source: int, target: int) -> None:
        """Copy the contents of a page to another."""
        self.copy(range(source * PAGE, (source + 1) * PAGE), range(target * PAGE, (target + 1) * PAGE))

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the arena's slots `sources` to `targets` in every layer; all are read before any is written."""
        pairs = [tensor for pair in self.layers.values() for tensor in pair]
        at: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        for tensor in pairs:
            if tensor.device not in at:
                at[tensor.device] = upload(list(sources), tensor.device), upload(list(targets), tensor.device)
            source, target = at[tensor.device]
            tensor.index_copy_(0, target, tensor.index_select(0, source))
