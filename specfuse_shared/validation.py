"""How settings are checked: what is wrong is named, with what was expected and the nearest right name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
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


def _hint(value: str, known: Sequence[str], otherwise: str) -> str:
    near = difflib.get_close_matches(value, known, 1)
    return f"did you mean {near[0]!r}?" if near else otherwise
