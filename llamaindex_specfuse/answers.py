"""From the engine's events to LlamaIndex's responses: one fold for every endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole, TextBlock
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import active_instrument_tags
from llama_index_instrumentation.span import active_span_id

from llamaindex_specfuse.calling import call_block
from llamaindex_specfuse.events import SpecFuseSegmentEvent
from specfuse_shared.adapters import OnSegment, candidate_records, ledger, segment_record, usage_record
from specfuse_shared.events import Event, FinishEvent, SegmentEvent
from specfuse_shared.text.tool_calls import CallDelta, CallReader, TextDelta
from specfuse_shared.types import ToolCall

_dispatcher = get_dispatcher(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """One step of an answer: the new text, the text so far, and what stands behind it."""

    delta: str
    text: str
    raw: dict[str, Any]
    calls: tuple[ToolCall, ...] = ()
    """The tool calls that are complete."""

    def completion(self) -> CompletionResponse:
        return CompletionResponse(text=self.text, delta=self.delta, raw=self.raw)

    def chat(self) -> ChatResponse:
        """The text always has a block: without one, LlamaIndex writes the turn as "assistant: None"."""
        blocks = [TextBlock(text=self.text), *map(call_block, self.calls)]
        message = ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks)
        return ChatResponse(message=message, delta=self.delta, raw=self.raw)


class Answer:
    """Folds the events of one answer into pieces, and tells everyone who listens about each segment.

    Made in the body of an endpoint: there the call's span is still open, whose id every segment carries.
    """

    def __init__(self, reads_calls: bool, on_segment: OnSegment | None) -> None:
        self._on_segment, self._text = on_segment, ""
        self._reader = CallReader() if reads_calls else None
        self._span, self._tags = active_span_id.get(), dict(active_instrument_tags.get())

    def piece(self, event: Event) -> Piece | None:
        """What an event adds to the answer; None if it adds nothing."""
        if isinstance(event, SegmentEvent):
            return self._segment(event)
        if isinstance(event, FinishEvent):
            raw = {"usage": usage_record(event.result.usage), "specfuse": ledger(event.result)}
            return self._grown(self._reader.finish() if self._reader else [], raw)
        return None

    def _segment(self, event: SegmentEvent) -> Piece:
        record = {**segment_record(event), "candidates": candidate_records(event)}
        if self._on_segment is not None:
            self._on_segment(event)
        _dispatcher.event(SpecFuseSegmentEvent(text=event.text, record=record, span_id=self._span, tags=self._tags))
        parts = self._reader.feed(event.text) if self._reader else [TextDelta(event.text)]
        return self._grown(parts, {"specfuse": record})

    def _grown(self, parts: Sequence[TextDelta | CallDelta], raw: dict[str, Any]) -> Piece:
        delta = "".join(part.text for part in parts if isinstance(part, TextDelta))
        self._text += delta
        return Piece(delta, self._text, raw, tuple(self._reader.calls) if self._reader else ())
