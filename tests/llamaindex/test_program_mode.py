"""`pydantic_program_mode="llm"`: LlamaIndex's own prompt and parser in place of a grammar."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel

from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared.members.stages import Open
from tests.support.fake_engine import FakeEngine
from tests.support.fake_lane import FakeLane, scripted

PROMPT = PromptTemplate("Note {thing}.")


class Note(BaseModel):
    """A note."""

    title: str
    text: str


NOTE = Note(title="Moon", text="far")


@pytest.fixture
def lane() -> FakeLane:
    """A member that writes the note in JSON without a grammar."""
    return FakeLane({"a": scripted(f"{NOTE.model_dump_json()} .")})


@pytest.fixture
def llm(lane: FakeLane) -> Iterator[SpecFuseLLM]:
    with FakeEngine(lane) as engine:
        yield SpecFuseLLM(engine=engine, pydantic_program_mode="llm")


def test_a_value_is_requested_in_the_prompt_and_parsed(llm: SpecFuseLLM, lane: FakeLane) -> None:
    assert llm.structured_predict(Note, PROMPT, thing="the moon") == NOTE
    [opened] = lane.ops("a", Open)
    assert len(opened.prompt) > 20, "words of the schema follow the three of the prompt"


def test_a_stream_ends_with_the_value(llm: SpecFuseLLM) -> None:
    *_, last = llm.stream_structured_predict(Note, PROMPT, thing="the moon")
    assert last == NOTE


async def test_an_asynchronous_stream_ends_with_the_value(llm: SpecFuseLLM) -> None:
    stream = await llm.astream_structured_predict(Note, PROMPT, thing="the moon")
    assert [value async for value in stream][-1] == NOTE


async def test_a_value_is_asked_for_in_words_on_an_event_loop(llm: SpecFuseLLM) -> None:
    assert await llm.astructured_predict(Note, PROMPT, thing="the moon") == NOTE


def test_the_default_asks_for_a_grammar(lane: FakeLane) -> None:
    with FakeEngine(lane) as engine, pytest.raises(AssertionError, match="no grammar is used"):
        SpecFuseLLM(engine=engine).structured_predict(Note, PROMPT, thing="the moon")
