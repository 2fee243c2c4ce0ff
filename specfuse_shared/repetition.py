"""Does a candidate go in circles? Repetition is probable to every model, so no verifier ever objects to it."""

from __future__ import annotations

TIMES = 3
"""So many times in a row, or so many equal lines, are a circle."""
_LEAST_WORDS = 3
_LONGEST_STRETCH = 60


def repeats(answer: str, segment: str) -> bool:
    """Whether the answer with `segment` ends in a circle, or `segment` completes or opens a line for the third time.

    A stretch or a line shorter than three words does not count (tables, lists, refrains).
    """
    return ends_in_circle((answer + segment).split()) or _repeats_line(answer, segment)


def ends_in_circle(words: list[str]) -> bool:
    """Whether the last words are one stretch, `TIMES` times in a row."""
    longest = min(len(words) // TIMES, _LONGEST_STRETCH)
    return any(
        all(words[-n:] == words[len(words) - n * (k + 1) : len(words) - n * k] for k in range(1, TIMES))
        for n in range(_LEAST_WORDS, longest + 1)
    )


def _repeats_line(answer: str, segment: str) -> bool:
    """The line that the segment touches last, as far as it goes, begins two earlier lines already."""
    if not segment.strip():
        return False
    *earlier, line = (line.strip() for line in (answer + segment).rstrip().splitlines())
    return len(line.split()) >= _LEAST_WORDS and sum(old.startswith(line) for old in earlier) >= TIMES - 1
