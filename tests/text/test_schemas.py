"""The prompt contains the parts of a schema that a grammar cannot express, and no text that members might copy."""

from __future__ import annotations

from datetime import date
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from specfuse_shared import Grammar
from specfuse_shared.errors import GrammarError
from specfuse_shared.text.chat_template import PromptEncoder
from specfuse_shared.text.grammars.constraint import AnswerConstraint
from specfuse_shared.text.grammars.grammar import MOST_FIELDS, schema_request
from tests.support.tiny import byte_level_tokenizer


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


def described(schema: dict[str, Any]) -> str | None:
    message = schema_request(schema)
    return message.content if message else None


def test_every_field_is_named_with_its_description_and_format_and_no_choice_is_listed() -> None:
    assert described(Event.model_json_schema()) == "\n".join(
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
def test_the_request_of_any_schema_is_text_or_none(schema: dict[str, Any], expected: str | None) -> None:
    assert described(schema) == expected


def test_definitions_that_refer_to_each_other_are_opened_once_each() -> None:
    names = [f"a{n}" for n in range(9)]
    defs = {name: {"properties": {f"{name} to {to}": {"$ref": f"#/$defs/{to}"} for to in names}} for name in names}
    request = described({"$ref": "#/$defs/a0", "$defs": defs})
    assert request is not None
    assert request.count("\n") == len(names) ** 2


def test_the_request_names_the_first_fields_of_a_very_large_schema() -> None:
    request = described({"properties": {f"field {n}": {} for n in range(MOST_FIELDS + 100)}})
    assert request is not None
    assert request.count("\n") == MOST_FIELDS


def test_a_schema_that_is_too_large_is_refused() -> None:
    with pytest.raises(GrammarError, match="values"):
        schema_request({"enum": [*range(100_000)]})


TEXT = {"type": "string"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"id": TEXT}, "required": ["id"], "anyOf": [{"properties": {"to": TEXT}}]},
        {"properties": {"id": TEXT}, "$ref": "#/$defs/to", "$defs": {"to": {"properties": {"to": TEXT}}}},
        {"properties": {"id": TEXT}, "anyOf": [{"$ref": "#/$defs/to"}], "$defs": {"to": {"properties": {"to": TEXT}}}},
        {"allOf": [{"properties": {"id": TEXT}}, {"properties": {"to": TEXT}}]},
    ],
)
def test_properties_with_alternatives_and_references_do_not_exclude_each_other(schema: dict[str, Any]) -> None:
    assert is_value(schema, '{"id": "a", "to": "b"}')
    assert not is_value(schema, '{"id": 1, "to": "b"}')


def test_alternatives_that_name_no_property_leave_an_object_closed() -> None:
    schema = {"properties": {"a": TEXT, "b": TEXT}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    assert is_value(schema, '{"a": "x"}')
    assert not is_value(schema, '{"a": "x", "c": "x"}')
    assert not is_value(schema, "{}")


def test_the_error_of_a_strict_oneof_names_a_remedy() -> None:
    with pytest.raises(GrammarError, match="strict=False reads it as anyOf"):
        Grammar.json_schema({"oneOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 3}]})


def is_value(schema: dict[str, Any], text: str) -> bool:
    codec = PromptEncoder(byte_level_tokenizer(), None, {}, "tiny").codec
    return AnswerConstraint(Grammar.json_schema(schema), codec, 200).is_value(text)
