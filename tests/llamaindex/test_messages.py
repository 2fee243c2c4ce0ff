"""LlamaIndex conversations become the engine's messages, or are refused by name."""

from __future__ import annotations

from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest
from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from llamaindex_specfuse.messages import to_messages
from specfuse_shared import Message
from specfuse_shared.errors import RequestError
from specfuse_shared.messages import ToolCall


@pytest.mark.parametrize("role", list(MessageRole))
def test_every_role_is_supported(role: MessageRole) -> None:
    [message] = to_messages([ChatMessage("x", role=role)])
    assert message.content == "x"


def test_developer_and_model_are_other_names_of_system_and_assistant() -> None:
    conversation = [ChatMessage("be brief", role="developer"), ChatMessage("hi", role="model")]
    assert to_messages(conversation) == [Message("system", "be brief"), Message("assistant", "hi")]


def test_a_tool_call_and_its_answer_keep_name_arguments_and_id() -> None:
    call = ToolCallBlock(tool_call_id="call-1", tool_name="add", tool_kwargs='{"a": 3}')
    answer = ChatMessage("7", role="tool", additional_kwargs={"tool_call_id": "call-1", "name": "add"})
    request, answered = to_messages([ChatMessage(role="assistant", blocks=[ThinkingBlock(content="hm"), call]), answer])
    assert request == Message("assistant", "", tool_calls=(ToolCall("add", {"a": 3}, "call-1"),))
    assert answered == Message("tool", "7", name="add", tool_call_id="call-1")


@pytest.mark.parametrize("written", ['{"a": tru', "[1]", '"x"', "{"])
def test_a_call_without_an_object_of_arguments_is_read(written: str) -> None:
    call = ToolCallBlock(tool_name="add", tool_kwargs=written)
    [turn] = to_messages([ChatMessage(role="assistant", blocks=[call])])
    assert turn.tool_calls == (ToolCall("add", {}),)


@pytest.mark.parametrize("argument", [date(2026, 1, 1), {1, 2}, b"x", "\ud83d"])
def test_arguments_that_no_prompt_can_contain_are_refused(argument: object) -> None:
    call = ToolCallBlock(tool_name="add", tool_kwargs={"a": argument})
    with pytest.raises(RequestError, match="a call of 'add'"):
        to_messages([ChatMessage(role="assistant", blocks=[call])])


def test_images_are_refused_by_name() -> None:
    image = ImageBlock(image=b"")
    with pytest.raises(RequestError, match=r"ImageBlock.*text only"):
        to_messages([ChatMessage(role="user", blocks=[TextBlock(text="look"), image])])


# ── histories of other providers ─────────────────────────────────────────────────────────────────

ADD = {"name": "add", "arguments": '{"a": 3}'}


@pytest.mark.parametrize(
    "written",
    [
        {"tool_calls": [{"id": "c1", "type": "function", "function": ADD}]},
        {"tool_calls": [SimpleNamespace(id="c1", type="function", function=SimpleNamespace(**ADD))]},
        {"tool_calls": [{"id": "c1", "type": "tool_use", "name": "add", "input": {"a": 3}}]},
        {"tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": {"a": 3}}}]},
    ],
    ids=["openai", "openai-objects", "anthropic", "ollama"],
)
def test_calls_of_other_providers_are_read_and_name_their_results(written: dict[str, Any]) -> None:
    request = ChatMessage(role="assistant", additional_kwargs=written)
    call, answered = to_messages([request, ChatMessage("7", role="tool", additional_kwargs={"tool_call_id": "c1"})])
    assert call.tool_calls == (ToolCall("add", {"a": 3}, "c1"),)
    assert answered.name == "add"


def test_an_old_function_call_is_read() -> None:
    [call] = to_messages([ChatMessage(role="assistant", additional_kwargs={"function_call": ADD, "tool_calls": None})])
    assert call.tool_calls == (ToolCall("add", {"a": 3}),)


def test_a_call_in_blocks_and_in_kwargs_is_one_call() -> None:
    block = ToolCallBlock(tool_call_id="c1", tool_name="add", tool_kwargs={"a": 3})
    written = {"tool_calls": [{"id": "c1", "type": "function", "function": ADD}]}
    [message] = to_messages([ChatMessage(role="assistant", blocks=[block], additional_kwargs=written)])
    assert message.tool_calls == (ToolCall("add", {"a": 3}, "c1"),)


def test_texts_are_read_and_marks_and_sources_are_ignored() -> None:
    cited = CitationBlock(cited_content="seven", source="s", title="t", additional_location_info={})
    blocks = [
        TextBlock(text="When?"),
        CitableBlock(title="Hours", source="hours.md", content="It opens at seven."),
        DocumentBlock(data=b"Closed on Monday.", document_mimetype="text/plain"),
        CachePoint(cache_control=CacheControl(type="ephemeral")),
        ThinkingBlock(content="hm"),
        cited,
    ]
    [message] = to_messages([ChatMessage(role="user", blocks=blocks)])
    assert message.content == "When?\nHours\nIt opens at seven.\nClosed on Monday."


def test_an_image_inside_a_citable_block_and_a_scanned_document_are_refused() -> None:
    image = CitableBlock(title="t", source="s", content=[ImageBlock(image=b"")])
    for block in (image, DocumentBlock(data=b"%PDF-1.7", document_mimetype="application/pdf")):
        with pytest.raises(RequestError, match="text only"):
            to_messages([ChatMessage(role="user", blocks=[block])])


def test_tool_results_are_named_and_calls_without_a_name_are_left_out() -> None:
    image, scan = ImageBlock(image=b""), DocumentBlock(data=b"%PDF", document_mimetype="application/pdf", title="Plan")
    blocks = [TextBlock(text="Here:"), image, scan]
    [reported] = to_messages([ChatMessage(role="tool", blocks=blocks, additional_kwargs={"tool_call_id": "c"})])
    assert reported.content == "Here:\n[image]\n[document: Plan]"
    broken = {"tool_calls": [None, {"id": "c", "function": {"name": None, "arguments": None}}]}
    [turn] = to_messages([ChatMessage(role="assistant", content="Hm.", additional_kwargs=broken)])
    assert (turn.content, turn.tool_calls) == ("Hm.", ())
