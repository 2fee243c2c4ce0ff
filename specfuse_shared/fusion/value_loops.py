"""Where a JSON value that is being written goes in a loop, and how it would be closed after what it said once.

Equal entries are usual in values: flags, zeros, rows of a table, a class for each sentence. A loop is what no list or
text needs: the same words four times in a row, or the same numbers some dozens of times.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from specfuse_shared.text.tool_calls import CALL_OPEN

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?$)|[\[\]{},]', re.DOTALL)
_LETTER = re.compile(r"[^\W\d_]")
_OF_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ESCAPE_CUT = re.compile(r"(?<!\\)(?:\\\\)*(\\(?:u[0-9a-fA-F]{0,3})?)$")

ITEM_TIMES, CYCLE_TIMES = 4, 3
"""So many equal items in a row are a loop, and so many equal stretches of several."""
SHORT_ITEM_TIMES, PLAIN_ITEM_TIMES = 12, 48
"""The same for items of one or two letters, and for numbers, flags and nulls."""
_LETTERS = 3
_LONGEST_CYCLE = 4
"""Items of a stretch that is looked for."""

WORD_TIMES, PAIR_TIMES, STRETCH_TIMES = 8, 4, 3
"""So many times in a row one word, two, or more are a loop within a string."""
LONG_STRETCH, _BEGUN_AGAIN = 6, 12
"""Words of a stretch that is a loop when it comes twice and once more begins, with so many characters."""
_LONGEST_STRETCH, _SHORTEST_WORD = 240, 3
"""Characters of a stretch that is looked for, and of one that counts as a word."""
PLAIN_CHARACTERS = 256
"""Of a string that repeats characters without words, such as zeros or dashes."""
_SEARCHED = 4 * _LONGEST_STRETCH
_STOPS, _SEPARATORS = ".!?", ",;:|/ \t-"


@dataclass(frozen=True, slots=True)
class ValueLoop:
    """`said`: what repeats. `kept`: the part of the segment up to where it is said again. `closer`: what ends the list,
    object or string there; empty where the next item will show whether it is a loop."""

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
    opened, string = _open_parts(text, begins)
    if string is not None and (found := _loop_of_string(text, string + 1, len(answer))) is not None:
        return found
    for container in reversed(opened):
        if (found := _loop_of_items(text, container, len(answer))) is not None:
            return found
    return None


def _open_parts(text: str, begins: int) -> tuple[list[_Container], int | None]:
    """The lists and objects that are open at the end of a text, and where an open string begins."""
    opened: list[_Container] = []
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
    said = [text[begin:end].strip() for begin, end in container.items]
    begun = text[container.begins :].strip()
    for length in range(1, _LONGEST_CYCLE + 1):
        cycle = said[-length:]
        if len(cycle) < length or not cycle[0].startswith(begun):
            continue
        first = len(said) - length
        while first > 0 and said[first - 1] == said[first - 1 + length]:
            first -= 1
        missing = _times_of_items(cycle) - (len(said) - first) // length
        ends = [end for _, end in container.items[first + length - 1 :] if end >= committed]
        if missing > 1 or not ends:
            continue
        repeated = ", ".join(said[first : first + length])
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
    if letters < _LETTERS:
        return SHORT_ITEM_TIMES
    return ITEM_TIMES if len(cycle) == 1 else CYCLE_TIMES


# ── strings ──────────────────────────────────────────────────────────────────────────────────────


def _loop_of_string(text: str, begins: int, committed: int) -> ValueLoop | None:
    content = text[max(begins, len(text) - _SEARCHED) :]
    offset = len(text) - len(content)
    for length in range(1, min(_LONGEST_STRETCH, len(content) // 2) + 1):
        covered = _covered(content, length)
        if covered + 1 < _needed(content[-length:]) or _is_repeated(content[-length:]):
            continue
        first = offset + len(content) - covered
        end = _end_of_saying(text, max(first + length - 2, committed), length)
        kept = _without_half_escape(text[begins:end].rstrip(_SEPARATORS))
        said = text[first : first + length].strip(_SEPARATORS)
        return ValueLoop(said, text[committed : max(committed, begins + len(kept))], '"')
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


def _end_of_saying(text: str, at: int, length: int) -> int:
    """Where what is said once is over: in front of a comma or behind a full stop, else between two words."""
    window = range(at, min(at + length + 1, len(text)))
    for place in window:
        if text[place] in _STOPS:
            return place + 1
        if text[place] in ",;|":
            return place
    return next((place for place in window if text[place].isspace()), at)


def _without_half_escape(content: str) -> str:
    found = _ESCAPE_CUT.search(content)
    return content[: found.start(1)] if found else content
