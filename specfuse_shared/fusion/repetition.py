"""Repetition loops. Repetition is probable to every model, so no verifier objects to it.

Also loops in a JSON value that is being written, and the text that closes it after the first occurrence. Equal entries
are common in values: flags, zeros, rows of a table, a class for each sentence. A loop is a repetition that no list or
text needs: the same words four times in a row, or the same numbers some dozens of times.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from specfuse_shared.text.tool_calls import CALL_OPEN

TIMES = 3
"""This number of repetitions in a row, or of equal lines, is a loop."""
_SHORTEST_STRETCH, _LONGEST_STRETCH = 3, 60
_LONG_STRETCH = 6
"""A stretch of this number of words is a loop if it occurs twice in a row."""
_REFRAIN = 12
"""This number of equal words in a row is a loop; refrains and laughter are shorter."""
_OPENING = 2
_NEAR, _LETTERS = 6, 10
"""Among this number of lines, a line of this number of letters occurs at most twice."""
_FENCE = "```"


def repeats(answer: str, segment: str) -> bool:
    """Whether the answer with `segment` ends in a loop, or `segment` continues a line that occurs twice.

    Such a candidate loses against one that does neither.
    """
    text = answer + segment
    words = _last_words(text)
    if ends_in_loop(words) or ends_in_loop(words, 2, _LONG_STRETCH):
        return True
    return _repeats_line(text, segment) or _is_stuck(text, words, segment)


def is_stuck(answer: str, segment: str) -> bool:
    """Whether the answer with `segment` repeats itself: if members find nothing better, the answer ends.

    A loop is one stretch of running text three times in a row. Outside of code it is also a long stretch twice and
    begun again, or a line for the third time among the last few. Running text has three different words with letters,
    unlike rows of numbers, rules and refrains of one word. A single word is a loop if it occurs a dozen times in a
    row.
    """
    text = answer + segment
    return _is_stuck(text, _last_words(text), segment)


def _is_stuck(text: str, words: list[str], segment: str) -> bool:
    length = circle(words)
    if length and _is_running(words[-length:]):
        return True
    if text.count(_FENCE) % 2:
        return False
    if _is_one_word(words[-_REFRAIN:]):
        return True
    return _begins_again(words, len(segment.split())) or _has_line_again(text, segment)


def _last_words(text: str) -> list[str]:
    """The words that a loop at the end of a text can reach: four stretches, and the beginning of another one."""
    return text.rsplit(None, 5 * _LONGEST_STRETCH)[-5 * _LONGEST_STRETCH :]


def ends_in_loop(words: list[str], times: int = TIMES, shortest: int = _SHORTEST_STRETCH) -> bool:
    """Whether the last words are one stretch of at least `shortest`, this many times in a row."""
    return circle(words, times, shortest) > 0


def circle(words: list[str], times: int = TIMES, shortest: int = _SHORTEST_STRETCH) -> int:
    """Words of the stretch that ends the text `times` times in a row; 0 if there is none."""
    for n in range(shortest, min(len(words) // times, _LONGEST_STRETCH) + 1):
        if words[-n - 1] != words[-1]:  # most lengths end here
            continue
        tail = words[-n:]
        if all(words[-n * (k + 1) : -n * k] == tail for k in range(1, times)):
            return n
    return 0


def _is_running(stretch: list[str]) -> bool:
    return len({w.lower() for w in stretch if any(c.isalpha() for c in w)}) >= _SHORTEST_STRETCH


def _is_one_word(words: list[str]) -> bool:
    return len(words) == _REFRAIN and len({w.lower() for w in words}) == 1 and any(map(str.isalpha, words[0]))


def _begins_again(words: list[str], fresh: int) -> bool:
    """Whether a long stretch of running text occurs twice in a row, followed by its first words."""
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
        lines[max(0, n + 1 - _NEAR) : n + 1].count(lines[n]) >= TIMES and sum(c.isalpha() for c in lines[n]) >= _LETTERS
        for n in range(touched, len(lines))
    )


def _repeats_line(text: str, segment: str) -> bool:
    """The segment's last, possibly incomplete line repeats two equal earlier ones."""
    if not segment.strip():
        return False
    *earlier, line = (line.strip() for line in text.rstrip().splitlines())
    if len(line.split()) < _OPENING:
        return False
    alike = [old for old in earlier if old.startswith(line)]
    return any(alike.count(old) >= TIMES - 1 for old in alike)


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?$)|[\[\]{},]', re.DOTALL)
_LETTER = re.compile(r"[^\W\d_]")
_OF_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ESCAPE_CUT = re.compile(r"(?<!\\)(?:\\\\)*(\\(?:u[0-9a-fA-F]{0,3})?)$")

ITEM_TIMES, CYCLE_TIMES = 4, 3
"""Number of equal items in a row, and of equal stretches of several items, that is a loop."""
SHORT_ITEM_TIMES, PLAIN_ITEM_TIMES = 12, 48
"""The same for items of one or two letters, and for numbers, flags and nulls."""
_VALUE_LETTERS = 3
_LONGEST_CYCLE = 4
"""Items of a stretch that is looked for."""

WORD_TIMES, PAIR_TIMES, STRETCH_TIMES = 8, 4, 3
"""Number of repetitions of one word, of two, and of more that is a loop within a string."""
LONG_STRETCH, _BEGUN_AGAIN = 6, 12
"""A stretch of this number of words and characters is a loop if it occurs twice and begins again."""
_LONGEST_VALUE_STRETCH, _SHORTEST_WORD = 240, 3
"""Characters of a stretch that is looked for, and of one that counts as a word."""
PLAIN_CHARACTERS = 256
"""Of a string that repeats characters without words, such as zeros or dashes."""
_SEARCHED = 4 * _LONGEST_VALUE_STRETCH
_STOPS, _SEPARATORS = ".!?", ",;:|/ \t-"


@dataclass(frozen=True, slots=True)
class ValueLoop:
    """`said`: the repeated text. `kept`: the part of the segment before its repetition. `closer`: the end of the list,
    object or string; empty if only the next item will show whether it is a loop."""

    said: str
    kept: str
    closer: str


@dataclass(slots=True)
class _Container:
    """An open list or object: the places of its items, and where the one begins that is being written."""

    closer: str
    begins: int
    items: list[tuple[int, int]]


def loop_of(answer: str, segment: str) -> ValueLoop | None:
    """The loop in which the value of an answer ends with `segment`; None if it is in none."""
    text = answer + segment
    begins = text.rfind(CALL_OPEN)
    begins = 0 if begins < 0 else begins + len(CALL_OPEN)
    if text[begins : begins + 1] not in ("{", "[", '"'):
        return None
    opened, string = _open_parts(answer, text, begins)
    if string is not None and (loop := _loop_of_string(text, string + 1, len(answer))) is not None:
        return loop
    for container in reversed(opened):
        if (loop := _loop_of_items(text, container, len(answer))) is not None:
            return loop
    return None


def _open_parts(answer: str, text: str, begins: int) -> tuple[list[_Container], int | None]:
    """The lists and objects that are open at the end of `text`, and where an open string begins.

    All candidates of a round share the scan of the `answer` before them.
    """
    if begins > len(answer):
        return _scan(text, begins, [])
    opened, resume = _answer_parts(answer, begins)
    return _scan(text, resume, [_Container(c.closer, c.begins, c.items.copy()) for c in opened])


@lru_cache(maxsize=32)
def _answer_parts(answer: str, begins: int) -> tuple[list[_Container], int]:
    """The open parts of an answer, and where to resume the scan: at an open string, else at its end."""
    opened, string = _scan(answer, begins, [])
    return opened, len(answer) if string is None else string


def _scan(text: str, begins: int, opened: list[_Container]) -> tuple[list[_Container], int | None]:
    for token in _TOKEN.finditer(text, begins):
        mark, at = token[0], token.start()
        if mark in "[{":
            opened.append(_Container("]" if mark == "[" else "}", token.end(), []))
        elif mark in "]}":
            if opened:
                opened.pop()
        elif mark == ",":
            if opened:
                opened[-1].items.append((opened[-1].begins, at))
                opened[-1].begins = token.end()
        elif len(mark) == 1 or not _OF_STRINGS.fullmatch(mark):
            return opened, at
    return opened, None


# ── items ────────────────────────────────────────────────────────────────────────────────────────


def _loop_of_items(text: str, container: _Container, committed: int) -> ValueLoop | None:
    count, begun = len(container.items), text[container.begins :].strip()

    def item(number: int) -> str:
        begin, end = container.items[number]
        return text[begin:end].strip()

    for length in range(1, _LONGEST_CYCLE + 1):
        first = count - length
        if first < 0 or not item(first).startswith(begun):
            continue
        cycle = [item(number) for number in range(first, count)]
        while first > 0 and item(first - 1) == item(first - 1 + length):
            first -= 1
        missing = _times_of_items(cycle) - (count - first) // length
        ends = [end for _, end in container.items[first + length - 1 :] if end >= committed]
        if missing > 1 or not ends:
            continue
        repeated = ", ".join(item(number) for number in range(first, first + length))
        if missing == 1 and ends[-1] > committed:  # without its comma, a list may still end there
            return ValueLoop(repeated, text[committed : ends[-1]], "")
        if missing == 1 and 2 * len(begun) < len(cycle[0]):
            continue
        return ValueLoop(repeated, text[committed : ends[0]], container.closer)
    return None


def _times_of_items(cycle: Sequence[str]) -> int:
    letters = min(sum(len(_LETTER.findall(string)) for string in _OF_STRINGS.findall(item)) for item in cycle)
    if not letters:
        return PLAIN_ITEM_TIMES
    if letters < _VALUE_LETTERS:
        return SHORT_ITEM_TIMES
    return ITEM_TIMES if len(cycle) == 1 else CYCLE_TIMES


# ── strings ──────────────────────────────────────────────────────────────────────────────────────


def _loop_of_string(text: str, begins: int, committed: int) -> ValueLoop | None:
    content = text[max(begins, len(text) - _SEARCHED) :]
    offset = len(text) - len(content)
    for length in range(1, min(_LONGEST_VALUE_STRETCH, len(content) // 2) + 1):
        covered = _covered(content, length)
        if covered + 1 < _needed(content[-length:]) or _is_repeated(content[-length:]):
            continue
        first = offset + len(content) - covered
        end = _end_of_repeat(text, max(first + length - 2, committed), length)
        trimmed = _without_half_escape(text[begins:end].rstrip(_SEPARATORS))
        repeated = text[first : first + length].strip(_SEPARATORS)
        return ValueLoop(repeated, text[committed : max(committed, begins + len(trimmed))], '"')
    return None


def _covered(content: str, length: int) -> int:
    """Characters at the end of a text that are a stretch of this length, over and over."""
    at = len(content) - 1
    while at >= length and content[at] == content[at - length]:
        at -= 1
    return len(content) - 1 - at + length if at < len(content) - 1 else 0


def _is_repeated(stretch: str) -> bool:
    """Whether a stretch is a shorter one several times."""
    return stretch in (stretch + stretch)[1:-1]


def _needed(stretch: str) -> int:
    """Characters that have to repeat a stretch, so that it is a loop."""
    length, words = len(stretch), len(stretch.split())
    if not _LETTER.search(stretch) or length < _SHORTEST_WORD:
        return max(PLAIN_CHARACTERS, 2 * length)
    if not stretch[0].isspace() and not stretch[-1].isspace():
        words = max(1, words - 1)  # it begins within a word that it ends with
    if words >= LONG_STRETCH:
        return 2 * length + _BEGUN_AGAIN
    times = WORD_TIMES if words == 1 else PAIR_TIMES if words == 2 else STRETCH_TIMES
    return times * length


def _end_of_repeat(text: str, at: int, length: int) -> int:
    """The end of the first occurrence: before a comma or after a full stop, else between two words."""
    window = range(at, min(at + length + 1, len(text)))
    for place in window:
        if text[place] in _STOPS:
            return place + 1
        if text[place] in ",;|":
            return place
    return next((place for place in window if text[place].isspace()), at)


def _without_half_escape(content: str) -> str:
    match = _ESCAPE_CUT.search(content)
    return content[: match.start(1)] if match else content
