"""Marks of turns that a chat template writes as plain text ("### Assistant:", "[/INST]"), which any text can hold.

Templates with control tokens need none of this: text never becomes a control token. Where all that stands between two
messages is text, a message could go on as the next turn. So every such mark inside a message is broken by a backslash
behind its first character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_LINE_START, _LINE_END = r"^[^\S\n]*", r"[^\S\n]*$"
_WORDS_ONLY = re.compile(r"[\w\s]*")


class TurnMarks:
    """The marks of one template. `borders`: what it writes in front of the texts of a conversation, and at the end.

    `has_control`: whether a text holds control tokens; `without_control`: the text around them.
    """

    def __init__(
        self, borders: Sequence[str], has_control: Callable[[str], bool], without_control: Callable[[str], list[str]]
    ) -> None:
        plain = [text for text in borders[1:] if text.strip() and not has_control(text)]
        # where one border is text, marks that stand beside control tokens elsewhere look like turns, too
        others = [part for text in borders if has_control(text) for part in without_control(text)] if plain else []
        patterns = {pattern for text in plain for pattern in _patterns(text)}
        patterns |= {pattern for text in others for pattern in _patterns(text) if not _WORDS_ONLY.fullmatch(text)}
        longest_first = sorted(patterns, key=lambda pattern: (-len(pattern), pattern))
        self._search = re.compile("|".join(longest_first), re.MULTILINE) if patterns else None

    def broken(self, text: str) -> str:
        """The text with every mark in it broken."""
        return text if self._search is None else self._search.sub(_break, text)


def _patterns(text: str) -> list[str]:
    """Finds each line of a border: one that begins a line there only where it begins one, a mere word only alone."""
    lines = text.split("\n")
    found = []
    for number, line in enumerate(lines):
        if not (mark := line.strip()):
            continue
        begins, ends = number > 0, number < len(lines) - 1
        alone = ends and bool(_WORDS_ONLY.fullmatch(mark))
        whole = re.escape(mark) + (_LINE_END if alone else "")
        found.append(f"{_LINE_START}(?i:{whole})" if begins or alone else whole)
    return found


def _break(match: re.Match[str]) -> str:
    text = match[0]
    first = len(text) - len(text.lstrip()) + 1
    return f"{text[:first]}\\{text[first:]}"
