"""From the engine's events to LlamaIndex's responses: one fold for every endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import active_instrument_tags
from llama_index_instrumentation.span import active_span_id

from llamaindex_specfuse.events import SpecFuseSegmentEvent
from specfuse_shared.adapters import OnSegment, candidate_records, ledger, segment_record, usage_record
from specfuse_shared.events import Event, FinishEvent, SegmentEvent

_dispatcher = get_dispatcher(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """One step of an answer: the new text, the text so far, and what stands behind it."""

    delta: str
    text: str
    raw: dict[str, Any]

    def completion(self) -> CompletionResponse:
        return CompletionResponse(text=self.text, delta=self.delta, raw=self.raw)

    def chat(self) -> ChatResponse:
        message = ChatMessage(role=MessageRole.ASSISTANT, content=self.text)
        return ChatResponse(message=message, delta=self.delta, raw=self.raw)


class Answer:
    """Folds the events of one answer into pieces, and tells everyone who listens about each segment.

    Made in the body of an endpoint: there the call's span is still open, whose id every segment carries.
    """

    def __init__(self, on_segment: OnSegment | None) -> None:
        self._on_segment, self._text = on_segment, ""
        self._span, self._tags = active_span_id.get(), dict(active_instrument_tags.get())

    def piece(self, event: Event) -> Piece | None:
        """What an event adds to the answer; None if it adds nothing."""
        if isinstance(event, SegmentEvent):
            return self._segment(event)
        if isinstance(event, FinishEvent):
            raw = {"usage": usage_record(event.result.usage), "specfuse": ledger(event.result)}
            return Piece("", self._text, raw)
        return None

    def _segment(self, event: SegmentEvent) -> Piece:
        record = {**segment_record(event), "candidates": candidate_records(event)}
        if self._on_segment is not None:
            self._on_segment(event)
        _dispatcher.event(SpecFuseSegmentEvent(text=event.text, record=record, span_id=self._span, tags=self._tags))
        self._text += event.text
        return Piece(event.text, self._text, {"specfuse": record})
