"""The engine's events of one answer as LangChain's chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from langchain_core.messages import AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import ToolCallChunk
from langchain_core.outputs import ChatGenerationChunk
from pydantic import Field

from specfuse_shared import EnsembleResult, Event, FinishEvent, SegmentEvent, ThinkingEvent, Usage
from specfuse_shared.frameworks import (
    CallDelta,
    CallReader,
    Detail,
    TextDelta,
    Thoughts,
    Whole,
    check_whole,
    finish_reason,
    last_parts,
    ledger,
    openai_logprobs,
    reasoning_tokens,
    segment_record,
    usage_record,
)

PROVIDER = "specfuse"
_FIRST_CALL = 2
"""Blocks are merged by their index, and LangChain gives thoughts and text the first two."""


class SegmentChunk(ChatGenerationChunk):
    """The chunk of a verified segment; callbacks find its record here, and so does nobody else."""

    segment: dict[str, Any] = Field(exclude=True, repr=False)
    """The segment's text and record."""


class ChunkBuilder:
    """Turns events into chunks: thoughts, one for each verified segment, an empty last one with usage and the record.

    `detail`: how much of the record goes with it. `reader`: of calls, if tools were offered; text that may be one is
    held back until it is clear. `whole`: what raises `UnfinishedValueError` where `max_tokens` cut it; `may_close`: not
    where brackets and quotes were enough to close it.
    """

    def __init__(
        self,
        model_name: Callable[[], str],
        detail: Detail,
        *,
        reader: CallReader | None,
        whole: Whole = "none",
        may_close: bool = False,
    ) -> None:
        self._model_name = model_name
        self._detail = detail
        self._whole = whole
        self._may_close = may_close
        self._reader = reader
        self._thoughts = Thoughts()

    def chunks(self, event: Event) -> Iterator[ChatGenerationChunk]:
        """The chunks of an event."""
        if isinstance(event, ThinkingEvent):
            yield from _reasoning(self._thoughts.feed(event))
        if isinstance(event, (SegmentEvent, FinishEvent)):
            yield from _reasoning(self._thoughts.rest())
        if isinstance(event, SegmentEvent):
            parts = self._reader.feed(event.text) if self._reader else (TextDelta(event.text),)
            first, *rest = _chunks(parts, **self._kept({"specfuse_segments": [record := segment_record(event)]}))
            yield SegmentChunk(message=first.message, segment={"text": first.message.text, **record})
            yield from rest
        if isinstance(event, FinishEvent):
            yield from self._end(event.result)

    def _kept(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {} if self._detail == "none" else {"additional_kwargs": kwargs}

    def _end(self, result: EnsembleResult) -> Iterator[ChatGenerationChunk]:
        check_whole(result, self._whole, self._reader, may_close=self._may_close)
        usage = usage_metadata(result.usage)
        if rest := last_parts(self._reader, result, may_close=self._may_close):
            yield from _chunks(rest)
        info: dict[str, Any] = {
            "finish_reason": finish_reason(result, bool(self._reader and self._reader.calling)),
            "model_name": self._model_name(),
            "model_provider": PROVIDER,
        }
        if (logprobs := openai_logprobs(result)) is not None:
            info["logprobs"] = logprobs
        record = {"specfuse": told} if (told := ledger(result, self._detail)) else {}
        last = AIMessageChunk(
            content="", chunk_position="last", usage_metadata=usage, response_metadata={**info, **record}
        )
        yield ChatGenerationChunk(message=last, generation_info=info)


def usage_metadata(of: Usage) -> UsageMetadata:
    """The tokens of an answer in LangChain's words."""
    told, thoughts = usage_record(of), reasoning_tokens(of)
    usage = UsageMetadata(
        input_tokens=told["prompt_tokens"], output_tokens=told["completion_tokens"], total_tokens=told["total_tokens"]
    )
    return {**usage, "output_token_details": {"reasoning": thoughts}} if thoughts else usage


def _reasoning(thoughts: str) -> Iterator[ChatGenerationChunk]:
    """`content_blocks` makes reasoning blocks of this key, as it does for ChatOllama."""
    if thoughts:
        yield from _chunks((), additional_kwargs={"reasoning_content": thoughts})


def _chunks(parts: Iterable[TextDelta | CallDelta], **fields: Any) -> Iterator[ChatGenerationChunk]:
    """One chunk, or one of text and one of calls: LangChain makes blocks of calls only where there is no text."""
    text, calls = "", dict[int, ToolCallChunk]()
    for part in parts:
        if isinstance(part, TextDelta):
            text += part.text
        elif (known := calls.get(part.index)) is not None:  # a message holds one chunk of a call
            known["args"] = f"{known['args']}{part.arguments}"
        else:
            calls[part.index] = ToolCallChunk(
                name=part.name,
                args=part.arguments,
                id=part.id,
                index=_FIRST_CALL + part.index,
                type="tool_call_chunk",
            )
    if text or not calls:
        yield ChatGenerationChunk(message=AIMessageChunk(content=text, **fields))
    if calls:
        rest = {} if text else fields
        yield ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=[*calls.values()], **rest))
