"""Checks of settings: an error names the wrong value, the expected one and the nearest valid name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Self, Union, cast, get_args, get_origin, get_type_hints

from specfuse_shared.errors import ConfigError


class Settings:
    """Base of frozen dataclasses that may be built from a mapping; it names unknown keys."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for key in data:
            if key not in names:
                raise unknown_setting(cls.__name__, key, names)
        for f in fields(cls):  # type: ignore[arg-type]
            if f.default is MISSING and f.default_factory is MISSING and f.name not in data:
                raise ConfigError(f"{cls.__name__} has no {f.name}: give one")
        return cls(**data)

    def check_types(self) -> None:
        """Raises `ConfigError` for a setting whose value is of another type than its annotation says."""
        for name, kinds in plain_types(cast("Any", type(self))).items():
            check_type(f"{type(self).__name__}.{name}", getattr(self, name), kinds)


_KINDS: dict[type, tuple[Any, str]] = {
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    str: (str, "a text"),
    bool: (bool, "True or False"),
    NoneType: (NoneType, "None"),
}
"""Plain types: which values pass, and how an error names the type."""


@cache
def plain_types(owner: Any) -> Mapping[str, tuple[type, ...]]:
    """The fields of a dataclass and their plain types; none for a field that `owner` checks itself."""
    return {name: _plain_kinds(hint) for name, hint in get_type_hints(owner).items()}


def check_type(what: str, value: Any, kinds: tuple[type, ...]) -> None:
    """Raises `ConfigError` if `value` is of none of the plain types; no types mean that anything passes."""
    accepted = [kind for kind in kinds if isinstance(value, _KINDS[kind][0])]
    if not kinds or (accepted and not (isinstance(value, bool) and bool not in kinds)):
        return
    raise ConfigError(f"{what} must be {' or '.join(_KINDS[kind][1] for kind in kinds)}, not {value!r}")


def _plain_kinds(hint: Any) -> tuple[type, ...]:
    """The plain types of an annotation; none if it admits others, too."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(kinds) if all(kind in _KINDS for kind in kinds) else ()


def unknown_setting(owner: str, key: str, names: Sequence[str]) -> ConfigError:
    """The error of a setting that `owner` does not have; it names the nearest one, or all."""
    listing = f"known: {', '.join(names)}"
    return ConfigError(f"{owner} has no setting {key!r}: {_hint(key, names, listing)}")


def check_choice(what: str, value: Any, choices: Sequence[str]) -> None:
    """Raises `ConfigError` if `value` is none of the choices."""
    if value not in choices:
        listing = f"use one of {', '.join(map(repr, choices))}"
        raise ConfigError(f"{what} is {value!r}: {_hint(str(value), choices, listing)}")


def check(condition: bool, message: str) -> None:
    """Raises `ConfigError` with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def parsed_json(text: str) -> Any:
    """The value of a JSON text from outside. Raises `ValueError` for anything invalid.

    That is also what `json.loads` lets through (NaN, halves of surrogate pairs), or answers with other errors
    (nesting, numbers of thousands of digits).
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if not is_whole_text(json.dumps(value, ensure_ascii=False)):
            raise ValueError("it holds half a character (a lone surrogate)")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def is_whole_text(text: str) -> bool:
    """Whether the text can be encoded: it contains no lone half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _hint(value: str, choices: Sequence[str], otherwise: str) -> str:
    similar = difflib.get_close_matches(value, choices, 1)
    return f"did you mean {similar[0]!r}?" if similar else otherwise
