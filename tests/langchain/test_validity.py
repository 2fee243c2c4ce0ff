"""Fifty structured values and fifty forced calls of the demo ensemble: each one fits its schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import validate
from langchain_core.messages import HumanMessage, SystemMessage

from langchain_specfuse import ChatSpecFuse
from specfuse_shared import EnsembleEngine

TEXT = {"type": "string"}
ZIP = {"type": "string", "pattern": "^[0-9]{5}$"}
SCHEMAS: list[dict[str, Any]] = [
    {"properties": {"name": TEXT, "age": {"type": "integer"}, "city": TEXT}, "required": ["name", "age", "city"]},
    {"properties": {"name": TEXT, "email": TEXT, "phone": {"type": ["string", "null"]}}, "required": ["name"]},
    {
        "properties": {"kind": {"enum": ["guest", "visitor", "école"]}, "since": {"type": "string", "format": "date"}},
        "required": ["kind", "since"],
    },
    {
        "properties": {
            "items": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"label": TEXT, "price": {"type": "number"}},
                    "required": ["label"],
                },
                "maxItems": 3,
            }
        },
        "required": ["items"],
    },
    {
        "properties": {
            "answer": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/range"}, TEXT]},
            "place": {"type": "object", "properties": {"street": TEXT, "zip": ZIP}},
        },
        "required": ["answer", "place"],
        "$defs": {"range": {"type": "object", "properties": {"low": {"type": "integer"}}, "required": ["low"]}},
    },
]  # fmt: skip
TEXTS = [
    "Zoë Müller, 34, of Köln (zoe@example.org) booked two tents for 12.50 each on 3 May 2024.",
    "The observatory opens at seven; tickets cost 9 euros, children under six enter free.",
    "北京的张伟 ordered three books and a lamp. Call him on +49 221 5550.",
    "Is the road to 50667 Domstraße closed? Between 10 and 20 cars were seen.",
    "No details are known.",
    'He said "stop", then wrote C:\\temp\\x and left {"a": 1}.',
    "Anna and Ben, visitors since 2019, live at 12 Hill Street.",
    "🎉 Party! Tickets: 5, 10 or 15.",
    "The report lists 1,204 items, of which none was sold.",
    "Mr. O'Neil (61) complained about the price.",
]


def schema_of(number: int) -> dict[str, Any]:
    return {"title": f"Record{number % len(SCHEMAS)}", "type": "object", **SCHEMAS[number % len(SCHEMAS)]}


pytestmark = pytest.mark.filterwarnings("ignore::specfuse_shared.ClosedValueWarning")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_extractions_and_fifty_forced_calls_are_all_valid(demo_engine: EnsembleEngine) -> None:
    model, valid = ChatSpecFuse(engine=demo_engine, max_tokens=48), 0
    for number in range(len(SCHEMAS)):
        schema = schema_of(number)
        extract = model.bind(response_format=schema)
        for value in extract.batch([f"Extract the record: {text}" for text in TEXTS]):
            validate(json.loads(str(value.content)), schema)
            valid += 1
        tool = {
            "type": "function",
            "function": {"name": schema["title"], "description": "Files.", "parameters": schema},
        }
        file = model.bind_tools([tool], tool_choice="any")
        for called in file.batch([f"File this record: {text}" for text in TEXTS]):
            [call] = called.tool_calls
            assert call["name"] == schema["title"]
            validate(call["args"], schema)
            valid += 1
    assert valid == 100


CHOICES = [{"const": "almanac", "description": "Dates."}, {"const": "barometer", "description": "The weather."}]
LISTS = [
    ({"anyOf": CHOICES}, "Choose the tools that answer the question, the best one first.", "Which day is it today?"),
    (TEXT, "Note what the guest asks for.", "A window seat, window seat, please. Window."),
]
"""The prompt of a middleware that selects tools, and one of a guest with repetitions."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tokens", [48, 160])
@pytest.mark.parametrize(("item", "instruction", "question"), LISTS)
def test_a_repetitive_list_ends_after_its_first_copy(
    demo_engine: EnsembleEngine, item: dict[str, Any], instruction: str, question: str, tokens: int
) -> None:
    listed = {"type": "array", "items": item}
    schema = {"title": "Chosen", "type": "object", "properties": {"chosen": listed}, "required": ["chosen"]}
    model = ChatSpecFuse(engine=demo_engine, max_tokens=tokens).with_structured_output(schema)
    text = model.invoke([SystemMessage(instruction), HumanMessage(question)])
    assert isinstance(text, dict)
    assert len(text["chosen"]) <= max(3, 2 * len(set(text["chosen"])))
