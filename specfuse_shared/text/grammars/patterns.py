"""Regular expressions with look-ahead as several without, where both take the same strings.

The grammar library reads no look-around. Schemas of Zod and pydantic, and those for passwords, mostly use it at the
beginning, where it says something about the whole string: a second pattern says the same.
"""

from __future__ import annotations

import re

_LOOKS = re.compile(r"\(\?<?[=!]|\\[bB]|\\[1-9]|\\k<")
"""Constructs that the library does not support: look-around, word boundaries, references to groups."""
_CHARACTER = r"(?:\\[.^$*+?()\[\]{}|/\\\-dDwWsS]|\[(?:\\.|[^\]\\])+\]|[^\\.^$*+?()\[\]{}|])"
"""One character of a string: an escape, a class, or the character itself."""
_WORD = re.compile(rf"{_CHARACTER}+")
_NO_OTHERS = re.compile(r"\^?(\[(?:\\.|[^\]\\])+\])\*\$")
_LONGEST_WORD = 40

_DECIMAL = re.compile(
    r"\(\?:\\d\{0,(\d+)\}\|\(\?=\[\\d\.\]\{1,(\d+)\}0\*\$\)\\d(?:\{0,\d+\}|\*)\\\.\\d(?:\{0,(\d+)\}|\*)0\*\$\)$"
)
"""The digits of a `Decimal` in pydantic 2.12 and 2.13: a maximum before the point (or in all), and in all."""
_MOST_DIGITS = 60


def readable_patterns(pattern: str) -> list[str] | None:
    """Patterns that a string matches, all of them, if and only if it matches this one.

    None: it has nothing that the library cannot read, or nothing can be said instead.
    """
    if not pattern.startswith("^") or not _LOOKS.search(pattern):
        return None
    rest, patterns = pattern[1:], list[str]()
    while rest.startswith(("(?=", "(?!")):
        if (end := _end_of_group(rest)) is None:
            return None
        replacement = f"^(?:{rest[3:end]})" if rest[2] == "=" else _without(rest[3:end])
        if replacement is None or _LOOKS.search(replacement):
            return None
        patterns.append(replacement)
        rest = rest[end + 1 :]
    rest = _DECIMAL.sub(_digits, rest)
    if _LOOKS.search(rest) or _has_alternatives(rest):
        return None
    return [*([f"^{rest}"] if rest and rest != ".*" else []), *patterns]


def _end_of_group(text: str) -> int | None:
    """The place of the bracket that closes the one with which a text begins."""
    depth, at, in_class = 0, 0, False
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        else:
            depth += (char == "(") - (char == ")")
            if not depth:
                return at
        at += 1
    return None


def _has_alternatives(pattern: str) -> bool:
    """Whether a bar outside of groups divides it: the text before the bar applies to the first part alone."""
    depth = 0
    for char in re.sub(r"\[[^\]]*\]", "", re.sub(r"\\.", "", pattern)):
        depth += (char == "(") - (char == ")")
        if char == "|" and not depth:
            return True
    return False


def _without(looked: str) -> str | None:
    """A pattern of the strings at whose beginning `looked` does not match; None if it is too involved."""
    if looked == "$":
        return "^(?s:.)"
    if match := _NO_OTHERS.fullmatch(looked):
        return _other_than(match[1])
    anywhere = looked.startswith(".*")
    word = looked.removeprefix(".*")
    if not _WORD.fullmatch(word) or len(word) > _LONGEST_WORD:
        return None
    characters = re.findall(_CHARACTER, word)
    if not anywhere:
        return f"^{_not_beginning(characters)}"
    if len(characters) == 1:
        return f"^{_other_than(characters[0])}*$"
    if len(characters) == 2 and not any(_is_class(each) for each in characters):
        first, second = characters
        if first == second:
            return f"^(?:{_other_than(first)}|{first}{_other_than(first)})*{first}?$"
        return f"^(?:{_other_than(first)}|{first}+{_other_than(first, second)})*{first}*$"
    return None


def _is_class(character: str) -> bool:
    return character.startswith("[") or (character.startswith("\\") and character[1].isalpha())


def _not_beginning(characters: list[str]) -> str:
    first, *rest = characters
    rest_pattern = f"|{first}{_not_beginning(rest)}" if rest else ""
    return f"(?:$|{_other_than(first)}{rest_pattern})"


def _other_than(*characters: str) -> str:
    """A class of all characters but these, each a character or a class."""
    if len(characters) == 1 and characters[0].startswith("["):
        inner = characters[0][1:-1]
        return f"[{inner[1:]}]" if inner.startswith("^") else f"[^{inner}]"
    return f"[^{''.join(each if each.startswith(chr(92)) else re.escape(each) for each in characters)}]"


def _digits(match: re.Match[str]) -> str:
    """The digits of a decimal number, with a maximum before the point and after it."""
    before, whole = int(match[1]), int(match[2]) - 1
    if max(before, whole) > _MOST_DIGITS:
        return match[0]
    if match[3] is not None:
        return rf"\d{{0,{before}}}(?:\.\d{{0,{min(whole, int(match[3]))}}}0*)?$"
    ways = "|".join(rf"\d{{{n}}}\.\d{{0,{whole - n}}}0*" for n in range(whole + 1))
    return rf"(?:\d{{0,{before}}}|{ways})$"
