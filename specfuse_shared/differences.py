"""What answers to one question say otherwise than each other: numbers and names first, then other words.

A number, name or longer word of an answer is a difference if another answer lacks it. The server's page has the same
rules (`api_server/static/each.js`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_WORD = re.compile(r"[^\W_]+(?:[.,:'’\-][^\W_]+)*")
_SENTENCE_ENDS = re.compile(r"[.!?:\n]")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_I = re.compile(r"I['’]")
_LONG = 4
"""Characters of a word that counts: shorter ones are mostly grammar."""

Kind = Literal["number", "name", "word"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Characters `start` to `end` of an answer, which another answer lacks."""

    start: int
    end: int
    kind: Kind


def differences_of(texts: Sequence[str]) -> list[tuple[Difference, ...]]:
    """For each text its differences to the others, in their order in the text."""
    words = [list(_WORD.finditer(text)) for text in texts]
    said = [{_key(word[0]) for word in own} for own in words]
    found = []
    for number, (text, own) in enumerate(zip(texts, words, strict=True)):
        others = said[:number] + said[number + 1 :]
        ends = [0, *(word.end() for word in own)]
        lacking = [
            (word, _kind(word[0], word is own[0] or _SENTENCE_ENDS.search(text, end, word.start()) is not None))
            for word, end in zip(own, ends, strict=False)
            if any(_key(word[0]) not in other for other in others)
        ]
        found.append(tuple(Difference(word.start(), word.end(), kind) for word, kind in lacking if kind is not None))
    return found


def _key(word: str) -> str:
    return _THOUSANDS.sub("", word).casefold()


def _kind(word: str, begins: bool) -> Kind | None:
    """A word with a digit is a number; one with a capital is a name, unless it `begins` a sentence."""
    if any(character.isdecimal() for character in word):
        return "number"
    capitals = word[1:] if begins else word
    if len(word) > 1 and any(character.isupper() for character in capitals) and not _I.match(word):
        return "name"
    return "word" if len(word) >= _LONG else None
