"""What the members are told about a JSON schema: names, descriptions and formats.

Types and choices are left to the grammar, which offers nothing else when it comes to them: small models that read a
list of choices beforehand copy its first (docs/experiments.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specfuse_shared.messages import Message

_TOLD = ("description", "format")
_BRANCHES = ("allOf", "anyOf", "oneOf", "prefixItems")
_INSIDE = ("items", "additionalProperties")

_KEYS_ASKED_FOR = "Answer with a JSON object that has the keys that were asked for."


def schema_request(schema: Mapping[str, Any]) -> Message | None:
    """Asks for a value of the schema, its fields a line each; None for a schema that names and describes nothing.

    Of an object without fields (OpenAI's JSON mode) the user has said which, and small models do better reminded.
    """
    fields = list(_fields(schema, schema, "", ()))
    about = _about(schema, schema)
    if not fields and not about:
        is_open = schema.get("type") == "object" and "properties" not in schema
        return Message("system", _KEYS_ASKED_FOR) if is_open else None
    asked = "Answer in JSON with these fields:" if fields else "Answer in JSON."
    return Message("system", "\n".join([*([about] if about else []), asked, *fields]))


def _fields(schema: Any, whole: Mapping[str, Any], indent: str, seen: tuple[str, ...]) -> Iterator[str]:
    """The fields of all objects that a value may be or hold; one that holds itself is opened once."""
    if not isinstance(schema, Mapping):
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        yield from _fields(_target(reference, whole), whole, indent, (*seen, reference))
    properties = schema.get("properties")
    for name, field in properties.items() if isinstance(properties, Mapping) else ():
        about = _about(field, whole)
        yield f"{indent}- {name}: {about}" if about else f"{indent}- {name}"
        yield from _fields(field, whole, indent + "  ", seen)
    for branch in _branches(schema):
        yield from _fields(branch, whole, indent, seen)
    for key in _INSIDE:
        yield from _fields(schema.get(key), whole, indent, seen)


def _about(schema: Any, whole: Mapping[str, Any]) -> str:
    """Description and format; if it has none, those of what it refers to and of its branches (`date | None`)."""
    if not isinstance(schema, Mapping):
        return ""
    told = [str(schema[key]) for key in _TOLD if schema.get(key)]
    if told:
        return ", ".join(told)
    reference = schema.get("$ref")
    targets = [_target(reference, whole)] if isinstance(reference, str) else []
    plain = [part for part in (*targets, *_branches(schema)) if isinstance(part, Mapping) and "$ref" not in part]
    return ", ".join(dict.fromkeys(filter(None, (_about(part, whole) for part in plain))))


def _branches(schema: Mapping[str, Any]) -> list[Any]:
    """What a value is one or all of."""
    return [part for key in _BRANCHES if isinstance(schema.get(key), list) for part in schema[key]]


def _target(reference: str, whole: Mapping[str, Any]) -> Any:
    """What a reference within the schema names ("#/$defs/Person"); None if it names nothing."""
    found: Any = whole
    for key in reference.removeprefix("#").split("/")[1:]:
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if reference.startswith("#") else None
