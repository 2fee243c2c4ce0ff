"""Failed requests raise errors that LlamaIndex passes on; unreadable output raises the errors that it handles."""

from __future__ import annotations

import logging

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, Field

from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared.errors import PromptTooLongError, RequestError, UnfinishedValueError, ValueTooLongError

PROMPT = PromptTemplate("Write about {thing}.")


class Story(BaseModel):
    """A story."""

    text: str = Field(min_length=200)


def long_nodes() -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text="many words " * 3000), score=1.0)]


def blind(llm: SpecFuseLLM) -> SpecFuseLLM:
    """A setting under which LlamaIndex assumes that every prompt fits."""
    return llm.model_copy(update={"context_window": 200_000})


@pytest.mark.parametrize("mode", [ResponseMode.REFINE, ResponseMode.COMPACT, ResponseMode.TREE_SUMMARIZE], ids=str)
def test_a_prompt_that_is_too_long_raises_an_error(mode: ResponseMode, tiny_llm: SpecFuseLLM) -> None:
    synthesizer = get_response_synthesizer(llm=blind(tiny_llm), response_mode=mode)
    with pytest.raises(PromptTooLongError):
        synthesizer.synthesize("What is it?", long_nodes())


async def test_a_prompt_that_is_too_long_raises_asynchronously_and_with_filtered_answers(tiny_llm: SpecFuseLLM) -> None:
    synthesizer = get_response_synthesizer(llm=blind(tiny_llm), structured_answer_filtering=True)
    with pytest.raises(PromptTooLongError):
        await synthesizer.asynthesize("What is it?", long_nodes())


def test_a_value_that_does_not_fit_is_reported_although_refine_continues(
    tiny_llm: SpecFuseLLM, caplog: pytest.LogCaptureFixture
) -> None:
    short = tiny_llm.model_copy(update={"max_tokens": 8})
    synthesizer = get_response_synthesizer(llm=short, structured_answer_filtering=True)
    nodes = [NodeWithScore(node=TextNode(text="It opens at seven."), score=1.0)]
    assert str(synthesizer.synthesize("When?", nodes)) == "Empty Response"
    [record] = [record for record in caplog.records if record.name.startswith("llamaindex_specfuse")]
    assert record.levelno == logging.WARNING
    assert "max_tokens=8" in record.getMessage()


def test_length_errors_of_values_are_value_errors(tiny_llm: SpecFuseLLM) -> None:
    for error in (ValueTooLongError, UnfinishedValueError):
        assert issubclass(error, ValueError)
    with pytest.raises(ValueTooLongError, match="max_tokens=40"):
        tiny_llm.structured_predict(Story, PROMPT, llm_kwargs={"max_tokens": 40}, thing="the sea")
    with pytest.raises(ValueError, match="max_tokens=40"):
        list(tiny_llm.stream_structured_predict(Story, PROMPT, llm_kwargs={"max_tokens": 40}, thing="the sea"))


def test_a_missing_call_is_a_value_error_and_an_error_of_ours(tiny_llm: SpecFuseLLM) -> None:
    response = tiny_llm.chat([ChatMessage("Hello")], max_tokens=4)
    for kind in (RequestError, ValueError):
        with pytest.raises(kind, match="tool_required"):
            tiny_llm.get_tool_calls_from_response(response)


def test_a_refused_request_is_no_value_error(tiny_llm: SpecFuseLLM) -> None:
    tool = FunctionTool.from_defaults(lambda: "x", name="weather")
    with pytest.raises(RequestError) as caught:
        tiny_llm.chat_with_tools([tool], "much " * 9000)
    assert not isinstance(caught.value, ValueError)
