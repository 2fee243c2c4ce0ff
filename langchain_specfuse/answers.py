"""The engine's events of one answer as LangChain's chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from langchain_core.messages import AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import ToolCallChunk
from langchain_core.outputs import ChatGenerationChunk

from specfuse_shared import EnsembleResult, Event, FinishEvent, FinishReason, SegmentEvent, ThinkingEvent
from specfuse_shared.adapters import (
    CallDelta,
    CallReader,
    Detail,
    TextDelta,
    Thoughts,
    finish_reason,
    ledger,
    openai_logprobs,
    segment_record,
)

PROVIDER = "specfuse"


class Answer:
    """Turns events into chunks: thoughts, one for each verified segment, an empty last one with usage and the record.

    `detail`: how much of the record goes with it. `reads_calls`: tools were offered, so text that may be a call is
    held back until it is clear.
    """

    def __init__(self, model_name: str, detail: Detail, *, reads_calls: bool) -> None:
        self._model_name, self._detail = model_name, detail
        self._reader = CallReader() if reads_calls else None
        self._thoughts = Thoughts()

    def chunks(self, event: Event) -> Iterator[ChatGenerationChunk]:
        """The chunks of an event."""
        if isinstance(event, ThinkingEvent):
            yield from _reasoning(self._thoughts.feed(event))
        if isinstance(event, (SegmentEvent, FinishEvent)):
            yield from _reasoning(self._thoughts.rest())
        if isinstance(event, SegmentEvent):
            parts = self._reader.feed(event.text) if self._reader else (TextDelta(event.text),)
            yield _chunk(parts, additional_kwargs={"specfuse_segments": [segment_record(event)]})
        if isinstance(event, FinishEvent):
            yield self._last(event.result)

    def _last(self, result: EnsembleResult) -> ChatGenerationChunk:
        usage = UsageMetadata(
            input_tokens=result.usage.prompt_tokens,
            output_tokens=result.usage.completion_tokens,
            total_tokens=result.usage.total_tokens,
        )
        cut = result.finish_reason is FinishReason.LENGTH
        rest = self._reader.finish(cut=cut) if self._reader else []
        info: dict[str, Any] = {
            "finish_reason": finish_reason(result, bool(self._reader and self._reader.calls)),
            "model_name": self._model_name,
            "model_provider": PROVIDER,
        }
        if (logprobs := openai_logprobs(result)) is not None:
            info["logprobs"] = logprobs
        record = {"specfuse": told} if (told := ledger(result, self._detail)) else {}
        last = _chunk(rest, chunk_position="last", usage_metadata=usage, response_metadata={**info, **record})
        last.generation_info = info
        return last


def _reasoning(thoughts: str) -> Iterator[ChatGenerationChunk]:
    """`content_blocks` makes reasoning blocks of this key, as it does for ChatOllama."""
    if thoughts:
        yield _chunk((), additional_kwargs={"reasoning_content": thoughts})


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
