"""Calls and values truncated by `max_tokens`: reported, never executed, and handled by agents."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest
from langchain.agents.structured_output import ProviderStrategy
from langchain_core import exceptions
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from langchain_core.utils.json import parse_partial_json
from pydantic import BaseModel

from langchain_specfuse import ChatSpecFuse
from langchain_specfuse.messages import to_messages
from specfuse_shared import EnsembleEngine, Grammar, errors
from specfuse_shared.frameworks import CallDelta, CallReader
from specfuse_shared.messages import CUT_MARK
from specfuse_shared.text.tool_calls import CALL_OPEN, call_text
from tests.support.serving import reciting

WRITTEN: list[str] = []


@tool
def write_file(path: str, content: str) -> str:
    """Writes a file."""
    WRITTEN.append(path)
    return "done"


class Note(BaseModel):
    """A note."""

    title: str
    text: str


class Line(BaseModel):
    """A line."""

    text: str


class Counted(BaseModel):
    """A line and its length."""

    text: str
    words: int


@pytest.fixture
def writer(chat: ChatSpecFuse) -> Runnable[Any, AIMessage]:
    """Members with random weights, which end no string within these tokens, are forced to call `write_file`."""
    return chat.bind_tools([write_file], tool_choice="any", max_tokens=100)


def test_a_truncated_text_is_not_a_value(chat: ChatSpecFuse) -> None:
    answer = chat.invoke("Hi", max_tokens=4, response_format={"type": "text"})
    assert answer.text == chat.invoke("Hi", max_tokens=4).text != ""
    assert answer.response_metadata["finish_reason"] == "length"


class Forced(AgentMiddleware):
    """A middleware that forces a tool call in every turn."""

    def wrap_model_call(self, request: ModelRequest, handler: Any) -> Any:
        return handler(request.override(tool_choice="any"))


def folded(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    whole, *rest = chunks
    return whole + rest


def is_cut(message: BaseMessage) -> bool:
    assert isinstance(message, AIMessage)
    [call] = message.invalid_tool_calls
    return (
        message.tool_calls == []
        and call["name"] == "write_file"
        and str(call["args"]).endswith(CUT_MARK)
        and message.response_metadata["finish_reason"] == "length"
    )


def test_a_repetitive_call_is_not_executed(tmp_path: Path) -> None:
    config = replace(reciting(tmp_path, endless=True), repetition_guard=True)
    with EnsembleEngine(config) as engine:
        model = ChatSpecFuse(engine=engine, max_tokens=400)
        message = model.bind_tools([write_file], tool_choice="any").invoke("Speak.")
    assert message.response_metadata["specfuse"]["finish_reason"] == "repetition"
    assert is_cut(message)


async def test_a_truncated_call_is_invalid_with_every_method(writer: Runnable[Any, AIMessage]) -> None:
    assert is_cut(writer.invoke("Write."))
    assert is_cut(await writer.ainvoke("Write."))
    assert all(map(is_cut, writer.batch(["Write.", "Continue."])))
    assert is_cut(folded(list(writer.stream("Write."))))
    assert is_cut(folded([chunk async for chunk in writer.astream("Write.")]))  # type: ignore[misc]


def test_a_truncated_call_is_invalid_in_the_events_of_version_3(chat: ChatSpecFuse) -> None:
    bound = {"tools": [write_file], "tool_choice": "any", "max_tokens": 100}
    assert is_cut(chat.stream_events("Write.", version="v3", **bound).output)


def test_an_agent_executes_no_truncated_call_and_continues(chat: ChatSpecFuse) -> None:
    WRITTEN.clear()
    agent = create_agent(chat.model_copy(update={"max_tokens": 100}), [write_file], middleware=[Forced()])
    state = agent.invoke({"messages": [("user", "Write.")]})
    assert WRITTEN == []
    assert is_cut(state["messages"][-1])
    again = agent.invoke({"messages": [*state["messages"], ("user", "Shorter.")]})
    assert WRITTEN == []
    [reported] = [message for message in again["messages"] if isinstance(message, ToolMessage)]
    assert "truncated" in reported.text


def test_members_read_a_failed_call_if_its_result_reports_the_failure() -> None:
    failed = {"type": "invalid_tool_call", "id": "c", "name": "write_file", "error": None}
    closed = AIMessage("", invalid_tool_calls=[{**failed, "args": '{"path": "a"}} ' + CUT_MARK}])
    broken = AIMessage("", invalid_tool_calls=[{**failed, "args": "{{"}])
    answer = ToolMessage("It was truncated.", tool_call_id="c")
    request = HumanMessage("Write.")
    assert to_messages([request, closed, answer])[1].tool_calls[0].arguments == {"path": "a"}
    assert to_messages([request, broken, answer])[1].tool_calls[0].arguments == {}
    assert to_messages([request, closed])[1].tool_calls == ()


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_a_truncated_value_is_an_error_of_the_parser(chat: ChatSpecFuse, method: Any) -> None:
    strict = chat.with_structured_output(Note, method=method, strict=True)
    structured = strict.bind(max_tokens=100)
    for request in (structured.invoke, lambda prompt: list(structured.stream(prompt))):
        with pytest.raises(exceptions.OutputParserException, match="max_tokens cut") as caught:
            request("Note it.")
        assert isinstance(caught.value, errors.UnfinishedValueError)
        assert caught.value.llm_output
    with pytest.raises(exceptions.OutputParserException, match="max_tokens cut"):
        await structured.ainvoke("Note it.")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_truncated_value_is_the_parsing_error_next_to_its_message(chat: ChatSpecFuse, method: Any) -> None:
    structured = chat.with_structured_output(Note, method=method, strict=True, include_raw=True, max_tokens=100)
    reported = structured.invoke("Note it.")
    assert isinstance(reported, dict)
    assert isinstance(reported["parsing_error"], errors.UnfinishedValueError)
    assert reported["parsed"] is None
    assert reported["raw"].response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_value_closed_by_quotes_and_brackets_is_returned_with_a_warning(chat: ChatSpecFuse, method: Any) -> None:
    """Members with random weights end no string: only the closing characters are missing."""
    structured = chat.with_structured_output(Line, method=method, include_raw=True, max_tokens=90)
    with pytest.warns(errors.ClosedValueWarning, match="reached max_tokens after 90 tokens"):
        reported = structured.invoke("Write.")
    assert isinstance(reported, dict)
    assert isinstance(reported["parsed"], Line)
    assert reported["parsed"].text
    assert reported["parsing_error"] is None
    assert reported["raw"].response_metadata["specfuse"]["finish_reason"] == "length"
    assert reported["raw"].response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_value_whose_rest_would_be_invented_is_an_error(tmp_path: Path, method: Any) -> None:
    with EnsembleEngine(reciting(tmp_path, endless=True)) as engine:
        structured = ChatSpecFuse(engine=engine, max_tokens=120).with_structured_output(Counted, method=method)
        with pytest.raises(exceptions.OutputParserException, match="max_tokens cut"):
            structured.invoke("Speak.")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_repetitive_value_is_closed_with_a_warning(tmp_path: Path, method: Any) -> None:
    config = replace(reciting(tmp_path, endless=True), repetition_guard=True)
    with EnsembleEngine(config) as engine:
        model = ChatSpecFuse(engine=engine, max_tokens=400)
        structured = model.with_structured_output(Line, method=method, include_raw=True)
        with pytest.warns(errors.ClosedValueWarning, match=r"went in a loop .*people sleep"):
            reported = structured.invoke("Speak.")
        assert isinstance(reported, dict)
        assert 1 <= reported["parsed"].text.count("people sleep") < 3
        record = reported["raw"].response_metadata["specfuse"]
        assert record["finish_reason"] == "repetition"
        assert len(record["loops"]) == 1
        strict = model.with_structured_output(Line, method=method, strict=True)
        with pytest.raises(exceptions.OutputParserException, match=r"repeated itself .*people sleep"):
            strict.invoke("Speak.")


def test_a_truncated_value_is_no_response_of_an_agent(chat: ChatSpecFuse) -> None:
    agent = create_agent(
        chat.model_copy(update={"max_tokens": 100}), [], response_format=ProviderStrategy(Note, strict=True)
    )
    with pytest.raises(exceptions.OutputParserException, match="max_tokens cut"):
        agent.invoke({"messages": [("user", "Note it.")]})


def test_a_calls_grammar_is_closed_at_the_limit_with_the_reason_length(chat: ChatSpecFuse) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    reported = chat.invoke("Say a.", grammar=Grammar.json_schema(schema))
    assert json.loads(reported.text)["a"] is not None
    assert reported.response_metadata["finish_reason"] == "length"
    assert chat.invoke("Say a.").response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize(
    "text", ['{"a": "x', '{"a": "x\\', '{"a": ["}"', '{"a": {"b": "]', '{"a": [1, {"b": "\\u00', '{"a": 3', "", "{"]
)
def test_langchains_parsers_do_not_repair_a_truncated_value(text: str) -> None:
    reader, head = CallReader(), f'{CALL_OPEN}{{"name": "say", "arguments": '
    parts = [*reader.feed(head + text), *reader.finish(cut=True)]
    written = "".join(part.arguments for part in parts if isinstance(part, CallDelta))
    assert written.startswith(text)
    assert parse_partial_json(written) is None


def test_a_call_closed_at_the_limit_is_not_executed() -> None:
    reader, text = CallReader(), call_text("say", {"text": 'Grüße, "北京" {[ 🎉'})
    parts = [*reader.feed(text), *reader.finish(cut=True, closing='"}}</tool_call>')]
    written = "".join(part.arguments for part in parts if isinstance(part, CallDelta))
    assert parse_partial_json(written) is None
    assert reader.calls == []
