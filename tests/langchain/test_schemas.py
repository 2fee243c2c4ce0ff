"""Schemas of every form reach the engine unchanged, and values have the types of the schema."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jsonschema import validate
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.tools import StructuredTool, tool
from langchain_core.tools import Tool as SimpleTool
from pydantic import BaseModel, RootModel
from typing_extensions import TypedDict

from langchain_specfuse import ChatSpecFuse
from langchain_specfuse.messages import json_schema_of, schema_tool, to_schema, to_tools
from specfuse_shared import Grammar
from specfuse_shared.errors import ConfigError, GrammarError, RequestError, UnfinishedValueError


class Node(BaseModel):
    """A tree."""

    value: int
    children: list[Node]


class Pair(TypedDict):
    """Two numbers."""

    left: int
    right: int


Steps = RootModel[list[int]]
ARRAY = {"title": "Digits", "type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 3}
MAP = {"title": "Stock", "type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2}
ENUM = {"title": "Colour", "enum": ["rot", "grün"]}
UNTITLED = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
UNBOUNDED = {"type": "object", "title": "U", "properties": {"a": {"type": "array", "uniqueItems": True}}}


# ── as they were given ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schema", [ARRAY, MAP, ENUM, UNTITLED, Node.model_json_schema()])
def test_a_schema_as_a_dictionary_is_unchanged(schema: dict[str, Any]) -> None:
    assert json_schema_of(schema) == schema
    assert to_schema(schema) == (schema, False)


def test_a_recursive_class_keeps_its_recursion() -> None:
    assert json_schema_of(Node) == Node.model_json_schema()
    [as_tool] = to_tools([Node])
    assert (as_tool.name, as_tool.description) == ("Node", "A tree.")
    assert as_tool.parameters == Node.model_json_schema()
    [of_function] = to_tools([tool(plant)])
    assert of_function.parameters["$defs"]["Node"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Node"}


def plant(root: Node) -> str:
    """Plants a tree."""
    return str(root)


@pytest.mark.parametrize("key", ["parameters", "input_schema", "schema"])
def test_the_description_of_a_function_replaces_its_schema(key: str) -> None:
    assert json_schema_of({"name": "N", "description": "d", key: UNTITLED}) == {
        "title": "N",
        "description": "d",
        **UNTITLED,
    }
    wrapped = {"type": "function", "function": {"name": "N", key: UNTITLED}}
    assert json_schema_of(wrapped) == {"title": "N", **UNTITLED}
    assert to_tools([wrapped])[0].parameters == UNTITLED


def test_typed_dicts_and_functions_are_converted() -> None:
    assert json_schema_of(Pair)["properties"] == {"left": {"type": "integer"}, "right": {"type": "integer"}}
    [made] = to_tools([plant])
    assert (made.name, made.description) == ("plant", "Plants a tree.")


def test_a_tool_with_a_dictionary_of_arguments_keeps_it() -> None:
    made = StructuredTool.from_function(plant, name="plant", args_schema=Node.model_json_schema())
    assert to_tools([made])[0].parameters == {**Node.model_json_schema(), "description": "Plants a tree."}


def test_a_tool_of_one_string_has_one_argument() -> None:
    [made] = to_tools([SimpleTool("echo", str, "Says it again.")])
    assert list(made.parameters["properties"]) == ["__arg1"]


# ── values ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schema", [ARRAY, ENUM, UNTITLED])
@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_values_fit_a_schema_given_as_a_dictionary(chat: ChatSpecFuse, schema: dict[str, Any], method: Any) -> None:
    value = chat.with_structured_output(schema, method=method).invoke("Write.", max_tokens=60)
    validate(value, schema)


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_a_value_that_is_cut_is_an_error_with_its_text(chat: ChatSpecFuse, method: Any) -> None:
    with pytest.raises(UnfinishedValueError, match="cut the value after 60 tokens") as error:
        chat.with_structured_output(MAP, method=method).invoke("Write.", max_tokens=60)
    assert error.value.text.startswith("{")


def test_values_fit_a_class_that_contains_itself(chat: ChatSpecFuse) -> None:
    for method in ("json_schema", "function_calling"):
        value = chat.with_structured_output(Node, method=method).invoke("Write.", max_tokens=120)
        assert isinstance(value, Node)


def test_values_fit_a_class_that_is_a_list(chat: ChatSpecFuse) -> None:
    assert type(chat.with_structured_output(Steps).invoke("Write.", max_tokens=60)) is Steps


def test_an_untitled_schema_can_be_called(chat: ChatSpecFuse) -> None:
    value = chat.with_structured_output(UNTITLED, method="function_calling").invoke("Write.", max_tokens=120)
    validate(value, UNTITLED)
    assert schema_tool(UNTITLED).name == "output"


def test_a_list_cannot_be_called_and_the_error_names_the_reason(chat: ChatSpecFuse) -> None:
    with pytest.raises(ModelInvalidRequestError, match="'Digits' must be the JSON schema of an object"):
        chat.with_structured_output(ARRAY, method="function_calling")


def test_json_mode_needs_no_schema(chat: ChatSpecFuse) -> None:
    for schema in (None, {"type": "object"}):
        # members of random weights continue the first key until max_tokens; the demo's do not (tests/api_server)
        with pytest.raises(UnfinishedValueError) as error:
            chat.with_structured_output(schema, method="json_mode").invoke("Write.", max_tokens=40)
        assert error.value.text.startswith("{")
    with pytest.raises(ConfigError, match='method "json_schema" needs a schema'):
        chat.with_structured_output(None)


# ── grammars ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar.regex("[0-9]{3}-[a-c]{2}"), "[0-9]{3}-[a-c]{2}"),
        (Grammar.choice(["ja", "nein"]), "ja|nein"),
        (Grammar.lark('start: "<" /[a-z]{2}/ ">"'), "<[a-z]{2}>"),
    ],
)
def test_a_grammar_in_a_call_constrains_the_answer(chat: ChatSpecFuse, grammar: Grammar, pattern: str) -> None:
    assert re.fullmatch(pattern, chat.invoke("Write.", grammar=grammar).text)
    assert re.fullmatch(pattern, "".join(c.text for c in chat.bind(grammar=grammar).stream("Write.")))


def test_a_call_takes_a_grammar_or_a_response_format(chat: ChatSpecFuse) -> None:
    with pytest.raises(ConfigError, match="not both"):
        chat.invoke("Write.", grammar=Grammar.json(), response_format={"type": "json_object"})


# ── strict ───────────────────────────────────────────────────────────────────────────────────────


def test_strict_tools_refuse_schemas_that_no_grammar_can_enforce(chat: ChatSpecFuse) -> None:
    with pytest.raises(GrammarError, match="uniqueItems"):
        chat.bind_tools([UNBOUNDED], strict=True).invoke("Hi")
    described = {"type": "function", "function": {"name": "U", "parameters": UNBOUNDED, "strict": True}}
    with pytest.raises(GrammarError, match="uniqueItems"):
        chat.bind_tools([described]).invoke("Hi")
    assert chat.bind_tools([described], strict=False, tool_choice="none").invoke("Hi").usage_metadata


def test_strict_calling_refuses_schemas_that_no_grammar_can_enforce(chat: ChatSpecFuse) -> None:
    strict = chat.with_structured_output(UNBOUNDED, method="function_calling", strict=True)
    with pytest.raises(GrammarError, match="uniqueItems"):
        strict.invoke("Hi")


# ── tools of others ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "builtin",
    [
        {"type": "web_search"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "mcp", "server_label": "docs", "server_url": "https://example.org"},
    ],
)
def test_a_tool_that_another_provider_runs_is_refused_by_its_type(chat: ChatSpecFuse, builtin: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"type '{builtin['type']}' is run by another provider"):
        chat.bind_tools([builtin])
    with pytest.raises(ModelInvalidRequestError):
        chat.invoke("Hi", tools=[builtin])


@pytest.mark.parametrize("nameless", [{"type": "function"}, {"google_search": {}}, {"type": "object"}, {}])
def test_a_tool_without_a_name_is_refused(chat: ChatSpecFuse, nameless: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs a name"):
        chat.bind_tools([nameless])


def test_tools_written_for_other_providers_are_understood() -> None:
    forms: list[dict[str, Any]] = [
        {"name": "t", "description": "d", "input_schema": UNTITLED},
        {"type": "custom", "name": "t", "description": "d", "input_schema": UNTITLED},
        {"type": "function", "name": "t", "description": "d", "parameters": UNTITLED},
        {"toolSpec": {"name": "t", "description": "d", "inputSchema": {"json": UNTITLED}}},
        {"title": "t", "description": "d", **UNTITLED},
    ]
    made = to_tools(forms)
    assert [(t.name, t.description, json.dumps(t.parameters)) for t in made] == [("t", "d", json.dumps(UNTITLED))] * 5


def test_a_tool_needs_an_object(chat: ChatSpecFuse) -> None:
    with pytest.raises(RequestError, match="JSON schema of an object"):
        chat.bind_tools([ENUM | {"type": "string"}])


def test_a_value_that_quotes_a_call_is_not_parsed_as_a_call(chat: ChatSpecFuse) -> None:
    add = {"type": "function", "function": {"name": "add", "parameters": {"properties": {}}}}
    quoted = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    grammar = Grammar.json_schema({"const": quoted})
    reported = [
        chat.invoke("Quote it.", tools=[add], grammar=grammar, temperature=1.0, seed=seed, max_tokens=90)
        for seed in range(6)
    ]
    values = [answer for answer in reported if not answer.tool_calls]
    assert values
    assert {json.loads(answer.text) for answer in values} == {quoted}
    assert {answer.response_metadata["finish_reason"] for answer in values} == {"stop"}
