"""Checks of settings: an error names the wrong value, the expected one and the nearest valid name."""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from types import NoneType
from typing import Any, Self, TypeVar, dataclass_transform, get_args, get_type_hints

from pydantic import ConfigDict, GetPydanticSchema, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import core_schema

from specfuse_shared.errors import ConfigError, SpecFuseError

S = TypeVar("S", bound="Settings")


class Settings:
    """Base of `validated` classes: they may be built from a mapping."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{str(name): value for name, value in data.items()})


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def validated(kind: type[S]) -> type[S]:
    """Make a class a frozen dataclass. pydantic checks its fields strictly, and errors are `ConfigError`s."""
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
    made: Any = dataclass(kind, frozen=True, slots=True, config=config)
    validate = made.__init__

    def __init__(self: S, *args: Any, **values: Any) -> None:
        try:
            validate(self, *args, **values)
        except ValidationError as error:
            raise own_error(error) or _setting_error(made, error) from None

    made.__init__ = __init__
    return made  # type: ignore[no-any-return]


def tuple_of(kind: Any) -> GetPydanticSchema:
    """In `Annotated`: a list of values of a kind becomes a tuple."""
    return GetPydanticSchema(
        lambda _, handler: core_schema.tuple_schema(
            [handler.generate_schema(kind)], variadic_item_index=0, strict=False
        )
    )


def listed(value: Any) -> Any:
    """One text or number as a list of one, and None as an empty list."""
    return (value,) if isinstance(value, (str, int, float)) else () if value is None else value


def own_error(error: ValidationError) -> SpecFuseError | None:
    """The error of this package that pydantic wrapped, if there is one."""
    causes = (detail.get("ctx", {}).get("error") for detail in error.errors(include_url=False))
    return next((cause for cause in causes if isinstance(cause, SpecFuseError)), None)


_EXPECTED = {
    "int_type": "be a whole number",
    "float_type": "be a number",
    "string_type": "be a text",
    "bool_type": "be True or False",
    "tuple_type": "be a list",
    "dict_type": "be a table of names and values",
    "is_instance_of": "be a {class}",
    "greater_than": "be above {gt:g}",
    "greater_than_equal": "be at least {ge:g}",
    "less_than_equal": "be at most {le:g}",
}
"""pydantic's types of errors, and how ours end: "it must …"."""


def _setting_error(owner: Any, error: ValidationError) -> ConfigError:
    """pydantic's first error as a `ConfigError`; an unknown name comes first."""
    detail: Any = min(error.errors(include_url=False), key=lambda each: each["type"] != "unexpected_keyword_argument")
    kind, (name, *place), value, message = (detail[key] for key in ("type", "loc", "input", "msg"))
    names = [f.name for f in fields(owner)]
    name = dict(enumerate(names)).get(name, name)  # the number of a positional argument
    what = f"{owner.__name__}.{name}"
    if kind == "unexpected_keyword_argument":
        return unknown_setting(owner.__name__, name, names)
    if kind == "missing":
        return ConfigError(f"{owner.__name__} has no {name}: give one")
    if kind == "literal_error":
        return _wrong_choice(what, value, re.findall("'(.*?)'", detail["ctx"]["expected"]))
    if " should " not in message:  # two values for a field, or more values than fields
        return ConfigError(f"{what}: {message[0].lower()}{message[1:]}")
    what += "".join(f"[{part!r}]" for part in place)
    expected = _expected(owner, name, detail) + " or None" * (not place and _may_be_none(owner, name))
    # other objects may be long, or hold a password
    shown = reprlib.repr(value) if isinstance(value, (str, int, float, NoneType)) else type(value).__name__
    return ConfigError(f"{what} must {expected}" + f", not {shown}" * (", not " not in expected))


def _expected(owner: Any, name: str, detail: dict[str, Any]) -> str:
    """The end of "it must …"."""
    bounds = owner.__pydantic_fields__[name].metadata
    limits = {limit: getattr(bound, limit) for bound in bounds for limit in ("ge", "le") if hasattr(bound, limit)}
    if detail["type"] in ("greater_than_equal", "less_than_equal") and len(limits) == 2:
        return "be between {ge} and {le}".format(**limits)
    words: str = detail["msg"].partition(" should ")[2].replace(" after validation", "")
    return _EXPECTED.get(detail["type"], words).format(**detail.get("ctx", {}))


def _may_be_none(owner: Any, name: str) -> bool:
    return NoneType in get_args(get_type_hints(owner)[name])


def unknown_setting(owner: str, key: str, names: Sequence[str]) -> ConfigError:
    """The error of a setting that `owner` does not have; it names the nearest one, or all."""
    listing = f"known: {', '.join(names)}"
    return ConfigError(f"{owner} has no setting {key!r}: {_hint(key, names, listing)}")


def check_choice(what: str, value: Any, choices: Sequence[str]) -> None:
    """Raises `ConfigError` if `value` is none of the choices."""
    if value not in choices:
        raise _wrong_choice(what, value, choices)


def _wrong_choice(what: str, value: Any, choices: Sequence[str]) -> ConfigError:
    listing = f"use one of {', '.join(map(repr, choices))}"
    return ConfigError(f"{what} is {value!r}: {_hint(str(value), choices, listing)}")


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
