"""LangChain messages as the engine's messages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
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

from specfuse_shared import Message, ToolCall
from specfuse_shared.errors import RequestError
from specfuse_shared.frameworks import SILENT_BLOCKS, TEXT_BLOCKS, Role, arguments_said, block_text

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


def to_messages(messages: Sequence[BaseMessage]) -> list[Message]:
    """Converts a conversation; content that is not text raises `RequestError`."""
    called: dict[str | None, str] = {}
    for message in messages:
        if isinstance(message, AIMessage):
            calls = [*message.tool_calls, *message.invalid_tool_calls]
            called.update({call["id"]: call["name"] for call in calls if call["id"] and call["name"]})
    answered = {message.tool_call_id for message in messages if isinstance(message, ToolMessage)}
    return [_to_message(message, called, answered) for message in messages]


def in_order(messages: Sequence[BaseMessage]) -> Sequence[BaseMessage]:
    """The messages, turned round where they come last first: `trim_messages` counts the end of a conversation so.

    A result of a tool in front of its call says so, and a system message behind all turns.
    """
    answered: set[str | None] = set()
    for message in messages:
        if isinstance(message, ToolMessage):
            answered.add(message.tool_call_id)
        elif isinstance(message, AIMessage):
            calls = [*message.tool_calls, *message.invalid_tool_calls]
            if any(call["id"] is not None and call["id"] in answered for call in calls):
                return messages[::-1]
    ends = isinstance(messages[-1], SystemMessage) and not isinstance(messages[0], SystemMessage)
    return messages[::-1] if ends else messages


def _to_message(message: BaseMessage, called: Mapping[str | None, str], answered: Container[str | None]) -> Message:
    answers = message.tool_call_id if isinstance(message, ToolMessage) else None
    return Message(
        role=_role(message),
        content=_text(message),
        name=message.name or called.get(answers),
        tool_calls=tuple(_calls(message, answered)) if isinstance(message, AIMessage) else (),
        tool_call_id=answers,
    )


def _calls(message: AIMessage, answered: Container[str | None]) -> Iterator[ToolCall]:
    """The calls of a turn; one that could not be carried out, only where its answer says so."""
    for call in message.tool_calls:
        yield ToolCall(call["name"], call["args"], call["id"])
    for failed in message.invalid_tool_calls:
        if failed["name"] and failed["id"] in answered:
            yield ToolCall(failed["name"], arguments_said(failed["args"]), failed["id"])


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
    return "".join(_block_texts(message.content, _role(message)))


def _block_texts(blocks: Iterable[str | dict[Any, Any]], role: Role) -> Iterator[str]:
    for block in blocks:
        kind = "text" if isinstance(block, str) else str(block.get("type"))
        if isinstance(block, str):
            yield block
        elif kind == "text-plain" and not block.get("text"):
            yield _plain_file(block)
        elif kind in TEXT_BLOCKS:
            yield str(block.get(TEXT_BLOCKS[kind]) or "")
        elif role == "tool" or (role == "assistant" and not SILENT_BLOCKS.fullmatch(kind)):
            yield block_text(block)
        elif role != "assistant":
            raise RequestError(f"a message holds a content block of type {kind!r}: this ensemble reads text only")


def _plain_file(block: Mapping[str, Any]) -> str:
    """A text file that came as data is read; one that lies elsewhere is named, so that nothing vanishes unseen."""
    try:
        if data := block.get("base64"):
            return base64.b64decode(data).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise RequestError(f"a text-plain block holds no text in UTF-8 as base64: {error}") from error
    return f"[a text file: {block.get('title') or block.get('url') or block.get('file_id') or 'empty'}]"
