"""Structured prediction over the real demo ensemble: every prediction is an instance of its class."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import date
from enum import StrEnum
from typing import Any, Literal

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel, Field

from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared.errors import RequestError
from tests.llamaindex.instrumentation import Listener

PROMPT = PromptTemplate("Describe {thing} in a few words.")


class Colour(StrEnum):
    BLUE = "blue"
    GREEN = "green"


class Visit(BaseModel):
    """A visit."""

    day: date = Field(description="The day of arrival.")


class Thing(BaseModel):
    """A thing."""

    name: str = Field(max_length=20)
    colour: Colour
    size: Literal["small", "large"] | None


class Pair(BaseModel):
    """Two things and numbers."""

    first: Thing
    others: list[Thing] = Field(max_length=1)
    numbers: list[int] = Field(max_length=3)


class Choice(BaseModel):
    """One thing or a word."""

    value: Thing | Literal["nothing", "etwas"]
    sure: bool = True


CLASSES: tuple[type[BaseModel], ...] = (Thing, Pair, Choice)
THINGS = ("the sea", "ein Wald", "大海", "a 🌊", "code: {'a': 1}", "an apple", "le ciel", "a cat", "Mars", "a song")


@pytest.fixture(scope="module")
def llm(llm: SpecFuseLLM) -> SpecFuseLLM:
    return llm.model_copy(update={"max_tokens": 100})


def test_a_prediction_is_an_instance_of_its_class(llm: SpecFuseLLM, listener: Listener) -> None:
    output = llm.structured_predict(Thing, PROMPT, thing="the sea")
    assert isinstance(output, Thing)
    names = [event.class_name() for event in listener.events]
    assert names.count("LLMStructuredPredictStartEvent") == names.count("LLMStructuredPredictEndEvent") == 1
    assert names.count("LLMChatStartEvent") == 1


@pytest.mark.slow
async def test_all_four_predictions_are_the_same(llm: SpecFuseLLM) -> None:
    expected = llm.structured_predict(Pair, PROMPT, thing="a cat")
    assert await llm.astructured_predict(Pair, PROMPT, thing="a cat") == expected
    streamed = list(llm.stream_structured_predict(Pair, PROMPT, thing="a cat"))
    assert streamed[-1] == expected
    assert len(streamed) > 2
    astreamed = [value async for value in await llm.astream_structured_predict(Pair, PROMPT, thing="a cat")]
    assert [value.model_dump() for value in astreamed] == [value.model_dump() for value in streamed]


def test_the_members_are_shown_the_schema_and_dates_are_dates(llm: SpecFuseLLM, listener: Listener) -> None:
    prompt = PromptTemplate("Fill in the visit.\n\nNote: {note}")
    output = llm.structured_predict(Visit, prompt, note="She comes on 3 May 2024 at 1 o'clock.")
    assert isinstance(output.day, date)
    [printed] = listener.prompts()
    lines = printed.splitlines()
    assert "- day: The day of arrival., date" in lines
    assert all(f"- {name}" in printed for name in Visit.model_fields)


def test_a_structured_llm_answers_chats_with_json(llm: SpecFuseLLM) -> None:
    response = llm.as_structured_llm(Choice).chat([ChatMessage("Describe the sky.")])
    assert isinstance(response.raw, Choice)
    assert Choice.model_validate_json(response.message.content or "") == response.raw


def test_a_value_that_does_not_fit_raises_an_error(llm: SpecFuseLLM) -> None:
    with pytest.raises(RequestError, match="max_tokens=4"):
        llm.structured_predict(Pair, PROMPT, llm_kwargs={"max_tokens": 4}, thing="the sea")


@pytest.mark.weekly
@pytest.mark.timeout(900)
def test_fifty_of_fifty_predictions_are_valid(llm: SpecFuseLLM) -> None:
    """Eight at a time."""

    def predicted(number: int) -> Any:
        cls, thing, options = CLASSES[number % 3], THINGS[number % 10], {"temperature": 0.8, "seed": number}
        if number % 2:
            return llm.structured_predict(cls, PROMPT, llm_kwargs=options, thing=thing)
        prompt = f"Describe this: {thing}".replace("{", "(").replace("}", ")")
        return llm.model_copy(update=options).as_structured_llm(cls).complete(prompt).raw

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(predicted, range(50)))
    assert [type(value) for value in results] == [CLASSES[number % 3] for number in range(50)]
