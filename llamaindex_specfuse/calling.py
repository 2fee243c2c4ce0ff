"""Function calling: LlamaIndex's tools as the engine's, and the calls of an answer as LlamaIndex's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, ToolCallBlock
from llama_index.core.chat_engine.types import AgentChatResponse
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.program import function_program
from llama_index.core.tools import FunctionTool
from llama_index.core.tools.types import BaseTool

from llamaindex_specfuse.messages import arguments_so_far, begun_in, is_whole
from specfuse_shared import Tool, ToolCall
from specfuse_shared.errors import RequestError
from specfuse_shared.frameworks import CLOSED, choice_of

ToolLike = BaseTool | Tool | Mapping[str, Any]
ToolChoice = str | bool | Mapping[str, Any] | None
CUT_NOTE = "(cut short and not run: call it again with shorter arguments)"
"""Stands behind the name of a tool whose call was cut; agents tell the ensemble that they found no such tool."""


class NoToolCallError(RequestError, ValueError):
    """An answer calls no tool where one was expected; LlamaIndex expects a `ValueError` there."""


class ToolCalling(FunctionCallingLLM):
    """What makes an LLM of messages, `tools` and `tool_choice` one of LlamaIndex's function calling models."""

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: ToolChoice = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Arguments of a chat that may call `tools`; `tool_choice` wins over `tool_required`."""
        is_output = _is_output(tools)
        asked = [ChatMessage(user_msg, role=MessageRole.USER)] if isinstance(user_msg, str) else [user_msg]
        return {
            **({"whole": CLOSED} if is_output else {}),
            **kwargs,
            "messages": [*(chat_history or ()), *(message for message in asked if message is not None)],
            "tools": to_tools(tools),
            "tool_choice": choice_of(tool_choice, tool_required or is_output),
            "parallel_tool_calls": allow_parallel_tool_calls,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls of a response; while it streams, the last one with the arguments that are written so far.

        Raises `NoToolCallError` if there is none. One that was cut names no tool, so that agents, which do not ask for
        an error, carry nothing out and tell the ensemble why.
        """
        calls = begun_in(response.message)
        if error_on_no_tool_call and not any(map(is_whole, calls)):
            raise NoToolCallError("the answer calls no tool, or max_tokens cut the call: tool_required=True forces one")
        return [
            ToolSelection(
                tool_id=call.tool_call_id or "",
                tool_name=call.tool_name if is_whole(call) else f"{call.tool_name} {CUT_NOTE}",
                tool_kwargs=arguments_so_far(call),
            )
            for call in calls
            if is_whole(call) or not error_on_no_tool_call
        ]

    def predict_and_call(self, tools: Sequence[BaseTool], *args: Any, **kwargs: Any) -> AgentChatResponse:
        """Let the ensemble choose a tool, and call it; where text would be an error, a call is forced.

        Raises `UnfinishedValueError` if `max_tokens` has no room for the call.
        """
        return super().predict_and_call(tools, *args, **_forced(kwargs))

    async def apredict_and_call(self, tools: Sequence[BaseTool], *args: Any, **kwargs: Any) -> AgentChatResponse:
        """`predict_and_call`, asynchronously; parallel calls run at the same time."""
        return await super().apredict_and_call(tools, *args, **_forced(kwargs))


def _forced(options: dict[str, Any]) -> dict[str, Any]:
    forced = options.get("error_on_no_tool_call", True)
    return {"tool_required": forced, "whole": True if forced else "call", **options}


def _is_output(tools: Sequence[BaseTool]) -> bool:
    """The one tool stands for a class: LlamaIndex's programs need its call, and do not say so where they stream."""
    made = [tool for tool in tools or () if isinstance(tool, FunctionTool)]
    return len(tools or ()) == 1 and any(tool.real_fn.__module__ == function_program.__name__ for tool in made)


def to_tools(tools: Sequence[ToolLike] | None) -> list[Tool]:
    """LlamaIndex's tools, the engine's, or OpenAI's dictionaries (`ToolMetadata.to_openai_tool`)."""
    return [_to_tool(tool) for tool in tools or ()]


def _to_tool(tool: ToolLike) -> Tool:
    if isinstance(tool, Tool):
        return tool
    if isinstance(tool, Mapping):
        return Tool.from_dict(tool)
    metadata = tool.metadata
    return Tool(metadata.get_name(), metadata.description or "", metadata.get_parameters_dict())


def call_block(call: ToolCall) -> ToolCallBlock:
    return ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=dict(call.arguments))


@dataclass(frozen=True, slots=True)
class BegunCall:
    """A call as far as it is written."""

    id: str
    name: str
    arguments: str = ""

    def as_openai(self) -> dict[str, Any]:
        """The call as OpenAI writes it; LlamaIndex's programs look for it in a message's `additional_kwargs`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
