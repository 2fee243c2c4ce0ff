"""How many slots a cache row has, and how many rows its block: arithmetic that admission knows too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_SMALLEST_ROW = {"cpu": 256}
_DEFAULT_SMALLEST_ROW = 1024
"""Coarser where steps are captured, which happens anew for every capacity."""
SPARE = 1
TREE_ROOM = 64
"""Slots of a new row behind the prompt, for the tokens that a round tries."""
_FIRST_ROWS = 8
"""Rows of the first block that stays where it is, at the smallest capacity; blocks of longer rows have fewer."""


def row_capacity(slots: int, smallest: int) -> int:
    """Slots of the row that holds `slots` and a spare one: a power of two, at least the smallest row."""
    return max(smallest, 1 << (slots + SPARE - 1).bit_length())


def smallest_row(device: torch.device) -> int:
    """Slots of the smallest row on a device."""
    return _SMALLEST_ROW.get(device.type, _DEFAULT_SMALLEST_ROW)


def fixed_rows(number: int, capacity: int, smallest: int) -> int:
    """Rows of block `number` of a capacity, where blocks stay in place: 1, 4, 8, 12 … times those of the first."""
    first = max(1, _FIRST_ROWS * smallest // capacity)
    return first * ((1, 3)[number] if number < 2 else 4)


def next_rows(sizes: Sequence[int], capacity: int, smallest: int, is_fixed: bool) -> list[int]:
    """How many more rows of a capacity its blocks may come to hold once those of `sizes` are full; the first that fits.

    A block that stays where it is, is made with as many rows as there is memory for; others double.
    """
    if not is_fixed:
        return [max(1, sum(sizes))]
    wanted = fixed_rows(len(sizes), capacity, smallest)
    return list(range(wanted, 0, -1))
