"""From the engine's events to LlamaIndex's responses: one fold for every endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole, TextBlock
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import active_instrument_tags
from llama_index_instrumentation.span import active_span_id

from llamaindex_specfuse.calling import BegunCall, call_block
from llamaindex_specfuse.events import SpecFuseSegmentEvent
from specfuse_shared.adapters import OnSegment, candidate_records, ledger, segment_record, usage_record
from specfuse_shared.config import SamplingParams
from specfuse_shared.events import Event, FinishEvent, SegmentEvent
from specfuse_shared.results import EnsembleResult
from specfuse_shared.text.tool_calls import CallDelta, CallReader, TextDelta
from specfuse_shared.types import FinishReason, ToolCall

_dispatcher = get_dispatcher(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """One step of an answer: the new text, the text so far, and what stands behind it."""

    delta: str
    text: str
    raw: dict[str, Any]
    calls: tuple[ToolCall, ...] = ()
    """The tool calls that are complete."""
    begun: tuple[BegunCall, ...] = ()
    """All tool calls, the last of which may still be written."""
    counted: Mapping[str, Any] = field(default_factory=dict)
    """How the answer ended and its tokens, with the last piece."""

    def completion(self) -> CompletionResponse:
        """Its `additional_kwargs` stay empty: LlamaIndex would copy them into a message."""
        return CompletionResponse(text=self.text, delta=self.delta, raw=self.raw)

    def chat(self) -> ChatResponse:
        """The text always has a block: without one, LlamaIndex writes the turn as "assistant: None"."""
        message = ChatMessage(
            role=MessageRole.ASSISTANT,
            blocks=[TextBlock(text=self.text), *map(call_block, self.calls)],
            additional_kwargs={"tool_calls": [call.as_openai() for call in self.begun]} if self.begun else {},
        )
        return ChatResponse(message=message, delta=self.delta, raw=self.raw, additional_kwargs=dict(self.counted))


class Answer:
    """Folds the events of one answer into pieces, and tells everyone who listens about each segment.

    Made in the body of an endpoint: there the call's span is still open, whose id every segment carries.
    """

    def __init__(self, params: SamplingParams, on_segment: OnSegment | None) -> None:
        self._on_segment, self._text = on_segment, ""
        self._reader = CallReader() if params.offered_tools else None
        self._begun: list[BegunCall] = []
        self._span, self._tags = active_span_id.get(), dict(active_instrument_tags.get())

    def piece(self, event: Event) -> Piece | None:
        """What an event adds to the answer; None if it adds nothing."""
        if isinstance(event, SegmentEvent):
            return self._segment(event)
        if isinstance(event, FinishEvent):
            return self._last(event.result)
        return None

    def _segment(self, event: SegmentEvent) -> Piece:
        record = {**segment_record(event), "candidates": candidate_records(event)}
        if self._on_segment is not None:
            self._on_segment(event)
        _dispatcher.event(SpecFuseSegmentEvent(text=event.text, record=record, span_id=self._span, tags=self._tags))
        parts = self._reader.feed(event.text) if self._reader else [TextDelta(event.text)]
        return self._grown(parts, {"specfuse": record})

    def _last(self, result: EnsembleResult) -> Piece:
        parts = self._reader.finish(cut=result.finish_reason is FinishReason.LENGTH) if self._reader else []
        usage, reason = usage_record(result.usage), self._finish_reason(result)
        raw = {"usage": usage, "finish_reason": reason, "specfuse": ledger(result)}
        return replace(self._grown(parts, raw), counted={**usage, "finish_reason": reason})

    def _finish_reason(self, result: EnsembleResult) -> str:
        """As every provider says it; the engine's own reason is in its record."""
        if self._begun:
            return "tool_calls"
        return "length" if result.finish_reason is FinishReason.LENGTH else "stop"

    def _grown(self, parts: Sequence[TextDelta | CallDelta], raw: dict[str, Any]) -> Piece:
        delta = "".join(part.text for part in parts if isinstance(part, TextDelta))
        self._text += delta
        for part in parts:
            if isinstance(part, CallDelta):
                self._write(part)
        calls = tuple(self._reader.calls) if self._reader else ()
        return Piece(delta, self._text, raw, calls, tuple(self._begun))

    def _write(self, part: CallDelta) -> None:
        if part.index == len(self._begun):
            self._begun.append(BegunCall(part.id or "", part.name or ""))
        call = self._begun[part.index]
        self._begun[part.index] = replace(call, arguments=call.arguments + part.arguments)
