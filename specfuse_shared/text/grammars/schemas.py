"""What the members are told about a JSON schema: names, descriptions and formats.

Types and choices are left to the grammar, which offers nothing else when it comes to them: small models that read a
list of choices beforehand copy its first (docs/experiments.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from specfuse_shared.messages import Message
from specfuse_shared.text.grammars.bounds import check_schema, target_of

MOST_FIELDS = 500
"""Fields that the members are told of; the grammar knows all of them."""
_TOLD = ("description", "format")
_BRANCHES = ("allOf", "anyOf", "oneOf", "prefixItems")
_INSIDE = ("items", "additionalProperties")

_KEYS_ASKED_FOR = "Answer with a JSON object that has the keys that were asked for."


def schema_request(schema: Mapping[str, Any]) -> Message | None:
    """Asks for a value of the schema, its fields a line each; None for a schema that names and describes nothing.

    Of an object without fields (OpenAI's JSON mode) the user has said which, and small models do better reminded.
    Raises `GrammarError` for a schema that is too large.
    """
    check_schema(schema)
    reader = _Reader(schema)
    fields, about = list(islice(reader.fields(), MOST_FIELDS)), reader.about(schema)
    if not fields and not about:
        is_open = schema.get("type") == "object" and "properties" not in schema
        return Message("system", _KEYS_ASKED_FOR) if is_open else None
    asked = "Answer in JSON with these fields:" if fields else "Answer in JSON."
    return Message("system", "\n".join([*([about] if about else []), asked, *fields]))


class _Reader:
    """Reads one schema. Every reference is opened once, where it comes first, and every part is described once."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._opened: set[str] = set()
        self._abouts: dict[int, str] = {}

    def fields(self) -> Iterator[str]:
        """The fields of all objects that a value may be or hold, a line each."""
        left: list[tuple[str | None, Any, str]] = [(None, self._schema, "")]
        while left:
            name, schema, indent = left.pop()
            if name is not None:
                about = self.about(schema)
                yield f"{indent}- {name}: {about}" if about else f"{indent}- {name}"
                indent += "  "
            if isinstance(schema, Mapping):
                left += reversed([(key, part, indent) for key, part in self._inside(schema)])

    def _inside(self, schema: Mapping[str, Any]) -> Iterator[tuple[str | None, Any]]:
        """The parts of a schema, in order; those that are fields with their names."""
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self._opened:
            self._opened.add(reference)
            yield None, target_of(reference, self._schema)
        properties = schema.get("properties")
        yield from properties.items() if isinstance(properties, Mapping) else ()
        for part in (*_branches(schema), *(schema.get(key) for key in _INSIDE)):
            yield None, part

    def about(self, schema: Any) -> str:
        """Description and format; if it has none, those of what it refers to and of its branches (`date | None`)."""
        if not isinstance(schema, Mapping):
            return ""
        if id(schema) not in self._abouts:
            self._abouts[id(schema)] = self._described(schema)
        return self._abouts[id(schema)]

    def _described(self, schema: Mapping[str, Any]) -> str:
        if told := [str(schema[key]) for key in _TOLD if schema.get(key)]:
            return ", ".join(told)
        reference = schema.get("$ref")
        targets = [target_of(reference, self._schema)] if isinstance(reference, str) else []
        plain = [part for part in (*targets, *_branches(schema)) if isinstance(part, Mapping) and "$ref" not in part]
        return ", ".join(dict.fromkeys(filter(None, map(self.about, plain))))


def _branches(schema: Mapping[str, Any]) -> list[Any]:
    """What a value is one or all of."""
    return [part for key in _BRANCHES if isinstance(schema.get(key), list) for part in schema[key]]
