"""Does a candidate go in circles? Repetition is probable to every model, so no verifier ever objects to it."""

from __future__ import annotations

TIMES = 3
"""So many times in a row, or so many equal lines, are a circle."""
_SHORTEST_STRETCH, _LONGEST_STRETCH = 3, 60
_LONG_STRETCH = 6
"""Words of a stretch that is a circle already when it comes twice in a row."""
_REFRAIN = 12
"""So many times in a row the same word is a circle: refrains and laughter are shorter."""
_OPENING = 2
_NEAR, _LETTERS = 6, 10
"""Lines among which one of so many letters comes at most twice: farther apart or shorter they may belong there."""
_FENCE = "```"


def repeats(answer: str, segment: str) -> bool:
    """Whether the answer with `segment` ends in a circle, or `segment` goes on with a line that stands there twice.

    Such a candidate loses against one that does neither.
    """
    words = (answer + segment).split()
    if ends_in_circle(words) or ends_in_circle(words, 2, _LONG_STRETCH):
        return True
    return _repeats_line(answer, segment) or is_stuck(answer, segment)


def is_stuck(answer: str, segment: str) -> bool:
    """Whether with `segment` the answer says again what it said: if this is the best that members find, it is over.

    That is one stretch of running text three times in a row; outside of code also a long one twice and begun again, or
    a line for the third time among the last few. Running text has three different words with letters, unlike rows of
    numbers, rules and refrains of one word; a word is a circle when it comes a dozen times in a row.
    """
    text = answer + segment
    words = text.split()
    length = circle(words)
    if length and _is_running(words[-length:]):
        return True
    if text.count(_FENCE) % 2:
        return False
    if _is_one_word(words[-_REFRAIN:]):
        return True
    return _begins_again(words, len(segment.split())) or _has_line_again(text, segment)


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


def _is_running(stretch: list[str]) -> bool:
    return len({w.lower() for w in stretch if any(c.isalpha() for c in w)}) >= _SHORTEST_STRETCH


def _is_one_word(words: list[str]) -> bool:
    return len(words) == _REFRAIN and len({w.lower() for w in words}) == 1 and any(map(str.isalpha, words[0]))


def _begins_again(words: list[str], fresh: int) -> bool:
    """Whether a long stretch of running text stands there twice in a row and its first words once more."""
    for count in range(_SHORTEST_STRETCH, min(_SHORTEST_STRETCH + fresh, _LONGEST_STRETCH + 1)):
        length = circle(words[:-count], 2, _LONG_STRETCH)
        begun = words[-count:] == words[-count - length :][:count]
        if length >= count and begun and _is_running(words[-length:]):
            return True
    return False


def _has_line_again(text: str, segment: str) -> bool:
    """Whether one of the lines that the segment touches is the third such among those around it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    touched = len(lines) - sum(1 for line in segment.splitlines() if line.strip())
    return any(
        sum(c.isalpha() for c in lines[n]) >= _LETTERS and lines[max(0, n + 1 - _NEAR) : n + 1].count(lines[n]) >= TIMES
        for n in range(touched, len(lines))
    )


def _repeats_line(answer: str, segment: str) -> bool:
    """The line that the segment touches last goes, as far as it is written, like two equal earlier ones."""
    if not segment.strip():
        return False
    *earlier, line = (line.strip() for line in (answer + segment).rstrip().splitlines())
    if len(line.split()) < _OPENING:
        return False
    alike = [old for old in earlier if old.startswith(line)]
    return any(alike.count(old) >= TIMES - 1 for old in alike)
