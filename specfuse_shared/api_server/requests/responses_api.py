"""What clients of OpenAI's Responses API send, checked, and as the body of a chat, which the engine is called with.

Nothing is kept between requests: a client sends the whole conversation as `input`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, JsonValue, Tag, field_validator, model_validator

from specfuse_shared.api_server.requests.bodies import (
    MOST_TURNS,
    Asked,
    Body,
    CallBody,
    CalledBody,
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
from specfuse_shared.settings.sampling_params import MOST_TOP_LOGPROBS

LOGPROBS = "message.output_text.logprobs"
"""What `include` asks for log-probabilities with."""
NOTHING_KEPT = "no response is kept here"
Content = str | Several[dict[str, JsonValue]]


class ItemBody(Body):
    """What every item may have, and nobody reads."""

    id: JsonValue = None
    status: JsonValue = None


class MessageItem(ItemBody):
    """A turn of anybody."""

    type: Literal["message"] = "message"
    role: str
    content: Content
    phase: JsonValue = None


class CallItem(ItemBody):
    """A call of a tool in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str | dict[str, JsonValue]
    caller: JsonValue = None
    namespace: JsonValue = None
    parsed_arguments: JsonValue = None


class ResultItem(ItemBody):
    """What a called tool gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    caller: JsonValue = None
    created_by: JsonValue = None
    name: JsonValue = None
    namespace: JsonValue = None


class ReasoningItem(ItemBody):
    """Thoughts of an earlier answer, which nobody reads."""

    type: Literal["reasoning"]
    summary: JsonValue = None
    content: JsonValue = None
    encrypted_content: JsonValue = None


def _kind(item: Any) -> str:
    return f"item-{item.get('type') or 'message'}" if isinstance(item, dict) else "item-message"


Item = Annotated[
    Annotated[MessageItem, Tag("item-message")]
    | Annotated[CallItem, Tag("item-function_call")]
    | Annotated[ResultItem, Tag("item-function_call_output")]
    | Annotated[ReasoningItem, Tag("item-reasoning")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="is of a type that is not read here: send message, function_call, function_call_output "
        f"or reasoning (there are no tools of a provider, and {NOTHING_KEPT} that an item_reference could mean)",
    ),
]


class OfFunctions(Body):
    type: Literal["function"]


class FunctionToolBody(FunctionBody, OfFunctions):
    """A tool, which the Responses API describes without an object of its own."""


class NamedToolBody(NamedBody, OfFunctions):
    """The tool that has to be called."""


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
    """`summary`: where thoughts are told; whether and how long members think is their own setting."""

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
    tool_choice: str | NamedToolBody | None = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    include: Several[str] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP_LOGPROBS)
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
        if all(isinstance(item, ReasoningItem) for item in value):
            raise ValueError("holds no message")
        if len(value) >= MOST_TURNS:  # the instructions are a turn, too
            raise ValueError(f"has {len(value)} items, and {MOST_TURNS - 1} is the most: shorten the conversation")
        return value

    @property
    def summarises(self) -> bool:
        """Thoughts are told as a summary, where most clients look for them."""
        reasoning = self.reasoning or ReasoningBody()
        return bool(reasoning.summary or reasoning.generate_summary)

    def chat(self) -> ChatBody:
        """The same as a chat."""
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


def _turns(instructions: str | None, given: str | Sequence[Any]) -> list[MessageBody]:
    """A turn for each message; calls belong to the assistant's turn before them."""
    turns = [MessageBody(role="system", content=instructions)] if instructions else []
    for item in [MessageItem(role="user", content=given)] if isinstance(given, str) else given:
        if isinstance(item, MessageItem):
            turns.append(MessageBody(role=item.role, content=_content(item.content)))
        elif isinstance(item, ResultItem):
            turns.append(MessageBody(role="tool", tool_call_id=item.call_id, content=_content(item.output)))
        elif isinstance(item, CallItem):
            if not turns or turns[-1].role != "assistant":
                turns.append(MessageBody(role="assistant"))
            called = CalledBody(name=item.name, arguments=item.arguments)
            turns[-1].tool_calls = turns[-1].tool_calls or []
            turns[-1].tool_calls.append(CallBody(id=item.call_id, function=called))
    return turns


def _content(content: str | Iterable[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Parts of text by the name that they have in a chat."""
    if isinstance(content, str):
        return content
    own = ("input_text", "output_text")
    return [{"type": "text", "text": part.get("text")} if part.get("type") in own else part for part in content]


def _tool(tool: FunctionToolBody) -> ToolBody:
    return ToolBody(type="function", function=FunctionBody(**tool.model_dump(exclude={"type"})))


def _choice(choice: str | NamedToolBody | None) -> str | ToolChoiceBody | None:
    if not isinstance(choice, NamedToolBody):
        return choice
    return ToolChoiceBody(type="function", function=NamedBody(name=choice.name))


def _format(text: TextBody | None) -> FormatBody | None:
    if text is None or text.format is None:
        return None
    schema = SchemaBody(**text.format.model_dump(by_alias=True, exclude={"type"}))
    return FormatBody(type=text.format.type, json_schema=schema if text.format.type == "json_schema" else None)
