"""Streamed calls: LlamaIndex's programs see a value grow, and no part of a call is text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from llama_index.core import Document, SummaryIndex
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, Field

from llamaindex_specfuse import SpecFuseLLM
from llamaindex_specfuse.messages import AnswerFold, AnswerStep
from specfuse_shared import EnsembleResult, FinishReason, SamplingParams
from specfuse_shared.errors import ClosedValueWarning
from specfuse_shared.events import FinishEvent, SegmentEvent
from specfuse_shared.frameworks import CallReader


class Song(BaseModel):
    """A song."""

    title: str = Field(max_length=12)
    year: int = Field(ge=1900, le=2030)
    live: bool


PROMPT = "Write down a song about {thing}."


def program(llm: SpecFuseLLM) -> FunctionCallingProgram[Song]:
    return FunctionCallingProgram.from_defaults(Song, prompt_template_str=PROMPT, llm=llm)


def assert_grows(values: Sequence[object]) -> None:
    """Fields appear one by one, and the last value is whole."""
    assert isinstance(values[-1], Song)
    filled = [sum(field is not None for field in vars(value).values()) for value in values]
    assert filled == sorted(filled)
    assert any(0 < count < 3 for count in filled)


def test_a_program_streams_its_value_as_it_grows(tiny_llm: SpecFuseLLM) -> None:
    assert_grows(list(program(tiny_llm).stream_call(thing="the sea")))


async def test_a_program_streams_its_value_asynchronously(tiny_llm: SpecFuseLLM) -> None:
    assert_grows([value async for value in await program(tiny_llm).astream_call(thing="the sea")])


async def test_filtered_answers_are_streamed(tiny_llm: SpecFuseLLM) -> None:
    nodes = SummaryIndex.from_documents([Document(text="The observatory opens at seven.")]).as_retriever().retrieve("?")
    synthesizer = get_response_synthesizer(llm=tiny_llm, streaming=True, structured_answer_filtering=True)
    requests = (
        "When does it open?",
        "Is it open now?",
        "How many visitors come?",
        "Who opens the door?",
        "At what time?",
    )
    answers = {question: synthesizer.synthesize(question, nodes) for question in requests}
    # a model with random weights finds some of them unanswered: those have the text "Empty Response"
    question, reported = next((q, t) for q, t in answers.items() if isinstance(t, StreamingResponse))
    pieces: list[str] = []
    with pytest.warns(ClosedValueWarning, match="max_tokens"):  # random models end no string
        pieces += reported.response_gen
    assert "".join(pieces)
    atold = await synthesizer.asynthesize(question, nodes)
    assert isinstance(atold, AsyncStreamingResponse)


def test_a_message_holds_its_calls_in_blocks_and_as_openai_writes_them(tiny_llm: SpecFuseLLM) -> None:
    tool = FunctionTool.from_defaults(lambda city: city, name="weather")
    *partial, last = tiny_llm.stream_chat_with_tools([tool], "How is it in Rome?", tool_required=True)
    [call] = [block for block in last.message.blocks if isinstance(block, ToolCallBlock)]
    [written] = last.message.additional_kwargs["tool_calls"]
    assert (written["id"], written["function"]["name"]) == (call.tool_call_id, "weather")
    assert json.loads(written["function"]["arguments"]) == call.tool_kwargs
    texts = [r.message.additional_kwargs["tool_calls"][0]["function"]["arguments"] for r in partial]
    assert all(written["function"]["arguments"].startswith(text) for text in texts)
    assert len(set(texts)) > 1
    assert {response.delta for response in (*partial, last)} == {""}


# ── answers that are cut ─────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def result(tiny_llm: SpecFuseLLM) -> EnsembleResult:
    assert tiny_llm.engine is not None
    return tiny_llm.engine.generate("Hello", SamplingParams(max_tokens=4))


def pieces_of(text: str, result: EnsembleResult, reason: FinishReason) -> list[AnswerStep | None]:
    """The pieces of an answer with this text that can call a tool."""
    answer = AnswerFold(CallReader(), "summary", lambda event: None)
    return [
        answer.step(SegmentEvent(text, 0, len(text), None)),
        answer.step(FinishEvent(replace(result, finish_reason=reason))),
    ]


def test_a_partial_tag_of_a_truncated_answer_is_no_text(result: EnsembleResult) -> None:
    pieces = pieces_of("Let me see. <tool_cal", result, FinishReason.LENGTH)
    assert [piece.delta for piece in pieces if piece] == ["Let me see. ", ""]


def test_a_partial_tag_of_an_ended_answer_is_text(result: EnsembleResult) -> None:
    pieces = pieces_of("1 <tool", result, FinishReason.STOP)
    assert [piece.delta for piece in pieces if piece] == ["1 ", "<tool"]


# ── how an answer ended ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("reason", "reported"),
    [(FinishReason.STOP, "stop"), (FinishReason.LENGTH, "length"), (FinishReason.REPETITION, "stop")],
)
def test_a_response_has_its_finish_reason(reason: FinishReason, reported: str, result: EnsembleResult) -> None:
    *_, last = pieces_of("It is sunny.", result, reason)
    assert last is not None
    assert last.completion().raw["finish_reason"] == last.chat().additional_kwargs["finish_reason"] == reported
    assert last.chat().raw["specfuse"]["finish_reason"] == str(reason)


def test_a_response_with_a_call_has_the_finish_reason_tool_calls(tiny_llm: SpecFuseLLM) -> None:
    tool = FunctionTool.from_defaults(lambda city: city, name="weather")
    response = tiny_llm.chat_with_tools([tool], "How is it in Rome?", tool_required=True)
    assert response.raw["finish_reason"] == "tool_calls"
    assert response.additional_kwargs["completion_tokens"] == response.raw["usage"]["completion_tokens"]
    assert json.loads(json.dumps(response.raw)) == response.raw
