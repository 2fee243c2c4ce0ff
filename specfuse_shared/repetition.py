"""Does a candidate go in circles? Repetition is probable to every model, so no verifier ever objects to it."""

from __future__ import annotations

TIMES = 3
"""So many times in a row, or so many equal lines, are a circle."""
_SHORTEST_STRETCH, _LONGEST_STRETCH = 3, 60
_LONG_STRETCH = 6
"""Words of a stretch that is a circle already when it comes twice in a row."""
_OPENING = 2


def repeats(answer: str, segment: str) -> bool:
    """Whether the answer with `segment` ends in a circle, or `segment` goes on with a line that stands there twice.

    Such a candidate loses against one that does neither.
    """
    words = (answer + segment).split()
    return ends_in_circle(words) or ends_in_circle(words, 2, _LONG_STRETCH) or _repeats_line(answer, segment)


def is_stuck(answer: str, segment: str) -> bool:
    """Whether the answer with `segment` ends with one stretch of running text three times in a row.

    Running text has three different words with letters, unlike rows of numbers, rules and refrains of one word. If
    this is the best that the members can think of, the answer is over.
    """
    words = (answer + segment).split()
    stretch = words[-circle(words) :] if circle(words) else []
    return len({w.lower() for w in stretch if any(c.isalpha() for c in w)}) >= _SHORTEST_STRETCH


def ends_in_circle(words: list[str], times: int = TIMES, shortest: int = _SHORTEST_STRETCH) -> bool:
    """Whether the last words are one stretch of at least `shortest`, this many times in a row."""
    return circle(words, times, shortest) > 0


def circle(words: list[str], times: int = TIMES, shortest: int = _SHORTEST_STRETCH) -> int:
    """Words of the stretch that ends the text `times` times in a row; 0 if there is none."""
    for n in range(shortest, min(len(words) // times, _LONGEST_STRETCH) + 1):
        tail = words[-n:]
        if all(words[-n * (k + 1) : -n * k] == tail for k in range(1, times)):
            return n
    return 0


def _repeats_line(answer: str, segment: str) -> bool:
    """The line that the segment touches last goes, as far as it is written, like two equal earlier ones."""
    if not segment.strip():
        return False
    *earlier, line = (line.strip() for line in (answer + segment).rstrip().splitlines())
    if len(line.split()) < _OPENING:
        return False
    alike = [old for old in earlier if old.startswith(line)]
    return any(alike.count(old) >= TIMES - 1 for old in alike)
