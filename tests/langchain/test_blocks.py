"""Text, reasoning and calls as blocks of version 1: each has its own block, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk

from langchain_specfuse import ChatSpecFuse
from langchain_specfuse.messages import ChunkBuilder
from specfuse_shared import EnsembleEngine, SegmentEvent, ThinkingEvent
from specfuse_shared.frameworks import CallReader

NOW = {"type": "function", "function": {"name": "now", "parameters": {"properties": {"city": {"const": "Rome"}}}}}
NOW["function"]["parameters"]["required"] = ["city"]
CALLED = [{"name": "now", "args": {"city": "Rome"}}]


def calls_of(message: AIMessage) -> list[dict[str, Any]]:
    return [{"name": call["name"], "args": call["args"]} for call in message.tool_calls]


def whole(chunks: Iterator[AIMessageChunk]) -> AIMessageChunk:
    first, *rest = chunks
    return first + rest


@pytest.mark.parametrize("version", ["v0", "v1"])
async def test_text_and_a_call_after_it_are_two_blocks(caller: EnsembleEngine, version: str) -> None:
    model = ChatSpecFuse(engine=caller, max_tokens=200, output_version=version).bind_tools([NOW])
    answers = [
        model.invoke("When?"),
        whole(model.stream("When?")),
        await model.ainvoke("When?"),
        whole(iter([chunk async for chunk in model.astream("When?")])),  # type: ignore[misc]
    ]
    for answer in answers:
        assert answer.text == "Let me see . "
        assert calls_of(answer) == CALLED
        assert [block["type"] for block in answer.content_blocks] == ["text", "tool_call"]
        assert answer.response_metadata["finish_reason"] == "tool_calls"


def test_text_and_a_call_are_two_blocks_in_the_events_of_version_3(caller: EnsembleEngine) -> None:
    stream = ChatSpecFuse(engine=caller, max_tokens=200).stream_events("When?", version="v3", tools=[NOW])
    assert "".join(stream.text) == "Let me see . "
    assert calls_of(stream.output) == CALLED
    assert [block["type"] for block in stream.output.content_blocks] == ["text", "tool_call"]


def test_reasoning_text_and_calls_have_separate_indices() -> None:
    answer = ChunkBuilder(lambda: "x", "none", reader=CallReader())
    text = 'Well. <tool_call>{"name": "now", "arguments": {}}</tool_call>\n<tool_call>{"name": "now", "arguments": {}}'
    events = [ThinkingEvent("a", "Hm."), SegmentEvent(text + "</tool_call>", 0, len(text), None)]
    chunks = [chunk.message for event in events for chunk in answer.chunks(event)]
    assert all(not (chunk.content and chunk.tool_call_chunks) for chunk in chunks)  # type: ignore[attr-defined]
    indices = {part["index"] for chunk in chunks for part in chunk.tool_call_chunks}  # type: ignore[attr-defined]
    assert indices == {2, 3}
