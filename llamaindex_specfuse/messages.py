"""LlamaIndex's messages and tools for the engine, and its events as LlamaIndex's responses.

One fold serves every endpoint, streamed or complete, synchronous or asynchronous. Each verified segment is also sent as
an instrumentation event.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CitableBlock,
    CitationBlock,
    CompletionResponse,
    DocumentBlock,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.chat_engine.types import AgentChatResponse
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.program import function_program
from llama_index.core.tools import FunctionTool
from llama_index.core.tools.types import BaseTool
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import active_instrument_tags
from llama_index_instrumentation.span import active_span_id
from pydantic_core import from_json

from specfuse_shared import EnsembleResult, Message, TokenLogprob, Tool, ToolCall, TopLogprob
from specfuse_shared.errors import RequestError, UnfinishedValueError, ValueTooLongError
from specfuse_shared.events import Event, SegmentEvent, ThinkingEvent
from specfuse_shared.frameworks import (
    CLOSED,
    CUT_MARK,
    AnswerEnd,
    AnswerPart,
    AnswerReader,
    CallDelta,
    CallReader,
    Detail,
    Role,
    Whole,
    arguments_said,
    block_text,
    candidate_records,
    choice_of,
    fold_async,
    segment_record,
)

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
"""ReAct agents pass no stop strings. Without one, the model would invent the tool's result."""
_SILENT_BLOCKS = (CachePoint, CitationBlock, ThinkingBlock, ToolCallBlock)
"""Blocks without text of the turn: cache points, citations, reasoning, and calls, which are read separately."""


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
    """The calls of a turn: its blocks, or the `additional_kwargs` that other LLMs and older versions use.

    A call that is incomplete or was cut exists only there.
    """
    return max(_blocks(message), _begun(message), key=len)


def _blocks(message: ChatMessage) -> list[ToolCallBlock]:
    return [block for block in message.blocks if isinstance(block, ToolCallBlock)]


def _begun(message: ChatMessage) -> list[ToolCallBlock]:
    extras = message.additional_kwargs
    calls = extras.get("tool_calls") or [call for call in [extras.get("function_call")] if call]
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
    """The text of a block. Raises `RequestError` for media from a user.

    Media from a tool or another model are replaced by their names, so that an agent can continue.
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


ToolLike = BaseTool | Tool | Mapping[str, Any]
ToolChoice = str | bool | Mapping[str, Any] | None
CUT_NOTE = "(cut short and not run: call it again with shorter arguments)"
"""Suffix of the name of a tool whose call was cut. Agents then report that no such tool exists."""


class NoToolCallError(RequestError, ValueError):
    """An answer calls no tool where one was expected; LlamaIndex expects a `ValueError` there."""


class ToolCalling(FunctionCallingLLM):
    """LlamaIndex's function calling interface, on top of messages, `tools` and `tool_choice`."""

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
        turns = [ChatMessage(user_msg, role=MessageRole.USER)] if isinstance(user_msg, str) else [user_msg]
        return {
            **({"whole": CLOSED} if is_output else {}),
            **kwargs,
            "messages": [*(chat_history or ()), *(message for message in turns if message is not None)],
            "tools": to_tools(tools),
            "tool_choice": choice_of(tool_choice, tool_required or is_output),
            "parallel_tool_calls": allow_parallel_tool_calls,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls of a response; while it streams, the last one with the arguments that are written so far.

        Raises `NoToolCallError` if there is none. A cut call names no existing tool: agents do not ask for an error, so
        they execute nothing and report the reason to the ensemble.
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

        Raises `UnfinishedValueError` if `max_tokens` is too small for the call.
        """
        return super().predict_and_call(tools, *args, **_forced(kwargs))

    async def apredict_and_call(self, tools: Sequence[BaseTool], *args: Any, **kwargs: Any) -> AgentChatResponse:
        """`predict_and_call`, asynchronously; parallel calls run at the same time."""
        return await super().apredict_and_call(tools, *args, **_forced(kwargs))


def _forced(options: dict[str, Any]) -> dict[str, Any]:
    forced = options.get("error_on_no_tool_call", True)
    return {"tool_required": forced, "whole": True if forced else "call", **options}


def _is_output(tools: Sequence[BaseTool]) -> bool:
    """Whether the only tool represents an output class. LlamaIndex's programs need its call, but do not require it."""
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
    """A call that may be incomplete."""

    id: str
    name: str
    arguments: str = ""

    def as_openai(self) -> dict[str, Any]:
        """The call as OpenAI writes it; LlamaIndex's programs look for it in a message's `additional_kwargs`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class SpecFuseSegmentEvent(BaseEvent):
    """One verified segment of an answer, sent to LlamaIndex's dispatcher before the segment is streamed.

    `span_id` and `tags` are the caller's, even if the answer is consumed after its span closed or
    in another thread.
    """

    text: str
    """The new text of the answer."""
    record: dict[str, Any]
    """The content of `raw["specfuse"]`: round, member, scores, weights, candidates, offsets."""

    @classmethod
    def class_name(cls) -> str:
        """The name of the class in LlamaIndex's events.

        Returns:
            "SpecFuseSegmentEvent".

        Example:
            ```python
            from llamaindex_specfuse import SpecFuseSegmentEvent

            print(SpecFuseSegmentEvent.class_name())
            ```
        """
        return "SpecFuseSegmentEvent"


_dispatcher = get_dispatcher(__name__)


@dataclass(frozen=True, slots=True)
class AnswerStep:
    """One step of an answer: the new text, the text so far, and the details."""

    delta: str
    text: str
    raw: dict[str, Any]
    calls: tuple[ToolCall, ...] = ()
    """The tool calls that are complete."""
    begun: tuple[BegunCall, ...] = ()
    """All tool calls, the last of which may still be written."""
    thoughts: tuple[ThinkingBlock, ...] = ()
    """The reasoning of each member so far."""
    thinking_delta: str = ""
    """New reasoning, before the answer begins."""
    counted: Mapping[str, Any] = field(default_factory=dict)
    """With the last step: the finish reason and the token counts."""
    logprobs: list[list[LogProb]] | None = None
    """With the last step: the log-probabilities of the whole answer, if requested."""

    def completion(self) -> CompletionResponse:
        """Its `additional_kwargs` stay empty: LlamaIndex would copy them into a message."""
        return CompletionResponse(text=self.text, delta=self.delta, raw=self.raw, logprobs=self.logprobs)

    def chat(self) -> ChatResponse:
        """The text always has a block: without one, LlamaIndex writes the turn as "assistant: None"."""
        message = ChatMessage(
            role=MessageRole.ASSISTANT,
            blocks=[*self.thoughts, TextBlock(text=self.text), *map(call_block, self.calls)],
            additional_kwargs={"tool_calls": [call.as_openai() for call in self.begun]} if self.begun else {},
        )
        return ChatResponse(
            message=message,
            delta=self.delta,
            raw=self.raw,
            logprobs=self.logprobs,
            additional_kwargs={"thinking_delta": self.thinking_delta} if self.thinking_delta else dict(self.counted),
        )


class AnswerFold:
    """Folds the events of one answer into steps, and reports each segment to all listeners.

    Made in the body of an endpoint, where the call's span is still open; every segment carries its id. For `whole` and
    `may_close` see `AnswerReader`.
    """

    def __init__(
        self,
        reader: CallReader | None,
        detail: Detail,
        observe: Callable[[Event], None],
        whole: Whole = "none",
        model_name: Callable[[], str] = lambda: "",
        *,
        may_close: bool = False,
    ) -> None:
        self._observe = observe
        self._detail = detail
        self._model_name = model_name
        self._answer = AnswerReader(reader, detail, whole=whole, may_close=may_close)
        self._text = ""
        self._begun: list[BegunCall] = []
        self._thoughts: dict[str, str] = {}
        self._span = active_span_id.get()
        self._tags = dict(active_instrument_tags.get())

    def step(self, event: Event) -> AnswerStep | None:
        """The step that an event adds to the answer, or None."""
        self._observe(event)
        part = self._answer.read(event)
        if isinstance(event, ThinkingEvent):
            return self._thought(event)
        if isinstance(event, SegmentEvent):
            return self._segment(event, part)
        return None if part.end is None else self._last(part, part.end)

    def _thought(self, event: ThinkingEvent) -> AnswerStep:
        self._thoughts[event.member] = self._thoughts.get(event.member, "") + event.text
        record = {"specfuse": {"member": event.member, "thinking": event.text}}
        return replace(self._grown(AnswerPart(), record), thinking_delta=event.text)

    def _segment(self, event: SegmentEvent, part: AnswerPart) -> AnswerStep:
        record = {**segment_record(event), "candidates": candidate_records(event)}
        _dispatcher.event(SpecFuseSegmentEvent(text=event.text, record=record, span_id=self._span, tags=self._tags))
        return self._grown(part, {} if self._detail == "none" else {"specfuse": record})

    def _last(self, part: AnswerPart, end: AnswerEnd) -> AnswerStep:
        record = {"specfuse": end.record} if end.record else {}
        raw = {"model": self._model_name(), "usage": end.usage, "finish_reason": end.finish_reason, **record}
        counted = {**end.usage, "finish_reason": end.finish_reason}
        return replace(self._grown(part, raw), counted=counted, logprobs=_logprobs(end.result))

    def _grown(self, part: AnswerPart, raw: dict[str, Any]) -> AnswerStep:
        self._text += part.text
        for call in part.calls:
            self._write(call)
        thoughts = tuple(map(_block, self._thoughts.items()))
        return AnswerStep(part.text, self._text, raw, self._answer.complete_calls, tuple(self._begun), thoughts)

    def _write(self, part: CallDelta) -> None:
        if part.index == len(self._begun):
            self._begun.append(BegunCall(part.id or "", part.name or ""))
        call = self._begun[part.index]
        self._begun[part.index] = replace(call, arguments=call.arguments + part.arguments)


def _block(thought: tuple[str, str]) -> ThinkingBlock:
    member, text = thought
    return ThinkingBlock(content=text, additional_information={"member": member})


def _logprobs(result: EnsembleResult) -> list[list[LogProb]] | None:
    """One list a token, as LlamaIndex has them: the token that was written, then the most probable in its place."""
    if result.logprobs is None:
        return None
    return [[_logprob(token), *map(_logprob, token.top)] for token in result.logprobs]


def _logprob(token: TokenLogprob | TopLogprob) -> LogProb:
    return LogProb(token=token.token, logprob=token.logprob, bytes=list(token.bytes))


logger = logging.getLogger(__name__)


def fold(answer: AnswerFold, events: Iterator[Event]) -> Generator[AnswerStep, None, None]:
    with logged_failures(), closing(cast(Generator[Event], events)):
        yield from filter(None, map(answer.step, events))


async def afold(answer: AnswerFold, events: AsyncIterator[Event]) -> AsyncGenerator[AnswerStep, None]:
    with logged_failures():
        async with aclosing(cast(AsyncGenerator[Event], events)):
            async for event in events:
                if step := await fold_async(answer.step, event):
                    yield step


@contextmanager
def logged_failures() -> Iterator[None]:
    """Log a value that did not fit, because LlamaIndex may continue without it and log nothing."""
    try:
        yield
    except (UnfinishedValueError, ValueTooLongError) as error:
        logger.warning("a structured answer failed: %s", error)
        raise


def last_step(steps: Iterator[AnswerStep]) -> AnswerStep:
    return deque(steps, maxlen=1).pop()


async def alast_step(steps: AsyncGenerator[AnswerStep, None]) -> AnswerStep:
    async with aclosing(steps):
        return [step async for step in steps][-1]
