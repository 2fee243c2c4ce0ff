"""LlamaIndex messages as the engine's messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    DocumentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from pydantic_core import from_json

from specfuse_shared import Message, ToolCall
from specfuse_shared.errors import RequestError
from specfuse_shared.frameworks import CUT_MARK, Role, arguments_said, block_text

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
_SILENT_BLOCKS = (CachePoint, CitationBlock, ThinkingBlock, ToolCallBlock)
"""They hold no text of the turn: marks, sources of what was said, private thoughts, and calls, which are read apart."""


def to_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Converts a conversation; content that is not text raises `RequestError`.

    LlamaIndex's agents answer a call by its id alone; the name of the tool is taken from the call.
    """
    names = {call.tool_call_id: call.tool_name for message in messages for call in begun_in(message)}
    return [_to_message(message, names) for message in messages]


def react_stops(messages: Sequence[Message]) -> tuple[str, ...]:
    """The stop string of a conversation in ReAct format; none for any other."""
    system = "\n".join(message.content for message in messages if message.role == "system")
    return (REACT_STOP,) if all(mark in system for mark in REACT_MARKS) else ()


def begun_in(message: ChatMessage) -> list[ToolCallBlock]:
    """The calls of a turn: its blocks, or what other LLMs and older versions put into `additional_kwargs`.

    Only there is a call that is still being written, or was cut.
    """
    return max(_blocks(message), _begun(message), key=len)


def _blocks(message: ChatMessage) -> list[ToolCallBlock]:
    return [block for block in message.blocks if isinstance(block, ToolCallBlock)]


def _begun(message: ChatMessage) -> list[ToolCallBlock]:
    given = message.additional_kwargs
    calls = given.get("tool_calls") or [call for call in [given.get("function_call")] if call]
    return [_call_block(call) for call in calls]


def _call_block(call: Any) -> ToolCallBlock:
    """A call of OpenAI's, Ollama's or Anthropic's, an object of theirs or a dictionary."""
    function = _part(call, "function") or call
    arguments = _part(function, "arguments") or _part(function, "input") or {}
    return ToolCallBlock(
        tool_call_id=_part(call, "id"), tool_name=str(_part(function, "name") or ""), tool_kwargs=arguments
    )


def _part(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _to_message(message: ChatMessage, names: Mapping[str | None, str]) -> Message:
    answered = message.additional_kwargs.get("tool_call_id")
    named = [call for call in begun_in(message) if call.tool_name]
    calls = (ToolCall(c.tool_name, arguments_said(c.tool_kwargs), c.tool_call_id) for c in named)
    return Message(
        role=_ROLES[message.role],
        content="\n".join(text for block in message.blocks for text in _texts(block, _ROLES[message.role])),
        name=message.additional_kwargs.get("name") or (names.get(answered) if answered else None),
        tool_calls=tuple(calls),
        tool_call_id=answered,
    )


def _texts(block: Any, role: Role) -> Iterator[str]:
    """What a block says, in words. Raises `RequestError` for an image and the like that a user shows.

    Those of a tool or of another model are named, so that an agent goes on behind them.
    """
    if isinstance(block, TextBlock):
        yield block.text
    elif isinstance(block, CitableBlock):
        yield block.title
        for part in block.content:
            yield from _texts(part, role)
    elif isinstance(block, DocumentBlock) and block.data and (block.document_mimetype or "").startswith("text/"):
        yield block.resolve_document().read().decode(errors="replace")
    elif not isinstance(block, _SILENT_BLOCKS):
        if role not in ("tool", "assistant"):
            raise RequestError(f"a message holds a {type(block).__name__}: this ensemble reads text only")
        name = getattr(block, "title", None) or getattr(block, "url", None)
        yield block_text({"type": block.block_type, "name": str(name) if name else None})


def is_whole(call: ToolCallBlock) -> bool:
    """False for a call that `max_tokens` cut."""
    return not (isinstance(call.tool_kwargs, str) and call.tool_kwargs.endswith(CUT_MARK))


def arguments_so_far(call: ToolCallBlock) -> dict[str, Any]:
    """The arguments of a call that may still be written."""
    arguments = call.tool_kwargs
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {}
