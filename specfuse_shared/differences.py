"""What texts say otherwise than each other: numbers and names first, then other words.

A number, name or longer word of an answer is a difference if another answer lacks it. The server's page has the same
rules (`api_server/static/each.js`).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_SIGN = r"(?:(?<![^\W_])[-\u2212](?=\d))?"
_WORD = re.compile(rf"{_SIGN}[^\W_]+(?:[.,:'’\-][^\W_]+)*")
UNSPACED = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Chinese and Japanese characters, as a part of a class of a regular expression."""
_LETTERS = rf"(?:(?![{UNSPACED}])[^\W_])+"
_SINGLE_WORD = re.compile(rf"{_SIGN}{_LETTERS}(?:[.,:'’\-]{_LETTERS})*|[{UNSPACED}]|[+=×÷%°$€£]|[-*/\u2212](?=\s?\d)")
"""Words as above; each character of scripts without spaces, and each sign of a sum, is a word of its own."""
_SENTENCE_ENDS = re.compile(r"[.!?:\n]")
_QUOTED = re.compile(r'"[^"\n]{1,80}"|“[^”\n]{1,80}”|„[^“”\n]{1,80}[“”]|«[^»\n]{1,80}»')
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_DIGIT = re.compile(r"\d")
_WITHIN = re.compile(r"[.,:'’\-]")
_I = re.compile(r"I['’]")
LONG = 4
"""Characters of a word that counts: shorter ones are mostly grammar."""

Kind = Literal["number", "name", "word"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Characters `start` to `end` of an answer, which another answer lacks."""

    start: int
    end: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a text. `key`: what it says, without case and marks. `kind`: None for a short one."""

    start: int
    end: int
    key: str
    kind: Kind | None


def words_of(text: str, since: int = 0, *, single: bool = False) -> list[Word]:
    """Those that begin at `since` or behind it, in their order. `single`: characters of scripts without spaces, and
    signs of a sum, are words of their own."""
    matches = list((_SINGLE_WORD if single else _WORD).finditer(text))
    ends = [0, *(match.end() for match in matches)]
    quotes = deque(match.span() for match in _QUOTED.finditer(text))
    found: list[Word] = []
    for match, end in zip(matches, ends, strict=False):
        if match.start() < since:
            continue
        while quotes and quotes[0][1] <= match.start():
            quotes.popleft()
        begins = match is matches[0] or _SENTENCE_ENDS.search(text, end, match.start()) is not None
        in_quotes = bool(quotes) and quotes[0][0] < match.start()
        found.append(Word(match.start(), match.end(), _key(match[0]), _kind(match[0], begins, in_quotes)))
    return found


def differences_of(texts: Sequence[str]) -> list[tuple[Difference, ...]]:
    """For each text its differences to the others, in their order in the text."""
    words = [words_of(text) for text in texts]
    said = [{word.key for word in own} for own in words]
    found = []
    for number, own in enumerate(words):
        others = said[:number] + said[number + 1 :]
        lacking = [word for word in own if any(word.key not in other for other in others)]
        found.append(tuple(Difference(word.start, word.end, word.kind) for word in lacking if word.kind is not None))
    return found


def _key(word: str) -> str:
    if _DIGIT.search(word):
        return _THOUSANDS.sub("", word).replace("\u2212", "-").casefold()
    return _WITHIN.sub("", word).casefold() or word


def _kind(word: str, begins: bool, in_quotes: bool) -> Kind | None:
    """A word with a digit is a number; one with a capital is a name, unless it `begins` a sentence; so is a quoted one
    that is long enough."""
    if _DIGIT.search(word):
        return "number"
    capitals = word[1:] if begins else word
    if len(word) > 1 and not capitals.islower() and any(map(str.isupper, capitals)) and not _I.match(word):
        return "name"
    if len(word) < LONG:
        return None
    return "name" if in_quotes else "word"
