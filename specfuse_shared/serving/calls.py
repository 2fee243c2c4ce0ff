"""What a call of the engine takes: a conversation, its settings, and tools, as `Message`s or as OpenAI has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from specfuse_shared.errors import ConfigError, RequestError
from specfuse_shared.messages import Message, Tool
from specfuse_shared.settings.sampling_params import SamplingParams
from specfuse_shared.validation import unknown_setting

Conversation = str | Sequence[Message | Mapping[str, Any]]


class CallOptions(TypedDict, total=False):
    """Options of a call, besides its conversation and its `SamplingParams`.

    `tools`: `Tool`s or OpenAI's dictionaries. `tool_choice`: "auto", "required", "none" or a tool's name.
    `parallel_tool_calls`: one answer may call several tools. `timeout`: seconds. `members`: names of those that take
    part; all if None.
    """

    tools: Sequence[Tool | Mapping[str, Any]]
    tool_choice: str
    parallel_tool_calls: bool
    timeout: float | None
    members: Sequence[str] | None


def check_options(options: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for an option that no call takes."""
    for name in options:
        if name not in CallOptions.__annotations__:
            raise unknown_setting("a call of the engine", name, list(CallOptions.__annotations__))


def conversation_of(messages: Conversation) -> list[Message]:
    """Turns; one that answers a call by its id alone has the name of its tool."""
    if isinstance(messages, str):
        return [Message("user", messages)]
    turns = [m if isinstance(m, Message) else Message.from_dict(m) for m in messages]
    called = {call.id: call.name for turn in turns for call in turn.tool_calls}
    return [turn if turn.name else replace(turn, name=called.get(turn.tool_call_id)) for turn in turns]


def choice_of(tool_choice: str | bool | Mapping[str, Any] | None, required: bool = False) -> str:
    """The engine's "auto", "any", "none" or the name of a tool, from the ways in which other LLMs say it."""
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function") or tool_choice
        tool_choice = str(function.get("name") or tool_choice.get("type") or "")
    if tool_choice in (None, "", False):
        return "any" if required else "auto"
    return "any" if tool_choice in (True, "required") else str(tool_choice)


def tools_of(tools: Sequence[Tool | Mapping[str, Any]]) -> list[Tool]:
    return [tool if isinstance(tool, Tool) else Tool.from_dict(tool) for tool in tools]


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
