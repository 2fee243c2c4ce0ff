"""LangChain messages, tools, tool choices and response formats for the engine; its events as LangChain chunks."""

from __future__ import annotations

import base64
import binascii
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import ToolCallChunk
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.tools import BaseTool
from langchain_core.tools import Tool as SimpleTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_function
from pydantic import BaseModel, Field

from specfuse_shared import (
    ConfigError,
    Event,
    Grammar,
    Message,
    SegmentEvent,
    Tool,
    ToolCall,
    Usage,
)
from specfuse_shared.errors import RequestError
from specfuse_shared.frameworks import (
    RESPONSE_FORMATS,
    SILENT_BLOCKS,
    TEXT_BLOCKS,
    AnswerEnd,
    AnswerPart,
    AnswerReader,
    CallReader,
    Detail,
    Role,
    Whole,
    arguments_said,
    block_text,
    choice_of,
    reasoning_tokens,
    response_schema,
    segment_record,
    usage_record,
    value_of,
)

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
    """The messages in the order of the conversation: `trim_messages` counts its end in reverse order.

    A tool result before its call, or a system message after all turns, shows the reverse order.
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
    """The calls of a turn. An invalid call counts only if a tool message answers it."""
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
    """The text of a file that came as data. Any other file is replaced by its name."""
    try:
        if data := block.get("base64"):
            return base64.b64decode(data).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise RequestError(f"a text-plain block holds no text in UTF-8 as base64: {error}") from error
    return f"[a text file: {block.get('title') or block.get('url') or block.get('file_id') or 'empty'}]"


PROVIDER = "specfuse"
_FIRST_CALL = 2
"""LangChain merges blocks by index. Reasoning and text get the first two."""


class SegmentChunk(ChatGenerationChunk):
    """The chunk of a verified segment, with its record for `_SegmentEvents`."""

    segment: dict[str, Any] = Field(exclude=True, repr=False)
    """The segment's text and record."""


class ChunkBuilder:
    """Turns events into chunks: reasoning, one chunk per verified segment, then an empty one with usage and the record.

    `detail`: how much of the record to include. For the rest see `AnswerReader`.
    """

    def __init__(
        self,
        model_name: Callable[[], str],
        detail: Detail,
        *,
        reader: CallReader | None,
        whole: Whole = "none",
        may_close: bool = False,
    ) -> None:
        self._model_name = model_name
        self._detail = detail
        self._answer = AnswerReader(reader, detail, whole=whole, may_close=may_close)

    def chunks(self, event: Event) -> list[ChatGenerationChunk]:
        """The chunks of an event."""
        part = self._answer.read(event)
        chunks = [*_reasoning(part.thoughts)]
        if isinstance(event, SegmentEvent):
            first, *rest = _chunks(part, **self._kept({"specfuse_segments": [record := segment_record(event)]}))
            chunks += [SegmentChunk(message=first.message, segment={"text": first.message.text, **record}), *rest]
        elif part.text or part.calls:
            chunks += _chunks(part)
        if part.end is not None:
            chunks.append(self._last(part.end))
        return chunks

    def _kept(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {} if self._detail == "none" else {"additional_kwargs": kwargs}

    def _last(self, end: AnswerEnd) -> ChatGenerationChunk:
        info: dict[str, Any] = {
            "finish_reason": end.finish_reason,
            "model_name": self._model_name(),
            "model_provider": PROVIDER,
        }
        if end.logprobs is not None:
            info["logprobs"] = end.logprobs
        record = {"specfuse": end.record} if end.record else {}
        last = AIMessageChunk(
            content="",
            chunk_position="last",
            usage_metadata=usage_metadata(end.result.usage),
            response_metadata={**info, **record},
        )
        return ChatGenerationChunk(message=last, generation_info=info)


def usage_metadata(of: Usage) -> UsageMetadata:
    """The token counts of an answer as LangChain's `UsageMetadata`."""
    counts, thoughts = usage_record(of), reasoning_tokens(of)
    usage = UsageMetadata(
        input_tokens=counts["prompt_tokens"],
        output_tokens=counts["completion_tokens"],
        total_tokens=counts["total_tokens"],
    )
    return {**usage, "output_token_details": {"reasoning": thoughts}} if thoughts else usage


def _reasoning(thoughts: str) -> Iterator[ChatGenerationChunk]:
    """`content_blocks` makes reasoning blocks of this key, as it does for ChatOllama."""
    if thoughts:
        yield from _chunks(AnswerPart(), additional_kwargs={"reasoning_content": thoughts})


def _chunks(part: AnswerPart, **fields: Any) -> Iterator[ChatGenerationChunk]:
    """One chunk, or one of text and one of calls: LangChain makes blocks of calls only where there is no text."""
    if part.text or not part.calls:
        yield ChatGenerationChunk(message=AIMessageChunk(content=part.text, **fields))
    if part.calls:
        calls = [
            ToolCallChunk(
                name=call.name,
                args=call.arguments,
                id=call.id,
                index=_FIRST_CALL + call.index,
                type="tool_call_chunk",
            )
            for call in part.calls
        ]
        rest = {} if part.text else fields
        yield ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=calls, **rest))


Foreign = Mapping[str, Any] | type | Callable[..., Any] | BaseTool
ToolLike = Foreign | Tool
_SCHEMA_KEYS = ("parameters", "input_schema", "schema")
"""Keys of the arguments' schema in common descriptions of functions."""


def to_tools(tools: Sequence[ToolLike], strict: bool | None = None) -> list[Tool]:
    """Functions, classes, `BaseTool`s, or tools and schemas as dictionaries. `strict` overrides their own."""
    return [_to_tool(tool, strict) for tool in tools]


def to_choice(choice: Any, tools: Sequence[Tool]) -> str:
    """Any form of `tool_choice`: None, a bool, "auto", "any", "required", "none", a name, or OpenAI's dictionary.

    True forces a call, False means "auto". Raises `ConfigError` for a tool that is not bound.
    """
    names = [tool.name for tool in tools]
    if choice is True and len(names) == 1:
        return names[0]
    requested = choice_of(choice)
    if requested in (*names, "auto", "none") or (requested == "any" and names):
        return requested
    if not names:
        raise ConfigError(f"tool_choice {choice!r} needs tools, and none are bound: bind tools, or leave it out")
    raise ConfigError(f"tool_choice {requested!r} is not one of the bound tools {names}, 'auto', 'any' or 'none'")


def to_schema(response_format: Any) -> tuple[dict[str, Any] | None, bool]:
    """The JSON schema of a response format, None for plain text, and whether it must be enforced to the letter.

    Takes {"type": "text" | "json_object" | "json_schema"}, a JSON schema, a Pydantic class or a TypedDict.
    """
    if isinstance(response_format, Mapping) and response_format.get("type") in RESPONSE_FORMATS:
        return response_schema(response_format)
    return json_schema_of(response_format), False


def json_schema_of(schema: Any) -> dict[str, Any]:
    """The JSON schema of a class or dictionary. A JSON schema is returned unchanged."""
    if isinstance(schema, Mapping):
        function = _function_of(schema)
        inner = next((function[key] for key in _SCHEMA_KEYS if _is_named(function, key)), None)
        if inner is None:
            return dict(schema)
        titles = {"title": function["name"], "description": function.get("description")}
        return {**{key: value for key, value in titles.items() if value}, **inner}
    if _is_model(schema):
        return dict(schema.model_json_schema())
    return convert_to_json_schema(schema)


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call for a cache key. A class becomes its schema, because its fields may change."""
    response_format = options.get("response_format")
    return (
        {**options, "response_format": json_schema_of(response_format)}
        if isinstance(response_format, type)
        else dict(options)
    )


def to_value(response_format: Any, grammar: Grammar | None) -> tuple[Grammar | None, list[Message]]:
    """The required form of an answer, and the instruction that members receive about it."""
    if response_format is None:
        return grammar, []
    if grammar is not None:
        raise ConfigError("a call takes a response_format or a grammar, not both: both constrain the answer")
    schema, strict = to_schema(response_format)
    return value_of(schema, strict, not isinstance(response_format, Mapping) or response_format.get("shown", True))


def schema_tool(schema: Any, strict: bool | None = None) -> Tool:
    """The tool whose arguments are a value of the schema; one without a title is called "output"."""
    if isinstance(schema, Mapping) and "name" not in _function_of(schema) and not schema.get("title"):
        schema = {"title": "output", **schema}
    return _to_tool(schema, strict)


def _to_tool(tool: ToolLike, strict: bool | None) -> Tool:
    if isinstance(tool, Tool):
        return tool
    function = _as_function(tool)
    return Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters=function.get("parameters") or {"type": "object", "properties": {}},
        strict=bool(function.get("strict") if strict is None else strict),
    )


def _as_function(tool: Foreign) -> dict[str, Any]:
    """Name, description and parameters unchanged; anything without a JSON schema is converted."""
    if isinstance(tool, Mapping):
        return _mapped(tool)
    if _is_model(tool):
        name = tool.model_config.get("title") or tool.__name__
        return {
            "name": name,
            "description": inspect.cleandoc(tool.__doc__ or ""),
            "parameters": tool.model_json_schema(),
        }
    if isinstance(tool, BaseTool) and not (isinstance(tool, SimpleTool) and not tool.args_schema):
        arguments = tool.tool_call_schema
        schema = arguments.model_json_schema() if _is_model(arguments) else arguments
        if isinstance(schema, Mapping):
            return {"name": tool.name, "description": tool.description, "parameters": schema}
    return convert_to_openai_function(tool)


def _mapped(tool: Mapping[str, Any]) -> dict[str, Any]:
    if "toolSpec" in tool:
        return convert_to_openai_function(tool)
    function = _function_of(tool)
    kind, schema = tool.get("type"), next((function[key] for key in _SCHEMA_KEYS if key in function), None)
    if "name" in function and (schema is not None or kind in (None, "function", "custom")):
        return {**function, "parameters": schema}
    if title := tool.get("title"):
        rest = {key: value for key, value in tool.items() if key not in ("title", "description")}
        return {"name": title, "description": tool.get("description"), "parameters": rest}
    if kind is not None and kind not in ("function", "object"):
        raise ConfigError(
            f"a tool of type {kind!r} is run by another provider, not here: give a function, a class, a BaseTool or "
            '{"type": "function", "function": {"name": …, "parameters": {…}}}'
        )
    raise ConfigError(f"a tool needs a name (or its JSON schema a title), but has only {sorted(tool)}")


def _function_of(description: Mapping[str, Any]) -> Mapping[str, Any]:
    """The value of "function" in an OpenAI dictionary, else the dictionary itself."""
    function = description.get("function")
    return function if isinstance(function, Mapping) else description


def _is_named(function: Mapping[str, Any], key: str) -> bool:
    return isinstance(function.get("name"), str) and isinstance(function.get(key), Mapping)


def _is_model(value: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(value, type) and issubclass(value, BaseModel)
