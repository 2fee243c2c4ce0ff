"""Messages, tools and tool calls of a conversation. Plain data, checked at construction."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from specfuse_shared.errors import RequestError
from specfuse_shared.validation import is_whole_text, parsed_json

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = ("system", "user", "assistant", "tool")
CUT_MARK = "(cut short)"
"""Suffix of the arguments of a call that was cut. The bracket before it closes nothing."""
_OPENAI_ROLES: Mapping[str, Role] = {"developer": "system", "function": "tool"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that an answer may call. `parameters`: JSON schema of its arguments, an object.

    `strict` refuses a schema with keywords that no grammar can enforce; else these are ignored.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise RequestError(f"a tool needs a name, not {self.name!r}")
        if not isinstance(self.description, str) or not is_whole_text(self.name + self.description):
            raise RequestError(f"the name and description of tool {self.name!r} must be texts of whole characters")
        if not isinstance(self.parameters, Mapping) or self.parameters.get("type", "object") != "object":
            raise RequestError(f"the parameters of tool {self.name!r} must be the JSON schema of an object")

    @classmethod
    def from_dict(cls, tool: Mapping[str, Any]) -> Self:
        """A tool in the form of OpenAI's clients.

        Args:
            tool: {"type": "function", "function": {"name": …, "description": …, "parameters": …}}.

        Returns:
            The tool.

        Raises:
            RequestError: The description is invalid, or names a tool that a provider runs, such as "web_search".

        Example:
            ```python
            from specfuse_shared import Tool

            print(Tool.from_dict({"type": "function", "function": {"name": "now", "parameters": {}}}).name)
            ```
        """
        function = tool.get("function", tool)
        if tool.get("type", "function") != "function" or not isinstance(function, Mapping) or "name" not in function:
            raise RequestError(
                f"the tool {dict(tool)!r} cannot be offered: give a function with a name and the "
                "JSON schema of its parameters (there are no provider-side tools here)"
            )
        fields = {key: function.get(key) for key in ("description", "parameters", "strict")}
        return cls(function["name"], **{key: value for key, value in fields.items() if value is not None})

    def as_function(self) -> dict[str, Any]:
        """The tool in the form of OpenAI's clients and of chat templates, without `strict`.

        Returns:
            {"type": "function", "function": {"name": …, "description": …, "parameters": …}}.

        Example:
            ```python
            from specfuse_shared import Tool

            print(Tool("now", "The time of day.").as_function()["function"]["name"])
            ```
        """
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def to_dict(self) -> dict[str, Any]:
        """The tool as plain JSON.

        Returns:
            An object that `Tool.from_dict` reads.

        Example:
            ```python
            from specfuse_shared import Tool

            tool = Tool("now", "The time of day.")
            print(Tool.from_dict(tool.to_dict()) == tool)
            ```
        """
        function = self.as_function()
        return {**function, "function": {**function["function"], "strict": True}} if self.strict else function


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call in an assistant message: the tool's `name`, its `arguments`, and an `id` for the result."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None

    @classmethod
    def from_dict(cls, call: Mapping[str, Any]) -> Self:
        """A call in the form of OpenAI's clients, with its arguments as JSON.

        Args:
            call: {"id": …, "function": {"name": …, "arguments": …}}.

        Returns:
            The call.

        Raises:
            RequestError: The call is invalid.

        Example:
            ```python
            from specfuse_shared import ToolCall

            print(ToolCall.from_dict({"id": "1", "function": {"name": "now", "arguments": "{}"}}).name)
            ```
        """
        function = call.get("function")
        if not isinstance(function, Mapping) or "name" not in function:
            raise RequestError(f"a tool call needs a function with a name, not {dict(call)!r}")
        return cls(function["name"], arguments_of(function.get("arguments")), call.get("id"))

    def check(self) -> None:
        """Check the arguments. A `Message` checks its calls by itself.

        Raises:
            RequestError: The arguments are not JSON, or contain a lone surrogate.

        Example:
            ```python
            from specfuse_shared import ToolCall

            ToolCall("add", {"a": 1, "b": 2}).check()
            ```
        """
        try:
            text = json.dumps(dict(self.arguments), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the arguments of a call of {self.name!r} are not JSON ({error})") from error
        if not is_whole_text(self.name + text):
            raise RequestError(f"a call of {self.name!r} holds half a character (a lone surrogate): replace it")

    def to_dict(self) -> dict[str, Any]:
        """The call as plain JSON.

        Returns:
            An object that `ToolCall.from_dict` reads. Its arguments are a JSON text.

        Example:
            ```python
            from specfuse_shared import ToolCall

            print(ToolCall("add", {"a": 1, "b": 2}, "call-1").to_dict())
            ```
        """
        function = {"name": self.name, "arguments": json.dumps(dict(self.arguments), ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


def arguments_of(arguments: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    """The arguments of a call, possibly parsed from JSON. Raises `RequestError` if they are not an object.

    For a cut call: its arguments if they were closed, else none.
    """
    if isinstance(arguments, Mapping):
        return arguments
    cut = isinstance(arguments, str) and arguments.endswith(f" {CUT_MARK}")
    try:
        parsed = parsed_json((arguments or "{}")[: -len(CUT_MARK) - 2 if cut else None])
    except (TypeError, ValueError):
        parsed = {} if cut else None
    if not isinstance(parsed, dict):
        raise RequestError(f"the arguments of a tool call are not a JSON object: {str(arguments)[:80]!r}")
    return parsed


def arguments_said(arguments: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    """`arguments_of` an earlier call of any model; none if they are not an object."""
    try:
        return arguments_of(arguments)
    except RequestError:
        return {}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    `content` is plain text: control strings inside it never become control tokens of a member.
    """

    role: Role
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise RequestError(f"message role {self.role!r} is unknown: use one of {', '.join(ROLES)}")
        if not isinstance(self.content, str):
            raise RequestError(
                f"message content must be text, not {type(self.content).__name__}: this engine reads text only"
            )
        if not isinstance(self.name, str | None):
            raise RequestError(f"a message's name must be text, not {self.name!r}")
        if not is_whole_text(self.content + (self.name or "")):
            raise RequestError("a message holds half a character (a lone surrogate): replace it before you send it")
        for call in self.tool_calls:
            call.check()

    @classmethod
    def from_dict(cls, message: Mapping[str, Any]) -> Self:
        """A message in the form of OpenAI's clients. Turns of models and tools are read leniently.

        Args:
            message: `role`, `content` (text, or a list of text parts), and for calls `tool_calls`, `tool_call_id`,
                `name`.

        Returns:
            The message.

        Raises:
            RequestError: The message is invalid.

        Example:
            ```python
            from specfuse_shared import Message

            print(Message.from_dict({"role": "user", "content": "Hello"}))
            ```
        """
        message = earlier_fields(message)
        if unknown := sorted(set(message) - set(_FIELDS)):
            raise RequestError(f"a message has unknown fields {unknown}: it may have {', '.join(_FIELDS[:5])}")
        role: Any = message.get("role", "")
        answers = message.get("tool_call_id")
        return cls(
            role=role if role not in tuple(_OPENAI_ROLES) else _OPENAI_ROLES[role],
            content=_text_of(message.get("content"), by_assistant=role in _SAID),
            name=message.get("name"),
            tool_calls=tuple(calls_before(message)),
            tool_call_id=None if answers is None else str(answers),
        )

    def to_dict(self) -> dict[str, Any]:
        """The message as plain JSON.

        Returns:
            An object that `Message.from_dict` reads.

        Example:
            ```python
            from specfuse_shared import Message

            print(Message("user", "Hello").to_dict())
            ```
        """
        calls = [call.to_dict() for call in self.tool_calls]
        extras = {"name": self.name, "tool_calls": calls or None, "tool_call_id": self.tool_call_id}
        return {"role": self.role, "content": self.content} | {k: v for k, v in extras.items() if v is not None}


_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "annotations", "audio", "function_call")
_SAID = ("assistant", "tool", "function")
"""Roles of turns that models and tools wrote, through any software."""
_NOTES = ("cache_control", "extra_content", "id", "metadata", "provider_specific_fields")
"""Fields in which other software leaves notes to itself in the turns of a user."""


def earlier_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a turn, without extras that other providers and clients add (reasoning, signatures, nulls).

    In turns of models and tools every unknown field is an extra. In a user's turn an unknown field is a mistake.
    """
    is_said = message.get("role") in _SAID
    return {k: v for k, v in message.items() if k in _FIELDS or not (is_said or k in _NOTES or v is None)}


def calls_before(message: Mapping[str, Any]) -> Iterator[ToolCall]:
    """The calls of an earlier turn. One without a name is left out; arguments that are no object are none."""
    calls, legacy = message.get("tool_calls"), message.get("function_call")
    for call in [*(calls if isinstance(calls, (list, tuple)) else ()), {"function": legacy}]:
        if not isinstance(call, Mapping):
            continue
        function, custom = call.get("function"), call.get("custom")
        if isinstance(custom, Mapping):
            function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str) and name:
            number = call.get("id")
            yield ToolCall(name, arguments_said(function.get("arguments")), None if number is None else str(number))


TEXT_BLOCKS = {"text": "text", "input_text": "text", "output_text": "text", "text-plain": "text", "refusal": "refusal"}
"""Block types that are text, and the field with the text."""
SILENT_BLOCKS = re.compile(
    "reasoning(_.*)?|(redacted_)?thinking|thought|non_standard|executable_code|code_execution_result"
    "|(.*_)?tool_(call|call_chunk|use|result)|(.*_)?call|mcp_.*"
)
"""Block types of an assistant that are not text: reasoning, calls (answered ones come from `tool_calls`), and the
results of other providers' tools."""
_LONGEST_NAME = 200
_KIND = re.compile(r"(?:input_)?(\w+?)(?:_url)?")


def block_text(block: Mapping[str, Any]) -> str:
    """A block of a tool's result as text: its text, or its type and name.

    An agent then continues after a file, an image or a sound, which no member reads, and knows that it exists.
    """
    kind = str(block.get("type"))
    nothing: Mapping[str, Any] = {}
    inner = next((block[key] for key in (kind, "source") if isinstance(block.get(key), Mapping)), nothing)
    content = block.get("content")
    if isinstance(content, (list, tuple)):
        texts = [block.get("title"), *(block_text(part) for part in content if isinstance(part, Mapping))]
        return "\n".join(text for text in texts if isinstance(text, str) and text)
    for text in (block.get(TEXT_BLOCKS.get(kind, "text")), inner.get("text"), content):
        if isinstance(text, str):
            return text
    places = [block, inner, block.get("metadata"), block.get("extras")]
    keys = ("filename", "name", "title", "file_id", "uri", "url", "file_url", "image_url")
    names = (place.get(key) for place in places if isinstance(place, Mapping) for key in keys)
    name = next((n for n in names if isinstance(n, str) and n and not n.startswith("data:")), "")[:_LONGEST_NAME]
    called = match[1] if (match := _KIND.fullmatch(kind)) else kind
    return f"[{called}: {name}]" if name else f"[{called}]"


def _text_of(content: Any, by_assistant: bool) -> Any:
    """The text of OpenAI's message content: a string, or parts of text. `by_assistant`: of any kind."""
    if not isinstance(content, (list, tuple)):
        return content or ""
    if by_assistant:
        blocks = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        return "".join(map(_said, [block for block in blocks if isinstance(block, Mapping)]))
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in TEXT_BLOCKS:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"a message holds a part of type {kind!r}: this engine reads text only")
        if not isinstance(part.get(TEXT_BLOCKS[part["type"]]), str):
            raise RequestError(f"a part of type {part['type']!r} of a message has no {part['type']!r}: give its text")
    return "".join(part[TEXT_BLOCKS[part["type"]]] for part in content)


def _said(block: Mapping[str, Any]) -> str:
    kind = str(block.get("type"))
    if kind in TEXT_BLOCKS:
        return str(block.get(TEXT_BLOCKS[kind]) or "")
    return "" if SILENT_BLOCKS.fullmatch(kind) and kind != "tool_result" else block_text(block)
