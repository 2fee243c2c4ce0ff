"""From the engine's events to LlamaIndex's responses: one fold for every endpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
)
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import active_instrument_tags
from llama_index_instrumentation.span import active_span_id

from llamaindex_specfuse.calling import BegunCall, call_block
from llamaindex_specfuse.events import SpecFuseSegmentEvent
from specfuse_shared import EnsembleResult, TokenLogprob, ToolCall, TopLogprob
from specfuse_shared.events import Event, FinishEvent, SegmentEvent, ThinkingEvent
from specfuse_shared.frameworks import (
    CallDelta,
    CallReader,
    Detail,
    TextDelta,
    Whole,
    candidate_records,
    check_whole,
    finish_reason,
    last_parts,
    ledger,
    segment_record,
    usage_record,
)

_dispatcher = get_dispatcher(__name__)


@dataclass(frozen=True, slots=True)
class AnswerStep:
    """One step of an answer: the new text, the text so far, and what stands behind it."""

    delta: str
    text: str
    raw: dict[str, Any]
    calls: tuple[ToolCall, ...] = ()
    """The tool calls that are complete."""
    begun: tuple[BegunCall, ...] = ()
    """All tool calls, the last of which may still be written."""
    thoughts: tuple[ThinkingBlock, ...] = ()
    """What each member that thinks has thought so far."""
    thinking_delta: str = ""
    """New thoughts, before the answer begins."""
    counted: Mapping[str, Any] = field(default_factory=dict)
    """How the answer ended and its tokens, with the last piece."""
    logprobs: list[list[LogProb]] | None = None
    """Of the whole answer, with the last piece, where they were asked for."""

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
    """Folds the events of one answer into pieces, and tells everyone who listens about each segment.

    Made in the body of an endpoint: there the call's span is still open, whose id every segment carries. `whole`: what
    `max_tokens` cut raises `UnfinishedValueError`; `may_close`: not where brackets and quotes were enough to close it.
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
        self._whole = whole
        self._may_close = may_close
        self._model_name = model_name
        self._text = ""
        self._reader = reader
        self._begun: list[BegunCall] = []
        self._thoughts: dict[str, str] = {}
        self._span = active_span_id.get()
        self._tags = dict(active_instrument_tags.get())

    def piece(self, event: Event) -> AnswerStep | None:
        """What an event adds to the answer; None if it adds nothing."""
        self._observe(event)
        if isinstance(event, ThinkingEvent):
            return self._thought(event)
        if isinstance(event, SegmentEvent):
            return self._segment(event)
        if isinstance(event, FinishEvent):
            return self._last(event.result)
        return None

    def _thought(self, event: ThinkingEvent) -> AnswerStep:
        self._thoughts[event.member] = self._thoughts.get(event.member, "") + event.text
        record = {"specfuse": {"member": event.member, "thinking": event.text}}
        return replace(self._grown([], record), thinking_delta=event.text)

    def _segment(self, event: SegmentEvent) -> AnswerStep:
        record = {**segment_record(event), "candidates": candidate_records(event)}
        _dispatcher.event(SpecFuseSegmentEvent(text=event.text, record=record, span_id=self._span, tags=self._tags))
        parts = self._reader.feed(event.text) if self._reader else [TextDelta(event.text)]
        return self._grown(parts, {} if self._detail == "none" else {"specfuse": record})

    def _last(self, result: EnsembleResult) -> AnswerStep:
        check_whole(result, self._whole, self._reader, may_close=self._may_close)
        parts = last_parts(self._reader, result, may_close=self._may_close)
        usage, reason = usage_record(result.usage), finish_reason(result, called=bool(self._begun))
        record = {"specfuse": told} if (told := ledger(result, self._detail)) else {}
        raw = {"model": self._model_name(), "usage": usage, "finish_reason": reason, **record}
        last = self._grown(parts, raw)
        return replace(last, counted={**usage, "finish_reason": reason}, logprobs=_logprobs(result))

    def _grown(self, parts: Sequence[TextDelta | CallDelta], raw: dict[str, Any]) -> AnswerStep:
        delta = "".join(part.text for part in parts if isinstance(part, TextDelta))
        self._text += delta
        for part in parts:
            if isinstance(part, CallDelta):
                self._write(part)
        calls = tuple(self._reader.calls) if self._reader else ()
        return AnswerStep(delta, self._text, raw, calls, tuple(self._begun), tuple(map(_block, self._thoughts.items())))

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
