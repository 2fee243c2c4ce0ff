"""Stop strings across segment borders: find them, and hold back what may become one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

MOST_STOPS = 64
"""Stop strings of one answer."""
LONGEST_STOP = 256
"""Characters of one stop string."""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`stop` begins at character `start` of the whole text and ends at `end`."""

    start: int
    end: int
    stop: str


def find_stops(text: str, addition: str, stops: Sequence[str]) -> list[StopMatch]:
    """Stop strings in `text + addition` that `text` alone does not hold, in order; at one place only the longest."""
    pattern, longest = _search(tuple(stops))
    offset = max(0, len(text) - longest + 1)
    matches = pattern.finditer(text[offset:] + addition) if stops else ()
    stop_matches = (StopMatch(offset + m.start(), offset + m.end(1), m[1]) for m in matches)
    return [match for match in stop_matches if match.end > len(text)]


def find_stop(text: str, addition: str, stops: Sequence[str]) -> StopMatch | None:
    """The first of `find_stops`, if any."""
    return next(iter(find_stops(text, addition, stops)), None)


def partial_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that a stop string could continue."""
    _, longest = _search(tuple(stops))
    beginnings = _beginnings(tuple(stops))
    sizes = range(min(longest - 1, len(text)), 0, -1)
    return next((size for size in sizes if text[-size:] in beginnings), 0)


@lru_cache(maxsize=16)
def _search(stops: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    """Finds the longest stop string at every place, those that overlap too; and the length of the longest."""
    longest_first = sorted(stops, key=len, reverse=True)
    return re.compile(f"(?=({'|'.join(map(re.escape, longest_first))}))"), max(map(len, stops), default=0)


@lru_cache(maxsize=16)
def _beginnings(stops: tuple[str, ...]) -> frozenset[str]:
    return frozenset(stop[:size] for stop in stops for size in range(1, len(stop)))


@dataclass(slots=True)
class StopHold:
    """Releases text as soon as no stop string can begin in it."""

    stops: Sequence[str]
    released: int = 0
    _held: str = field(default="", init=False)

    def feed(self, text: str) -> str:
        """Take new text; return what may be shown."""
        self._held += text
        keep = partial_stop(self._held, self.stops)
        released, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self.released += len(released)
        return released

    def finish(self, text: str, total: int) -> str:
        """Take the last text; return all that was held, up to character `total` of the whole answer."""
        released = (self._held + text)[: max(0, total - self.released)]
        self.released += len(released)
        self._held = ""
        return released
