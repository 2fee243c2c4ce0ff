"""Tool calls and structured values of the real demo ensemble, and every form of their arguments."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from langchain_core._api import LangChainBetaWarning
from langchain_core.language_models import BaseChatModel
from langchain_core.load import dumpd, load
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from langchain_specfuse import ChatSpecFuse
from langchain_specfuse.messages import to_choice, to_schema, to_tools
from specfuse_shared import EnsembleEngine, Tool
from specfuse_shared.errors import ConfigError, GrammarError, RequestError


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@tool
def shout(text: Literal["Grüße aus Köln", "北京 🎉"]) -> str:
    """Repeats a greeting in capitals."""
    return text.upper()


class Guest(BaseModel):
    """A guest and the kind of bedroom."""

    name: str
    nights: int = Field(description="how many nights")
    room: Literal["single", "double"]


class GuestDict(TypedDict):
    """A guest."""

    name: str
    nights: int


STORY = "Zoë Müller booked a double room for 3 nights."


@pytest.fixture(scope="module")
def model(demo_engine: EnsembleEngine) -> ChatSpecFuse:
    return ChatSpecFuse(engine=demo_engine, max_tokens=80)


# ── forms ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"), ("auto", "auto"), ("any", "any"), ("required", "any"), (True, "any"), ("none", "none"),
        (False, "auto"), ("add", "add"), ({"type": "function", "function": {"name": "shout"}}, "shout"),
        ({"type": "tool", "name": "add"}, "add"), ({"type": "any"}, "any"),
    ],
)  # fmt: skip
def test_every_form_of_tool_choice_is_understood(choice: Any, expected: str) -> None:
    assert to_choice(choice, to_tools([add, shout])) == expected


def test_true_calls_the_only_tool() -> None:
    assert to_choice(True, to_tools([add])) == "add"


def test_a_choice_of_an_unknown_tool_is_refused() -> None:
    with pytest.raises(ConfigError, match="'subtract' is not one of the bound tools"):
        ChatSpecFuse(members=["no/one"]).bind_tools([add], tool_choice="subtract")


@pytest.mark.parametrize("form", [add, Guest, GuestDict, {"type": "function", "function": {"name": "now"}}, Tool("x")])
def test_every_form_of_a_tool_is_accepted(form: Any) -> None:
    [made] = to_tools([form])
    assert made.name in ("add", "Guest", "GuestDict", "now", "x")
    assert made.parameters.get("type", "object") == "object"


@pytest.mark.parametrize(
    ("form", "title"),
    [(Guest, "Guest"), (Guest.model_json_schema(), "Guest"), (GuestDict, "GuestDict"),
     ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"title": "T"}}}, "T"),
     ({"type": "json_object"}, None)],
)  # fmt: skip
def test_every_form_of_a_response_format_is_understood(form: Any, title: str | None) -> None:
    schema, _ = to_schema(form)
    assert schema is not None
    assert schema.get("title") == title


def test_a_response_format_without_a_schema_is_refused(model: ChatSpecFuse) -> None:
    with pytest.raises(ConfigError, match="needs"):
        model.invoke("Hi", response_format={"type": "json_schema"})


def test_strict_refuses_a_schema_that_no_grammar_can_promise(model: ChatSpecFuse) -> None:
    schema = {"title": "T", "type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(GrammarError, match="uniqueItems"):
        model.with_structured_output(schema, strict=True).invoke("Hi")


# ── calls ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def call_chunks(model: ChatSpecFuse) -> list[AIMessageChunk]:
    forced = model.bind_tools([add, shout], tool_choice="shout")
    return list(forced.stream("Use the tool to shout: Grüße aus Köln"))


def test_a_call_streams_in_chunks_and_never_as_text(call_chunks: list[AIMessageChunk]) -> None:
    assert "".join(str(chunk.content) for chunk in call_chunks) == ""
    assert sum(bool(chunk.tool_call_chunks) for chunk in call_chunks) > 1
    assert all(len(chunk.tool_call_chunks) <= 1 for chunk in call_chunks)


def test_streamed_chunks_add_up_to_one_call_with_text_as_it_was_written(call_chunks: list[AIMessageChunk]) -> None:
    whole = call_chunks[0]
    for chunk in call_chunks[1:]:
        whole += chunk
    [call] = whole.tool_calls
    assert call["name"] == "shout"
    assert call["args"]["text"] in ("Grüße aus Köln", "北京 🎉")
    assert "\\u" not in "".join(str(c["args"]) for chunk in call_chunks for c in chunk.tool_call_chunks)
    assert call["id"]
    assert whole.response_metadata["finish_reason"] == "tool_calls"
    assert json.loads(json.dumps(whole.additional_kwargs)) == whole.additional_kwargs


async def test_an_asynchronous_call_gives_the_same_result(model: ChatSpecFuse) -> None:
    forced = model.bind_tools([add], tool_choice="any")
    question = "Use the tool to add a=17 and b=25."
    answers = [forced.invoke(question), await forced.ainvoke(question)]
    assert [[(c["name"], c["args"]) for c in a.tool_calls] for a in answers] == [[("add", {"a": 17, "b": 25})]] * 2


def test_choice_none_answers_in_text(model: ChatSpecFuse) -> None:
    answer = model.bind_tools([add], tool_choice="none").invoke("What is 1 + 2?", max_tokens=8)
    assert answer.content
    assert answer.tool_calls == []


def test_tools_are_counted_in_the_prompt(model: ChatSpecFuse) -> None:
    messages = [HumanMessage("What is 1 + 2?")]
    bare = model.get_num_tokens_from_messages(messages)
    assert model.get_num_tokens_from_messages(messages, tools=[add]) > bare + 20
    usage = model.invoke(messages, max_tokens=1).usage_metadata
    assert usage is not None
    assert usage["input_tokens"] == bare


# ── values ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_values_are_values_of_the_schema(model: ChatSpecFuse, method: Any) -> None:
    guest = model.with_structured_output(Guest, method=method).invoke(f"Note the guest, nights and room: {STORY}")
    assert isinstance(guest, Guest)
    assert guest.nights == 3


def test_a_typed_dict_gives_a_dictionary_with_the_raw_message_on_request(model: ChatSpecFuse) -> None:
    result = model.with_structured_output(GuestDict, include_raw=True).invoke(STORY)
    assert isinstance(result, dict)
    assert set(result) == {"raw", "parsed", "parsing_error"}
    assert set(result["parsed"]) == {"name", "nights"}
    assert json.loads(result["raw"].content) == result["parsed"]
    assert result["parsing_error"] is None


def test_a_value_that_cannot_fit_is_refused_and_one_at_the_limit_is_closed(model: ChatSpecFuse) -> None:
    structured = model.with_structured_output(Guest)
    with pytest.raises(RequestError, match="max_tokens=4 cannot hold any value"):
        structured.invoke(STORY, max_tokens=4)
    tight = structured.invoke(STORY, max_tokens=24)
    assert isinstance(tight, Guest)


def test_a_response_format_can_be_given_per_call(model: ChatSpecFuse) -> None:
    answer = model.invoke(STORY, response_format=Guest.model_json_schema())
    assert Guest.model_validate_json(str(answer.content))
    assert answer.additional_kwargs["specfuse_segments"][-1]["end"] == len(answer.content)


def test_a_message_with_a_call_can_be_stored_and_loaded(model: ChatSpecFuse) -> None:
    answer = model.bind_tools([add], tool_choice="any").invoke("Use the tool to add a=17 and b=25.")
    serde = JsonPlusSerializer()
    assert serde.loads_typed(serde.dumps_typed(answer)) == answer
    with pytest.warns(LangChainBetaWarning):
        assert load(dumpd(answer), allowed_objects="all") == answer


def test_a_bound_model_is_an_ordinary_runnable(model: ChatSpecFuse) -> None:
    assert isinstance(model, BaseChatModel)
    assert model.bind_tools([add]).with_retry().invoke("Hi", max_tokens=2).usage_metadata
