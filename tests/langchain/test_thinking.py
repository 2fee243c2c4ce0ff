"""Reasoning and log-probabilities are in LangChain's usual fields only."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from jsonschema import validate
from langchain_core.messages import AIMessage, AIMessageChunk

from langchain_specfuse import ChatSpecFuse
from langchain_specfuse.messages import to_messages
from specfuse_shared import EnsembleConfig, EnsembleEngine, ThinkingEvent
from specfuse_shared.frameworks.records import Thoughts
from tests.support.tiny import THINKING

QUESTION = "How do the tides follow the moon?"
SCHEMA = {"title": "Sea", "type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"]}


@pytest.fixture(scope="module")
def thinking(tiny: EnsembleEngine) -> Iterator[EnsembleEngine]:
    """The chat member thinks before it answers, the other one does not."""
    chat, base = tiny.config.member_configs
    with EnsembleEngine(EnsembleConfig([replace(chat, chat_template=THINKING, thinking=True), base])) as engine:
        yield engine.load()


@pytest.fixture
def thinker(thinking: EnsembleEngine) -> ChatSpecFuse:
    return ChatSpecFuse(engine=thinking, max_tokens=12, max_thinking_tokens=12)


# ── reasoning ────────────────────────────────────────────────────────────────────────────────────


def test_reasoning_is_a_block_and_no_text(thinker: ChatSpecFuse) -> None:
    answer = thinker.invoke(QUESTION)
    reasoning, text = answer.content_blocks
    assert (reasoning["type"], text["type"]) == ("reasoning", "text")
    assert reasoning["reasoning"] == answer.additional_kwargs["reasoning_content"] != ""  # type: ignore[typeddict-item]
    assert isinstance(answer.content, str)
    assert answer.text == answer.content == text["text"]  # type: ignore[typeddict-item]
    assert "<think>" not in answer.text
    segments = answer.additional_kwargs["specfuse_segments"]
    assert segments[-1]["end"] == len(answer.text)


def test_reasoning_streams_before_the_text(thinker: ChatSpecFuse) -> None:
    chunks = list(thinker.stream(QUESTION))
    reported = ["think" if "reasoning_content" in c.additional_kwargs else "text" for c in chunks]
    assert reported == ["think"] * reported.count("think") + ["text"] * reported.count("text")
    assert "think" in reported
    whole = sum(chunks[1:], chunks[0])
    assert isinstance(whole, AIMessageChunk)
    answer = thinker.invoke(QUESTION)
    assert whole.additional_kwargs["reasoning_content"] == answer.additional_kwargs["reasoning_content"]
    assert whole.text == answer.text


async def test_reasoning_is_in_blocks_of_version_one(thinking: EnsembleEngine) -> None:
    model = ChatSpecFuse(engine=thinking, max_tokens=12, max_thinking_tokens=12, output_version="v1")
    whole: AIMessageChunk | None = None
    async for chunk in model.astream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [block["type"] for block in whole.content_blocks] == ["reasoning", "text"]
    assert [block["type"] for block in model.invoke(QUESTION).content] == ["reasoning", "text"]


def test_values_and_calls_begin_after_the_reasoning(thinker: ChatSpecFuse) -> None:
    answer = thinker.bind(response_format=SCHEMA).invoke(QUESTION, max_tokens=40)
    validate(json.loads(answer.text), SCHEMA)
    assert answer.additional_kwargs["reasoning_content"]
    called = thinker.bind_tools([SCHEMA], tool_choice="any").invoke(QUESTION, max_tokens=120)
    assert [call["name"] for call in called.tool_calls] == ["Sea"]
    assert called.additional_kwargs["reasoning_content"]
    assert called.text == ""


def test_an_answer_with_reasoning_is_a_history(thinker: ChatSpecFuse) -> None:
    answer = thinker.invoke(QUESTION)
    [reported] = to_messages([answer])
    assert reported.content == answer.text
    assert thinker.invoke([("user", QUESTION), answer, ("user", QUESTION)]).text


def test_members_that_do_not_think_have_no_reasoning(chat: ChatSpecFuse, thinker: ChatSpecFuse) -> None:
    answer = chat.invoke(QUESTION)
    assert "reasoning_content" not in answer.additional_kwargs
    assert [block["type"] for block in answer.content_blocks] == ["text"]
    assert [(m.profile or {})["reasoning_output"] for m in (chat, thinker)] == [False, True]


def test_reasoning_of_several_members_is_in_sequence() -> None:
    thoughts = Thoughts()
    events = [("a", "One "), ("b", "Zwei "), ("a", "two."), ("b", "drei.")]
    reported = [thoughts.feed(ThinkingEvent(member, text)) for member, text in events]
    assert reported == ["One ", "", "two.", ""]
    assert (thoughts.rest(), thoughts.rest()) == ("\n\nZwei drei.", "")


# ── log-probabilities ────────────────────────────────────────────────────────────────────────────


def check_logprobs(answer: AIMessage) -> None:
    content = answer.response_metadata["logprobs"]["content"]
    assert answer.text
    assert all(token["token"] == bytes(token["bytes"]).decode(errors="replace") for token in content)
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == answer.text
    assert all(token["logprob"] <= 0 and math.isfinite(token["logprob"]) for token in content)
    assert all(token["top_logprobs"] == [] for token in content)


def test_logprobs_come_in_openai_s_shape_once(tiny: EnsembleEngine, chat: ChatSpecFuse) -> None:
    request = ChatSpecFuse(engine=tiny, max_tokens=12, logprobs=True)
    check_logprobs(request.invoke(QUESTION))
    check_logprobs(chat.invoke(QUESTION, logprobs=True))
    chunks = list(request.stream(QUESTION))
    check_logprobs(sum(chunks[1:], chunks[0]))
    assert sum("logprobs" in chunk.response_metadata for chunk in chunks) == 1
    assert "logprobs" not in chat.invoke(QUESTION).response_metadata
    tops = chat.invoke(QUESTION, logprobs=True, top_logprobs=2).response_metadata["logprobs"]["content"]
    assert all(len(token["top_logprobs"]) == 2 for token in tops)
    settled = ChatSpecFuse(engine=tiny, max_tokens=12, logprobs=True, top_logprobs=2)
    assert settled.invoke(QUESTION).response_metadata["logprobs"]["content"][0]["top_logprobs"]
    assert "logprobs" not in settled.invoke(QUESTION, logprobs=False).response_metadata
    assert "logprobs" not in request.invoke(QUESTION, logprobs=False).response_metadata
