"""Validated bodies of OpenAI's Responses API, and their translation into the body of a chat.

Nothing is stored between requests: a client sends the whole conversation as `input`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, JsonValue, Tag, field_validator, model_validator

from specfuse_shared.api_server.requests.bodies import (
    MOST_TURNS,
    AllowedChoiceBody,
    AllowedToolsBody,
    Asked,
    Body,
    ChatBody,
    FormatBody,
    FunctionBody,
    MessageBody,
    NamedBody,
    SchemaBody,
    Several,
    ToolBody,
    ToolChoiceBody,
)
from specfuse_shared.config import TopLogprobs
from specfuse_shared.messages import earlier_fields

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that requests log-probabilities."""
NOTHING_KEPT = "no response is stored here"
Content = str | Several[dict[str, JsonValue]]


class ItemBody(Body):
    """Fields that every item may have and that have no effect."""

    id: JsonValue = None
    status: JsonValue = None


class EarlierItem(ItemBody):
    """Turns of models and tools: fields that other software adds are ignored."""

    model_config = ConfigDict(extra="ignore")


class MessageItem(ItemBody):
    """A turn of any role."""

    type: Literal["message"] = "message"
    role: str
    content: Content
    phase: JsonValue = None

    @model_validator(mode="before")
    @classmethod
    def _earlier(cls, item: Any) -> Any:
        if not isinstance(item, dict):
            return item
        earlier = earlier_fields(item)
        return {key: value for key, value in item.items() if key in earlier or key in cls.model_fields}


class CallItem(EarlierItem):
    """A call of a tool in an earlier answer."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str
    name: str
    arguments: JsonValue = None
    input: JsonValue = None

    def called(self) -> dict[str, Any]:
        """The call in the form of chats."""
        arguments = {"input": self.input} if self.type == "custom_tool_call" else self.arguments
        return {"id": self.call_id, "function": {"name": self.name, "arguments": arguments}}


class ResultItem(EarlierItem):
    """The result of a tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content


class SilentItem(EarlierItem):
    """Reasoning of an earlier answer, and results of another provider's tools. Both are ignored."""

    type: str


_SILENT_ITEMS = re.compile(r"reasoning|compaction|.*_call|.*_call_output|mcp_.*")


def _kind(item: Any) -> str:
    kind = str((item.get("type") if isinstance(item, dict) else None) or "message")
    tags = {"custom_tool_call": "function_call", "custom_tool_call_output": "function_call_output"}
    if (tag := tags.get(kind, kind)) in ("message", *tags.values()):
        return f"item-{tag}"
    return "item-silent" if _SILENT_ITEMS.fullmatch(kind) else kind


Item = Annotated[
    Annotated[MessageItem, Tag("item-message")]
    | Annotated[CallItem, Tag("item-function_call")]
    | Annotated[ResultItem, Tag("item-function_call_output")]
    | Annotated[SilentItem, Tag("item-silent")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="has an unsupported type: send message, function_call, function_call_output "
        f"or reasoning (there are no provider-side tools, and {NOTHING_KEPT} for an item_reference)",
    ),
]


class OfFunctions(Body):
    type: Literal["function"]


class FunctionToolBody(FunctionBody, OfFunctions):
    """A tool. The Responses API describes it without a nested object."""


class NamedToolBody(NamedBody, OfFunctions):
    """The tool that has to be called."""


class AllowedNamesBody(AllowedToolsBody):
    """The allowed tools. The Responses API lists them without a nested object."""

    type: Literal["allowed_tools"]


class TextFormatBody(SchemaBody):
    type: Literal["text", "json_object", "json_schema"]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("of type json_schema needs a schema")
        return self


class TextBody(Body):
    format: TextFormatBody | None = None
    verbosity: JsonValue = None


class ReasoningBody(Body):
    """`summary`: whether to report reasoning as a summary. The members' own settings decide whether they think."""

    effort: JsonValue = None
    summary: str | None = None
    generate_summary: str | None = None
    context: JsonValue = None


class ResponsesBody(Asked):
    """POST /v1/responses."""

    input: str | Several[Item]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=1)
    tools: Several[FunctionToolBody] | None = None
    tool_choice: str | NamedToolBody | AllowedNamesBody | None = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    include: Several[str] | None = None
    top_logprobs: TopLogprobs | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=16)

    ignored = Asked.ignored - {"store", "metadata"} | {"max_tool_calls", "prompt_cache_options"}
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Asked.neutral,
        "store": (False,),
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "prompt": (),
        "truncation": ("disabled",),
        "context_management": ([],),
        "moderation": (),
    }
    instead: ClassVar[Mapping[str, str]] = {
        **Asked.instead,
        "store": f"{NOTHING_KEPT}: leave it out, or send false",
        "previous_response_id": f"{NOTHING_KEPT}: send the whole conversation as input",
        "conversation": f"{NOTHING_KEPT}: send the whole conversation as input",
        "background": f"{NOTHING_KEPT} to be fetched later: leave it out, and stream the answer",
        "truncation": "a prompt that is too long is refused: shorten it",
    }

    @field_validator("input")
    @classmethod
    def _some(cls, value: str | list[Any]) -> str | list[Any]:
        if isinstance(value, str):
            return value
        if all(isinstance(item, SilentItem) for item in value):
            raise ValueError("holds no message")
        if len(value) >= MOST_TURNS:  # the instructions are a turn, too
            raise ValueError(f"has {len(value)} items, and the limit is {MOST_TURNS - 1}: shorten the conversation")
        return value

    @property
    def summarises(self) -> bool:
        """Whether reasoning is reported as a summary, where most clients expect it."""
        reasoning = self.reasoning or ReasoningBody()
        return bool(reasoning.summary or reasoning.generate_summary)

    def chat(self) -> ChatBody:
        """The same request as the body of a chat."""
        shared = {name: getattr(self, name) for name in Asked.model_fields}
        return ChatBody(
            **shared,
            messages=_turns(self.instructions, self.input),
            max_completion_tokens=self.max_output_tokens,
            logprobs=LOGPROBS in (self.include or ()) or bool(self.top_logprobs),
            top_logprobs=self.top_logprobs,
            tools=[_tool(tool) for tool in self.tools or ()],
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(self.text),
        )


def _turns(instructions: str | None, items: str | Sequence[Any]) -> list[MessageBody]:
    """One turn per message. Calls belong to the assistant's turn before them."""
    turns: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in [MessageItem(role="user", content=items)] if isinstance(items, str) else items:
        if isinstance(item, MessageItem):
            turns.append({"role": item.role, "content": item.content})
        elif isinstance(item, ResultItem):
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        elif isinstance(item, CallItem):
            if not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant"})
            turns[-1].setdefault("tool_calls", []).append(item.called())
    return [MessageBody(**turn) for turn in turns]


def _tool(tool: FunctionToolBody) -> ToolBody:
    return ToolBody(type="function", function=FunctionBody(**tool.model_dump(exclude={"type"})))


def _choice(
    choice: str | NamedToolBody | AllowedNamesBody | None,
) -> str | ToolChoiceBody | AllowedChoiceBody | None:
    if isinstance(choice, AllowedNamesBody):
        allowed = AllowedToolsBody(mode=choice.mode, tools=choice.tools)
        return AllowedChoiceBody(type="allowed_tools", allowed_tools=allowed)
    if not isinstance(choice, NamedToolBody):
        return choice
    return ToolChoiceBody(type="function", function=NamedBody(name=choice.name))


def _format(text: TextBody | None) -> FormatBody | None:
    if text is None or text.format is None:
        return None
    schema = SchemaBody(**text.format.model_dump(by_alias=True, exclude={"type"}))
    return FormatBody(type=text.format.type, json_schema=schema if text.format.type == "json_schema" else None)
