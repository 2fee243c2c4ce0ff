"""LangChain conversations become the engine's messages, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.tool import tool_call

from langchain_specfuse.messages import to_messages
from specfuse_shared import Message
from specfuse_shared.errors import RequestError
from specfuse_shared.messages import ToolCall


def test_every_role_of_a_conversation_is_kept() -> None:
    conversation: list[BaseMessage] = [
        SystemMessage("be brief"),
        ChatMessage(content="be kind", role="developer"),
        HumanMessage("hello", name="Ada"),
        AIMessage("hi"),
        FunctionMessage(content="7", name="add"),
    ]
    assert to_messages(conversation) == [
        Message("system", "be brief"),
        Message("system", "be kind"),
        Message("user", "hello", name="Ada"),
        Message("assistant", "hi"),
        Message("tool", "7", name="add"),
    ]


def test_text_blocks_join_without_a_separator() -> None:
    [message] = to_messages([HumanMessage(["one ", {"type": "text", "text": "two"}])])
    assert message.content == "one two"


def test_a_tool_call_and_its_answer_keep_arguments_and_id_and_the_answer_gets_its_name() -> None:
    call = {"name": "add", "args": {"a": 3, "b": 4}, "id": "call-1"}
    request, answered = to_messages([AIMessage("", tool_calls=[call]), ToolMessage("7", tool_call_id="call-1")])
    assert request.tool_calls == (ToolCall("add", {"a": 3, "b": 4}, "call-1"),)
    assert answered == Message("tool", "7", name="add", tool_call_id="call-1")


def test_reasoning_and_call_blocks_of_an_assistant_are_no_text() -> None:
    blocks: list[str | dict[str, object]] = [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "7"}]
    [message] = to_messages([AIMessage(blocks)])
    assert message.content == "7"


@pytest.mark.parametrize(
    "block",
    [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_call", "name": "web_search", "args": {}, "id": "1"},
        {"type": "server_tool_call_chunk", "name": "web_search"},
        {"type": "server_tool_result", "tool_call_id": "1", "output": "found"},
        {"type": "server_tool_use", "name": "web_search", "input": {}, "id": "1"},
        {"type": "web_search_tool_result", "content": []},
        {"type": "web_search_call", "id": "1"},
        {"type": "invalid_tool_call", "name": "add", "args": "{", "id": "1", "error": "cut"},
        {"type": "non_standard", "value": {"anything": 1}},
        {"type": "thinking", "thinking": "hm", "signature": "x"},
    ],
)
def test_other_providers_fields_in_their_turns_are_no_text(block: dict[str, object]) -> None:
    [message] = to_messages([AIMessage([block, {"type": "text", "text": "7"}])])
    assert message == Message("assistant", "7")


def test_a_refusal_is_text_of_the_assistant() -> None:
    [message] = to_messages([AIMessage([{"type": "refusal", "refusal": "I will not."}])])
    assert message.content == "I will not."


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"text": "plain"}, "plain"),
        ({"base64": "R3LDvMOfZQ==", "mime_type": "text/plain"}, "Grüße"),
        ({"url": "https://example.org/a.txt"}, "[a text file: https://example.org/a.txt]"),
        ({"file_id": "f-1", "title": "Notes"}, "[a text file: Notes]"),
        ({}, "[a text file: empty]"),
    ],
)
def test_a_text_file_is_included_or_named(block: dict[str, str], text: str) -> None:
    [message] = to_messages([HumanMessage([{"type": "text-plain", **block}])])
    assert message.content == text


def test_a_binary_file_is_refused() -> None:
    with pytest.raises(RequestError, match="no text in UTF-8"):
        to_messages([HumanMessage([{"type": "text-plain", "base64": "/w=="}])])


def test_the_result_of_an_invalid_call_gets_the_calls_name() -> None:
    broken = {"name": "add", "args": "{", "id": "1", "error": None, "type": "invalid_tool_call"}
    _, answered = to_messages([AIMessage("", invalid_tool_calls=[broken]), ToolMessage("no JSON", tool_call_id="1")])
    assert answered.name == "add"


@pytest.mark.parametrize("kind", ["image_url", "image", "audio", "file"])
def test_content_that_is_not_text_is_refused_by_name(kind: str) -> None:
    with pytest.raises(RequestError, match=f"'{kind}'.*text only"):
        to_messages([HumanMessage([{"type": "text", "text": "look"}, {"type": kind}])])


@pytest.mark.parametrize("message", [ChatMessage(content="x", role="narrator"), RemoveMessage(id="1")])
def test_a_message_without_a_role_is_refused(message: BaseMessage) -> None:
    with pytest.raises(RequestError, match="no turn of a conversation"):
        to_messages([message])


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (
            {"type": "file", "base64": "JVBE", "mime_type": "application/pdf", "filename": "a.pdf"},
            "[file: a.pdf]",
        ),
        ({"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,YQ=="}}, "[file: a.txt]"),
        ({"type": "image", "url": "https://example.org/a.png"}, "[image: https://example.org/a.png]"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}, "[image]"),
        ({"type": "audio", "base64": "UklG", "mime_type": "audio/wav"}, "[audio]"),
        ({"type": "input_text", "text": "12:30"}, "12:30"),
        ({"type": "output_text", "text": "12:30", "annotations": []}, "12:30"),
        ({"type": "search_result", "title": "A", "content": [{"type": "text", "text": "b"}]}, "A\nb"),
    ],
)
def test_files_in_a_tools_result_are_included_or_named(block: dict[str, Any], text: str) -> None:
    call = AIMessage("", tool_calls=[tool_call(name="look", args={}, id="c1")])
    [_, result] = to_messages([call, ToolMessage([block], tool_call_id="c1")])
    assert (result.role, result.content, result.name) == ("tool", text, "look")
    assert to_messages([AIMessage([{"type": "image", "id": "i"}, "Look."])])[0].content == "[image]Look."
