"""Third-party OpenTelemetry exporters read our model's name, sampling parameters and token counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from langchain_core.messages.ai import UsageMetadata

from langchain_specfuse import ChatSpecFuse
from specfuse_shared import EnsembleEngine
from tests.support.exporting import Spans, instrumented, parameters

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a warning of the exporter


@pytest.fixture
def model(tiny: EnsembleEngine) -> ChatSpecFuse:
    return ChatSpecFuse(engine=tiny, max_tokens=9, temperature=0.5, seed=1)


@pytest.fixture
def openinference() -> Iterator[Spans]:
    with instrumented("openinference.instrumentation.langchain", "LangChainInstrumentor") as spans:
        yield spans


@pytest.fixture
def openllmetry() -> Iterator[Spans]:
    with instrumented("opentelemetry.instrumentation.langchain", "LangchainInstrumentor") as spans:
        yield spans


async def usage_of_four_calls(model: ChatSpecFuse) -> UsageMetadata:
    """The same question by each method; the usage of the first answer."""
    whole = model.invoke("Hello")
    list(model.stream("Hello"))
    await model.ainvoke("Hello")
    _ = [chunk async for chunk in model.astream("Hello")]
    assert whole.usage_metadata is not None
    return whole.usage_metadata


async def test_openinference_finds_name_sampling_and_tokens(model: ChatSpecFuse, openinference: Spans) -> None:
    usage = await usage_of_four_calls(model)
    spans = openinference.of_models("llm.model_name")
    assert len(spans) == 4
    for span in spans:
        assert (span["llm.model_name"], span["llm.finish_reason"]) == ("chat+base", "length")
        assert (parameters(span)["max_tokens"], parameters(span)["temperature"]) == (9, 0.5)
        assert span["llm.token_count.prompt"] == usage["input_tokens"]
        assert span["llm.token_count.completion"] == usage["output_tokens"]


def test_openinference_finds_the_options_of_a_call(model: ChatSpecFuse, openinference: Spans) -> None:
    model.invoke("Hello", max_tokens=5, temperature=0.0)
    [span] = openinference.of_models("llm.model_name")
    assert (parameters(span)["max_tokens"], parameters(span)["temperature"]) == (5, 0.0)
    assert span["llm.token_count.completion"] == 5


async def test_openllmetry_finds_name_sampling_and_tokens(model: ChatSpecFuse, openllmetry: Spans) -> None:
    usage = await usage_of_four_calls(model)
    spans = openllmetry.of_models("gen_ai.request.model")
    assert len(spans) == 4
    for span in spans:
        assert span["gen_ai.request.model"] == span["gen_ai.response.model"] == "chat+base"
        assert (span["gen_ai.request.max_tokens"], span["gen_ai.request.temperature"]) == (9, 0.5)
        assert span["gen_ai.usage.input_tokens"] == usage["input_tokens"]
        assert span["gen_ai.usage.output_tokens"] == usage["output_tokens"]
