"""LangChain messages as the engine's messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from specfuse_shared.errors import RequestError
from specfuse_shared.types import Message, Role, ToolCall

_ROLES: dict[type[BaseMessage], Role] = {
    SystemMessage: "system",
    HumanMessage: "user",
    AIMessage: "assistant",
    ToolMessage: "tool",
    FunctionMessage: "tool",
}
_CHAT_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "tool": "tool",
}
_TEXT_BLOCKS = ("text", "text-plain")
_SILENT_BLOCKS = ("reasoning", "thinking", "tool_call", "tool_call_chunk", "tool_use", "function_call")
"""Blocks of an assistant that are no text of its turn; its calls are read from `tool_calls`."""


def to_messages(messages: Sequence[BaseMessage]) -> list[Message]:
    """Converts a conversation; content that is not text raises `RequestError`."""
    return [_to_message(message) for message in messages]


def _to_message(message: BaseMessage) -> Message:
    calls = message.tool_calls if isinstance(message, AIMessage) else []
    return Message(
        role=_role(message),
        content=_text(message),
        name=message.name,
        tool_calls=tuple(ToolCall(call["name"], call["args"], call["id"]) for call in calls),
        tool_call_id=message.tool_call_id if isinstance(message, ToolMessage) else None,
    )


def _role(message: BaseMessage) -> Role:
    if isinstance(message, ChatMessage):
        role = _CHAT_ROLES.get(message.role)
    else:
        role = next((role for kind, role in _ROLES.items() if isinstance(message, kind)), None)
    if role is None:
        raise RequestError(f"a {type(message).__name__} of role {_named_role(message)!r} is no turn of a conversation")
    return role


def _named_role(message: BaseMessage) -> str:
    return str(getattr(message, "role", message.type))


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(_block_texts(message.content, isinstance(message, AIMessage)))


def _block_texts(blocks: Iterable[str | dict[Any, Any]], assistant: bool) -> Iterable[str]:
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else "text"
        if isinstance(block, str):
            yield block
        elif kind in _TEXT_BLOCKS:
            yield str(block["text"])
        elif not (assistant and kind in _SILENT_BLOCKS):
            raise RequestError(f"a message holds a content block of type {kind!r}: this ensemble reads text only")
