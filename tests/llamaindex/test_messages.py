"""LlamaIndex conversations become the engine's messages, or are refused by name."""

from __future__ import annotations

import pytest
from llama_index.core.base.llms.types import (
    ChatMessage,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from llamaindex_specfuse.messages import to_messages
from specfuse_shared import Message
from specfuse_shared.errors import RequestError
from specfuse_shared.types import ToolCall


@pytest.mark.parametrize("role", list(MessageRole))
def test_every_role_has_a_place(role: MessageRole) -> None:
    [message] = to_messages([ChatMessage("x", role=role)])
    assert message.content == "x"


def test_developer_and_model_are_other_names_of_system_and_assistant() -> None:
    conversation = [ChatMessage("be brief", role="developer"), ChatMessage("hi", role="model")]
    assert to_messages(conversation) == [Message("system", "be brief"), Message("assistant", "hi")]


def test_a_tool_call_and_its_answer_keep_name_arguments_and_id() -> None:
    call = ToolCallBlock(tool_call_id="call-1", tool_name="add", tool_kwargs='{"a": 3}')
    answer = ChatMessage("7", role="tool", additional_kwargs={"tool_call_id": "call-1", "name": "add"})
    asked, answered = to_messages([ChatMessage(role="assistant", blocks=[ThinkingBlock(content="hm"), call]), answer])
    assert asked == Message("assistant", "", tool_calls=(ToolCall("add", {"a": 3}, "call-1"),))
    assert answered == Message("tool", "7", name="add", tool_call_id="call-1")


def test_arguments_that_are_no_object_are_refused() -> None:
    call = ToolCallBlock(tool_name="add", tool_kwargs="[1")
    with pytest.raises(RequestError, match="no JSON object"):
        to_messages([ChatMessage(role="assistant", blocks=[call])])


def test_images_are_refused_by_name() -> None:
    image = ImageBlock(image=b"")
    with pytest.raises(RequestError, match=r"ImageBlock.*text only"):
        to_messages([ChatMessage(role="user", blocks=[TextBlock(text="look"), image])])
