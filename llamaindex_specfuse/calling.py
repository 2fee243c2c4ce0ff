"""Function calling: LlamaIndex's tools as the engine's, and the calls of an answer as LlamaIndex's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, ToolCallBlock
from llama_index.core.chat_engine.types import AgentChatResponse
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools.types import BaseTool

from llamaindex_specfuse.messages import arguments_of
from specfuse_shared.errors import RequestError
from specfuse_shared.types import Tool, ToolCall


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
        tool_choice: str | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Arguments of a chat that may call `tools`; `tool_choice` wins over `tool_required`."""
        asked = [ChatMessage(user_msg, role=MessageRole.USER)] if isinstance(user_msg, str) else [user_msg]
        return {
            **kwargs,
            "messages": [*(chat_history or ()), *(message for message in asked if message is not None)],
            "tools": [to_tool(tool) for tool in tools],
            "tool_choice": choice_of(tool_choice, tool_required),
            "parallel_tool_calls": allow_parallel_tool_calls,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls that are complete; of a streamed response, those so far. Raises `RequestError` if there is none."""
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise RequestError("the answer calls no tool: tool_required=True forces a call")
        return [
            ToolSelection(tool_id=c.tool_call_id or "", tool_name=c.tool_name, tool_kwargs=dict(arguments_of(c)))
            for c in calls
        ]

    def predict_and_call(self, tools: Sequence[BaseTool], *args: Any, **kwargs: Any) -> AgentChatResponse:
        """Let the ensemble choose a tool, and call it; where text would be an error, a call is forced."""
        return super().predict_and_call(tools, *args, **_forced(kwargs))

    async def apredict_and_call(self, tools: Sequence[BaseTool], *args: Any, **kwargs: Any) -> AgentChatResponse:
        """`predict_and_call`, asynchronously; parallel calls run at the same time."""
        return await super().apredict_and_call(tools, *args, **_forced(kwargs))


def _forced(options: dict[str, Any]) -> dict[str, Any]:
    return {"tool_required": options.get("error_on_no_tool_call", True), **options}


def to_tool(tool: BaseTool) -> Tool:
    metadata = tool.metadata
    return Tool(metadata.get_name(), metadata.description or "", metadata.get_parameters_dict())


def choice_of(tool_choice: str | Mapping[str, Any] | None, required: bool = False) -> str:
    """The engine's "auto", "any", "none" or the name of a tool, from LlamaIndex's and OpenAI's ways to say it."""
    if isinstance(tool_choice, Mapping):
        tool_choice = str(tool_choice.get("function", tool_choice).get("name", ""))
    if tool_choice in (None, ""):
        return "any" if required else "auto"
    return "any" if tool_choice == "required" else tool_choice


def call_block(call: ToolCall) -> ToolCallBlock:
    return ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=dict(call.arguments))
