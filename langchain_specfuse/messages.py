"""LangChain messages as the engine's messages."""

from __future__ import annotations

import base64
import binascii
import re
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
from specfuse_shared.frameworks import Role, arguments_said

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
_TEXT_KEYS = {"text": "text", "text-plain": "text", "refusal": "refusal"}
"""Blocks that are text, and where it stands in them."""
_SILENT_BLOCKS = re.compile(
    "reasoning|(redacted_)?thinking|non_standard|executable_code|code_execution_result"
    "|(.*_)?tool_(call|call_chunk|use|result)|(.*_)?call|mcp_.*"
)
"""Blocks of an assistant that are no text of its turn: thoughts, calls (those to answer are read from `tool_calls`),
and what other providers' own tools did."""


def to_messages(messages: Sequence[BaseMessage]) -> list[Message]:
    """Converts a conversation; content that is not text raises `RequestError`."""
    called: dict[str | None, str] = {}
    for message in messages:
        if isinstance(message, AIMessage):
            calls = [*message.tool_calls, *message.invalid_tool_calls]
            called.update({call["id"]: call["name"] for call in calls if call["id"] and call["name"]})
    answered = {message.tool_call_id for message in messages if isinstance(message, ToolMessage)}
    return [_to_message(message, called, answered) for message in messages]


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
    return "".join(_block_texts(message.content, isinstance(message, AIMessage)))


def _block_texts(blocks: Iterable[str | dict[Any, Any]], assistant: bool) -> Iterator[str]:
    for block in blocks:
        kind = "text" if isinstance(block, str) else str(block.get("type"))
        if isinstance(block, str):
            yield block
        elif kind == "text-plain" and not block.get("text"):
            yield _plain_file(block)
        elif kind in _TEXT_KEYS:
            yield str(block.get(_TEXT_KEYS[kind]) or "")
        elif not (assistant and _SILENT_BLOCKS.fullmatch(kind)):
            raise RequestError(f"a message holds a content block of type {kind!r}: this ensemble reads text only")


def _plain_file(block: Mapping[str, Any]) -> str:
    """A text file that came as data is read; one that lies elsewhere is named, so that nothing vanishes unseen."""
    try:
        if data := block.get("base64"):
            return base64.b64decode(data).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise RequestError(f"a text-plain block holds no text in UTF-8 as base64: {error}") from error
    return f"[a text file: {block.get('title') or block.get('url') or block.get('file_id') or 'empty'}]"
