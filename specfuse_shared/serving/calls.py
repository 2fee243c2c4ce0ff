"""Arguments of an engine call: a conversation, its settings, and tools, as `Message`s or in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from specfuse_shared.config import SamplingParams
from specfuse_shared.errors import ConfigError, RequestError
from specfuse_shared.messages import Message, Tool
from specfuse_shared.validation import is_whole_text, unknown_setting

Conversation = str | Sequence[Message | Mapping[str, Any]]


class CallOptions(TypedDict, total=False):
    """Options of a call, besides its conversation and its `SamplingParams`.

    `tools`: `Tool`s or OpenAI's dictionaries. `tool_choice`: "auto", "required", "none" or a tool's name.
    `parallel_tool_calls`: one answer may call several tools. `timeout`: seconds. `members`: names of those that take
    part; all if None.
    """

    tools: Sequence[Tool | Mapping[str, Any]] | None
    tool_choice: str
    parallel_tool_calls: bool
    timeout: float | None
    members: Sequence[str] | None


def params_of(params: object) -> SamplingParams:
    """Raises `ConfigError` for anything but `SamplingParams`."""
    if not isinstance(params, SamplingParams | None):
        raise ConfigError(f"params must be SamplingParams, not {type(params).__name__}: SamplingParams(**settings)")
    return params or SamplingParams()


def check_options(options: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for an option that no call takes."""
    for name in options:
        if name not in CallOptions.__annotations__:
            raise unknown_setting("a call of the engine", name, list(CallOptions.__annotations__))


def conversation_of(messages: Conversation) -> list[Message]:
    """Turns; one that answers a call by its id alone has the name of its tool."""
    if isinstance(messages, str):
        return [Message("user", messages)]
    if not isinstance(messages, Sequence):
        raise RequestError(f"a conversation is a text or a list of turns, not {type(messages).__name__}")
    turns = list(map(_turn_of, messages))
    called = {call.id: call.name for turn in turns for call in turn.tool_calls if call.id is not None}
    return [turn if turn.name else replace(turn, name=called.get(turn.tool_call_id or "")) for turn in turns]


def _turn_of(message: object) -> Message:
    if isinstance(message, Message):
        return message
    if not isinstance(message, Mapping):
        raise RequestError(f"a turn is a Message or a dictionary with role and content, not {type(message).__name__}")
    return Message.from_dict(message)


def choice_of(tool_choice: str | bool | Mapping[str, Any] | None, required: bool = False) -> str:
    """The engine's "auto", "any", "none" or the name of a tool, from the ways in which other LLMs say it."""
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function") or tool_choice
        tool_choice = str(function.get("name") or tool_choice.get("type") or "")
    if tool_choice in (None, "", False):
        return "any" if required else "auto"
    return "any" if tool_choice in (True, "required") else str(tool_choice)


def tools_of(tools: Sequence[Tool | Mapping[str, Any]] | None) -> list[Tool]:
    if tools is not None and (isinstance(tools, str | Mapping) or not isinstance(tools, Sequence)):
        raise RequestError(f"tools must be a list of them, not {type(tools).__name__}")
    return [tool if isinstance(tool, Tool) else Tool.from_dict(tool) for tool in tools or ()]


def check_texts(what: str, texts: Sequence[str]) -> None:
    """Raises `RequestError` where there is no text, or half a character in one."""
    if isinstance(texts, str) or not texts:
        raise RequestError(f"{what} takes a list of texts, none of them empty")
    if not all(isinstance(text, str) and is_whole_text(text) for text in texts):
        raise RequestError(f"{what} takes whole texts: one is none, or holds half a character (a lone surrogate)")


def one_each(
    conversations: Sequence[Conversation], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams | None]:
    if isinstance(conversations, str):
        raise RequestError("generate_batch takes a list of conversations, not one text")
    if params is None or isinstance(params, SamplingParams):
        return [params] * len(conversations)
    if len(params) != len(conversations):
        raise ConfigError(f"{len(params)} params for {len(conversations)} conversations: give one for each, or one")
    return list(params)
