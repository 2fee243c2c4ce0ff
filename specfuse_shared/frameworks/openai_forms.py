"""What OpenAI's API calls a tool choice and a response format, in the engine's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specfuse_shared.errors import ConfigError
from specfuse_shared.messages import Message
from specfuse_shared.text.grammars.grammar import Grammar
from specfuse_shared.text.grammars.schemas import schema_request

RESPONSE_FORMATS = ("text", "json_object", "json_schema")


def response_schema(response_format: Mapping[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """The JSON schema of a response format, None for plain text, and whether it must be enforced to the letter.

    Raises `ConfigError` for a type that is none of `RESPONSE_FORMATS`.
    """
    kind = response_format.get("type")
    if kind == "text":
        return None, False
    if kind == "json_object":
        return {"type": "object"}, False
    if kind != "json_schema":
        raise ConfigError(f"response_format is of type {kind!r}: use one of {', '.join(map(repr, RESPONSE_FORMATS))}")
    spec = response_format.get("json_schema")
    if not isinstance(spec, Mapping) or not isinstance(spec.get("schema", spec), Mapping):
        raise ConfigError('response_format of type "json_schema" needs {"json_schema": {"schema": {…}}}')
    return dict(spec.get("schema", spec)), bool(spec.get("strict"))


def value_of(
    schema: Mapping[str, Any] | None, strict: bool, shown: bool = True
) -> tuple[Grammar | None, list[Message]]:
    """The grammar of a response format's values, and what the members are told about them if it is `shown`."""
    if schema is None:
        return None, []
    told = schema_request(schema) if shown else None
    return Grammar.json_schema(schema, strict=strict), [told] if told else []
