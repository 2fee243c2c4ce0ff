"""LangChain conversations become the engine's messages, or are refused by name."""

from __future__ import annotations

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

from langchain_specfuse.messages import to_messages
from specfuse_shared import Message
from specfuse_shared.errors import RequestError
from specfuse_shared.types import ToolCall


def test_every_role_of_a_conversation_is_kept() -> None:
    conversation: list[BaseMessage] = [
        SystemMessage("be brief"),
        ChatMessage("be kind", role="developer"),
        HumanMessage("hello", name="Ada"),
        AIMessage("hi"),
        FunctionMessage("7", name="add"),
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


def test_a_tool_call_and_its_answer_keep_name_arguments_and_id() -> None:
    call = {"name": "add", "args": {"a": 3, "b": 4}, "id": "call-1"}
    asked, answered = to_messages([AIMessage("", tool_calls=[call]), ToolMessage("7", tool_call_id="call-1")])
    assert asked.tool_calls == (ToolCall("add", {"a": 3, "b": 4}, "call-1"),)
    assert answered == Message("tool", "7", tool_call_id="call-1")


def test_reasoning_and_call_blocks_of_an_assistant_are_no_text() -> None:
    blocks: list[str | dict[str, object]] = [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "7"}]
    [message] = to_messages([AIMessage(blocks)])  # type: ignore[arg-type]
    assert message.content == "7"


@pytest.mark.parametrize("kind", ["image_url", "image", "audio", "file"])
def test_content_that_is_not_text_is_refused_by_name(kind: str) -> None:
    with pytest.raises(RequestError, match=f"'{kind}'.*text only"):
        to_messages([HumanMessage([{"type": "text", "text": "look"}, {"type": kind}])])


@pytest.mark.parametrize("message", [ChatMessage("x", role="narrator"), RemoveMessage(id="1")])
def test_a_message_that_is_no_turn_is_refused(message: BaseMessage) -> None:
    with pytest.raises(RequestError, match="no turn of a conversation"):
        to_messages([message])
