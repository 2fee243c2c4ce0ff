"""Stop strings across segment borders: find them, and hold back what may become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`stop` begins at character `start` of the whole text and ends at `end`."""

    start: int
    end: int
    stop: str


def find_stops(text: str, addition: str, stops: Sequence[str]) -> list[StopMatch]:
    """Stop strings in `text + addition` that `text` alone does not hold: the earliest first, the longest of equals."""
    reach = max((len(s) for s in stops), default=1) - 1
    offset = max(0, len(text) - reach)
    window = text[offset:] + addition
    found = (
        StopMatch(offset + at, offset + at + len(stop), stop)
        for stop in stops
        for at in range(len(window))
        if window.startswith(stop, at)
    )
    return sorted((m for m in found if m.end > len(text)), key=lambda m: (m.start, -m.end))


def find_stop(text: str, addition: str, stops: Sequence[str]) -> StopMatch | None:
    """The first of `find_stops`, if any."""
    return next(iter(find_stops(text, addition, stops)), None)


def partial_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that a stop string could continue."""
    longest = max((len(s) for s in stops), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(len(s) > size and s.startswith(text[-size:]) for s in stops):
            return size
    return 0


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
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self.released += len(shown)
        return shown

    def finish(self, text: str, total: int) -> str:
        """Take the last text; return all that was held, up to character `total` of the whole answer."""
        shown = (self._held + text)[: max(0, total - self.released)]
        self.released += len(shown)
        self._held = ""
        return shown
