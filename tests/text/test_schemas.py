"""What the members are told about a schema: all that the grammar cannot say, and nothing that they would copy."""

from __future__ import annotations

from datetime import date
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from specfuse_shared.errors import GrammarError
from specfuse_shared.text.grammars.schemas import MOST_FIELDS, schema_request


class Place(BaseModel):
    """Where something is."""

    city: str
    code: int | None = Field(default=None, description="its postal code")


class Event(BaseModel):
    """An event of the calendar."""

    title: str = Field(description="in a few words")
    day: date | None = None
    kind: Literal["fair", "concert"]
    places: list[Place]
    before: Event | None = None


def told(schema: dict[str, Any]) -> str | None:
    message = schema_request(schema)
    return message and message.content


def test_every_field_is_named_with_its_description_and_format_and_no_choice_is_listed() -> None:
    assert told(Event.model_json_schema()) == "\n".join(
        [
            "An event of the calendar.",
            "Answer in JSON with these fields:",
            "- title: in a few words",
            "- day: date",
            "- kind",
            "- places",
            "  - city",
            "  - code: its postal code",
            "- before",
        ]
    )


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({}, None),
        ({"type": "object"}, "Answer with a JSON object that has the keys that were asked for."),
        ({"type": "object", "properties": {}}, None),
        ({"enum": ["a", "b"]}, None),
        ({"$ref": "#/$defs/Nothing"}, None),
        ({"$ref": "https://example.org/schema"}, None),
        ({"properties": True, "items": [1], "anyOf": "x"}, None),
        (
            {"type": "array", "items": {"type": "string"}, "description": "names of birds"},
            "names of birds\nAnswer in JSON.",
        ),
        (
            {"type": "array", "items": {"properties": {"bird": {}}}},
            "Answer in JSON with these fields:\n- bird",
        ),
        (
            {
                "oneOf": [{"$ref": "#/$defs/a~1b"}, {"properties": {"y": {"format": "time"}}}],
                "$defs": {"a/b": {"properties": {"x": {}}}},
            },
            "Answer in JSON with these fields:\n- x\n- y: time",
        ),
        (
            {"additionalProperties": {"type": "string", "format": "date"}, "description": "a day for each name"},
            "a day for each name\nAnswer in JSON.",
        ),
    ],
)
def test_any_schema_has_something_to_tell_or_nothing(schema: dict[str, Any], expected: str | None) -> None:
    assert told(schema) == expected


def test_definitions_that_refer_to_each_other_are_opened_once_each() -> None:
    names = [f"a{n}" for n in range(9)]
    defs = {name: {"properties": {f"{name} to {to}": {"$ref": f"#/$defs/{to}"} for to in names}} for name in names}
    asked = told({"$ref": "#/$defs/a0", "$defs": defs})
    assert asked is not None
    assert asked.count("\n") == len(names) ** 2


def test_of_very_many_fields_the_members_are_told_the_first_ones() -> None:
    asked = told({"properties": {f"field {n}": {} for n in range(MOST_FIELDS + 100)}})
    assert asked is not None
    assert asked.count("\n") == MOST_FIELDS


def test_a_schema_that_is_too_large_is_refused() -> None:
    with pytest.raises(GrammarError, match="values"):
        schema_request({"enum": [*range(100_000)]})
