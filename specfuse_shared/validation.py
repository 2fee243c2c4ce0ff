"""How settings are checked: what is wrong is named, with what was expected and the nearest right name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Self

from specfuse_shared.errors import ConfigError


class Settings:
    """Base of frozen dataclasses that may be built from a mapping; it names unknown keys."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for key in data:
            if key not in known:
                raise unknown_setting(cls.__name__, key, known)
        for f in fields(cls):  # type: ignore[arg-type]
            if f.default is MISSING and f.default_factory is MISSING and f.name not in data:
                raise ConfigError(f"{cls.__name__} has no {f.name}: give one")
        return cls(**data)


def unknown_setting(owner: str, key: str, known: Sequence[str]) -> ConfigError:
    """The error of a setting that `owner` does not have; it names the nearest one, or all."""
    every = f"known: {', '.join(known)}"
    return ConfigError(f"{owner} has no setting {key!r}: {_hint(key, known, every)}")


def check_choice(what: str, value: Any, choices: Sequence[str]) -> None:
    """Raises `ConfigError` if `value` is none of the choices."""
    if value not in choices:
        every = f"use one of {', '.join(map(repr, choices))}"
        raise ConfigError(f"{what} is {value!r}: {_hint(str(value), choices, every)}")


def check(condition: bool, message: str) -> None:
    """Raises `ConfigError` with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def parsed_json(text: str) -> Any:
    """The value of a JSON text from outside. Raises `ValueError` for whatever is wrong with it.

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
    """Whether the text can be encoded: no half of a surrogate pair stands in it by itself."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _hint(value: str, known: Sequence[str], otherwise: str) -> str:
    near = difflib.get_close_matches(value, known, 1)
    return f"did you mean {near[0]!r}?" if near else otherwise
