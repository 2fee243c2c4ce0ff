"""LlamaIndex messages as the engine's messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from specfuse_shared.errors import RequestError
from specfuse_shared.types import Message, Role, ToolCall

_ROLES: dict[MessageRole, Role] = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}
REACT_MARKS = ("Thought:", "Action:", "Action Input:", "Observation:")
"""A system message that holds all of them asks for the ReAct format."""
REACT_STOP = "\nObservation:"
"""A ReAct agent passes no stop strings, and a model that goes on would make up the tool's answer."""
_SILENT_BLOCKS = (CachePoint, ThinkingBlock, ToolCallBlock)


def to_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Converts a conversation; content that is not text raises `RequestError`.

    LlamaIndex's agents answer a call by its id alone; the name of the tool is taken from the call.
    """
    names = {block.tool_call_id: block.tool_name for message in messages for block in _calls(message)}
    return [_to_message(message, names) for message in messages]


def react_stops(messages: Sequence[Message]) -> tuple[str, ...]:
    """The stop string of a conversation in ReAct format; none for any other."""
    system = "\n".join(message.content for message in messages if message.role == "system")
    return (REACT_STOP,) if all(mark in system for mark in REACT_MARKS) else ()


def _calls(message: ChatMessage) -> list[ToolCallBlock]:
    return [block for block in message.blocks if isinstance(block, ToolCallBlock)]


def _to_message(message: ChatMessage, names: Mapping[str | None, str]) -> Message:
    for block in message.blocks:
        if not isinstance(block, (TextBlock, *_SILENT_BLOCKS)):
            raise RequestError(f"a message holds a {type(block).__name__}: this ensemble reads text only")
    answered = message.additional_kwargs.get("tool_call_id")
    return Message(
        role=_ROLES[message.role],
        content=message.content or "",
        name=message.additional_kwargs.get("name") or (names.get(answered) if answered else None),
        tool_calls=tuple(ToolCall(c.tool_name, arguments_of(c), c.tool_call_id) for c in _calls(message)),
        tool_call_id=answered,
    )


def arguments_of(call: ToolCallBlock) -> Mapping[str, Any]:
    """The arguments of a call, which a message may hold as JSON; raises `RequestError` if they are no object."""
    arguments = call.tool_kwargs
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments or "{}")
    except json.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        raise RequestError(f"the arguments of a tool call are no JSON object: {arguments!r}")
    return parsed
