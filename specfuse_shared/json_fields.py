"""The fields of JSON values in a text that may be cut or broken anywhere: their paths and positions.

A value begins with an object, anywhere (also inside a tool call), or with a list at the text's beginning.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[^\s"{}\[\],:]+|[{}\[\],:]', re.DOTALL)
_OBJECT = re.compile(r'\{(?=\s*(?:["}]|\Z))')
_LIST = re.compile(r"\s*\[")
_REST_OF_STRING = re.compile(r'(?:[^"\\]|\\.)*+("?)', re.DOTALL)
_NAME = re.compile(r"[^\W\d]\w*")
DEEPEST = 64
"""Nesting levels that are followed. Deeper values have no path."""
_LONGEST = 200
"""Characters of an incomplete string that are read again when another text continues it."""


class Container(NamedTuple):
    """An object or list that is open. `key`: of the value in it that is written, or that comes next."""

    around: Container | None
    is_object: bool
    key: str | int
    depth: int


class Place(NamedTuple):
    """A position between two tokens: the `expected` kind of token, in which container of the value with this `number`.

    `container` is None outside of values.
    """

    number: int
    container: Container | None
    expected: Literal["value", "key", "colon", "comma"]


OUTSIDE = Place(0, None, "value")


@dataclass(frozen=True, slots=True)
class Field:
    """Characters `start` to `end` hold the value at `path` of the text's JSON value number `value`. `whole`: it is
    surely over there."""

    value: int
    path: str
    start: int
    end: int
    whole: bool


@dataclass(slots=True)
class JsonText:
    """A text that was read, and can be gone on from at any of its places."""

    text: str
    fields: list[Field] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)
    _tokens: list[tuple[int, Place]] = field(default_factory=list)
    """The end of each token, and the place before it."""
    _last: Place | None = OUTSIDE
    """The place at the end; None: the JSON is broken."""
    _indent: int = 0
    """Blanks at the beginning."""

    def __post_init__(self) -> None:
        self._indent = len(self.text) - len(self.text.lstrip())
        for start, end, before, after in _read(self.text, OUTSIDE, 0):
            self._starts.append(start)
            self._tokens.append((end, before))
            self._last = after
            if _is_leaf(self.text[start], before) and before.container is not None:
                is_whole = _is_whole(self.text, start, end)
                self.fields.append(Field(before.number, path_of(before.container), start, end, is_whole))

    def fields_after(self, at: int, draft: str) -> Iterator[tuple[Field, str]]:
        """The fields that `draft` would have written or continued at `at`, each with its text, which lacks the
        beginning of a long string. Positions are those after appending the draft."""
        begun, place, string = self._resumed(at)
        text = self.text[begun:at] + draft
        first = 0
        if string is not None and place is not None and place.container is not None:
            rest = _REST_OF_STRING.match(text)
            assert rest is not None, "it matches nothing at least"
            first = rest.end()
            yield Field(place.number, path_of(place.container), string, begun + first, bool(rest[1])), rest[0]
            place = place._replace(expected="comma")
        if place is None:
            return
        for start, end, before, _ in _read(text, place, first, is_beginning=begun == 0):
            if _is_leaf(text[start], before) and before.container is not None and begun + end > at:
                is_whole = _is_whole(text, start, end)
                path = path_of(before.container)
                yield Field(before.number, path, begun + start, begun + end, is_whole), text[start:end]

    @property
    def whole_values(self) -> int:
        """How many values are over."""
        return self._last.number if self._last is not None else self._tokens[-1][1].number

    def _resumed(self, at: int) -> tuple[int, Place | None, int | None]:
        """From where to read on for a text that leaves this one at `at`, and in which place; where the string began
        whose beginning is left out."""
        index = bisect_left(self._starts, at) - 1
        if index < 0:
            return 0 if at <= self._indent else at, OUTSIDE, None
        start, (end, before) = self._starts[index], self._tokens[index]
        if end > at or (end == at and self.text[start] not in '{}[],:"'):
            if self.text[start] == '"' and at - start > _LONGEST and before.expected == "value":
                preceding = self.text[max(start, at - 40) : at]
                escaped = (len(preceding) - len(preceding.rstrip("\\"))) % 2
                return at - escaped, before, start
            return (start, before, None) if at - start <= _LONGEST else (at, None, None)
        return at, self._tokens[index + 1][1] if index + 1 < len(self._tokens) else self._last, None


def path_of(container: Container) -> str:
    """The path of the value that is written in a container, such as `$.days[0].name`."""
    parts: list[str] = []
    around: Container | None = container
    while around is not None:
        key = around.key
        is_plain = isinstance(key, str) and _NAME.fullmatch(key)
        parts.append(f".{key}" if is_plain else f"[{json.dumps(key, ensure_ascii=False)}]")
        around = around.around
    return "$" + "".join(reversed(parts))


def _read(
    text: str, place: Place, at: int, *, is_beginning: bool = True
) -> Iterator[tuple[int, int, Place, Place | None]]:
    """Start and end of each token of values, and the states before and after it. Broken input ends the reading."""
    while True:
        if place.container is None:
            opened = (_LIST.match(text) if is_beginning and at == 0 else None) or _OBJECT.search(text, at)
            if opened is None:
                return
            at = opened.end() - 1
        token = _TOKEN.search(text, at)
        if token is None:
            return
        before, after = place, _place_after(token[0], place)
        yield token.start(), token.end(), before, after
        if after is None:
            return
        place, at = after, token.end()


def _place_after(token: str, place: Place) -> Place | None:
    """The state after a token, or None if the token is invalid here."""
    number, container, expected = place
    if token in "{[":
        depth = 0 if container is None else container.depth + 1
        if expected != "value" or depth >= DEEPEST:
            return None
        is_object = token == "{"
        inner = Container(container, is_object, "" if is_object else 0, depth)
        return Place(number, inner, "key" if is_object else "value")
    if container is None:
        return None
    if token in "}]":
        if (token == "}") != container.is_object or expected == "colon":
            return None
        return Place(number, container.around, "comma") if container.around else Place(number + 1, None, "value")
    if token == ",":
        if expected != "comma":
            return None
        if container.is_object:
            return Place(number, container, "key")
        return Place(number, container._replace(key=int(container.key) + 1), "value")
    if token == ":":
        return Place(number, container, "value") if expected == "colon" else None
    if expected == "key" and token[0] == '"':
        return Place(number, container._replace(key=_key(token)), "colon")
    return Place(number, container, "comma") if expected == "value" else None


def _is_leaf(first: str, place: Place) -> bool:
    return place.expected == "value" and first not in "{}[],:"


def _is_whole(text: str, start: int, end: int) -> bool:
    """Strings end with their quotes, literals with their last letter, numbers where something follows them."""
    if text[start] == '"':
        return end - start > 1 and text[end - 1] == '"' and parsed(text[start:end]) is not None
    return end < len(text) or text[start:end] in ("true", "false", "null")


def parsed(text: str) -> object | None:
    """A value's text as JSON; None where it is none, or null."""
    try:
        value: object = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value


def _key(token: str) -> str:
    key = parsed(token)
    return key if isinstance(key, str) else token.strip('"')
