"""The engine's events of one answer as LangChain's chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from langchain_core.messages import AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import ToolCallChunk
from langchain_core.outputs import ChatGenerationChunk

from specfuse_shared.adapters import ledger, segment_record
from specfuse_shared.events import Event, FinishEvent, SegmentEvent
from specfuse_shared.results import EnsembleResult
from specfuse_shared.text.tool_calls import CallDelta, CallReader, TextDelta
from specfuse_shared.types import FinishReason

PROVIDER = "specfuse"


class Answer:
    """Turns events into chunks: one for each verified segment, and an empty last one with usage and the ledger.

    `reads_calls`: tools were offered, so text that may be a call is held back until it is clear.
    """

    def __init__(self, model_name: str, reads_calls: bool) -> None:
        self._model_name, self._reader = model_name, CallReader() if reads_calls else None

    def chunk(self, event: Event) -> ChatGenerationChunk | None:
        """The chunk of an event, if it has one."""
        if isinstance(event, SegmentEvent):
            parts = self._reader.feed(event.text) if self._reader else (TextDelta(event.text),)
            provenance = {"specfuse_segments": [segment_record(event)]}
            return _chunk(parts, additional_kwargs=provenance)
        if isinstance(event, FinishEvent):
            return self._last(event.result)
        return None

    def _last(self, result: EnsembleResult) -> ChatGenerationChunk:
        usage, called = result.usage, bool(self._reader and self._reader.calls)
        return _chunk(
            self._reader.finish(cut=result.finish_reason is FinishReason.LENGTH) if self._reader else [],
            chunk_position="last",
            usage_metadata=UsageMetadata(
                input_tokens=usage.prompt_tokens,
                output_tokens=usage.completion_tokens,
                total_tokens=usage.total_tokens,
            ),
            response_metadata={
                "finish_reason": "tool_calls" if called else str(result.finish_reason),
                "model_name": self._model_name,
                "model_provider": PROVIDER,
                "specfuse": ledger(result),
            },
        )


def _chunk(parts: Iterable[TextDelta | CallDelta], **fields: Any) -> ChatGenerationChunk:
    text, calls = "", dict[int, ToolCallChunk]()
    for part in parts:
        if isinstance(part, TextDelta):
            text += part.text
        elif (known := calls.get(part.index)) is not None:  # a message holds one chunk of a call
            known["args"] = f"{known['args']}{part.arguments}"
        else:
            calls[part.index] = ToolCallChunk(
                name=part.name, args=part.arguments, id=part.id, index=part.index, type="tool_call_chunk"
            )
    return ChatGenerationChunk(message=AIMessageChunk(content=text, tool_call_chunks=[*calls.values()], **fields))
