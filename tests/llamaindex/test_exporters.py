"""Third-party OpenTelemetry exporters read our model's name, sampling parameters and token counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import Grammar
from tests.llamaindex.instrumentation import ENDPOINTS, ask
from tests.support.exporting import Spans, instrumented, parameters

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a warning of the exporter


@pytest.fixture
def sampled(tiny_llm: SpecFuseLLM) -> SpecFuseLLM:
    return tiny_llm.model_copy(update={"max_tokens": 9, "temperature": 0.5, "seed": 1})


@pytest.fixture
def openinference() -> Iterator[Spans]:
    with instrumented("openinference.instrumentation.llama_index", "LlamaIndexInstrumentor") as spans:
        yield spans


@pytest.fixture
def openllmetry() -> Iterator[Spans]:
    with instrumented("opentelemetry.instrumentation.llamaindex", "LlamaIndexInstrumentor") as spans:
        yield spans


async def usage(llm: SpecFuseLLM, endpoints: tuple[str, ...]) -> list[dict[str, Any]]:
    """The counts of each endpoint."""
    return [(await ask(llm, endpoint, "Hello"))[-1].raw["usage"] for endpoint in endpoints]


async def test_openinference_finds_name_sampling_and_tokens(sampled: SpecFuseLLM, openinference: Spans) -> None:
    counted = await usage(sampled, ENDPOINTS)
    spans = openinference.of_models("llm.model_name")
    assert len(spans) == len(ENDPOINTS)
    for span, reported in zip(spans, counted, strict=True):
        assert span["llm.model_name"] == "chat+base"
        assert (parameters(span)["max_tokens"], parameters(span)["temperature"]) == (9, 0.5)
        assert span["llm.token_count.prompt"] == reported["prompt_tokens"]
        assert span["llm.token_count.completion"] == reported["completion_tokens"]


async def test_openllmetry_finds_name_temperature_and_tokens_of_chats(sampled: SpecFuseLLM, openllmetry: Spans) -> None:
    """This exporter writes no `max_tokens`, and nothing about completions."""
    chats = tuple(endpoint for endpoint in ENDPOINTS if "chat" in endpoint)
    counted = await usage(sampled, chats)
    spans = openllmetry.of_models("gen_ai.request.model")
    assert len(spans) == len(chats)
    for span, reported in zip(spans, counted, strict=True):
        assert span["gen_ai.request.model"] == span["gen_ai.response.model"] == "chat+base"
        assert span["gen_ai.request.temperature"] == 0.5
        assert span["gen_ai.usage.input_tokens"] == reported["prompt_tokens"]
        assert span["gen_ai.usage.output_tokens"] == reported["completion_tokens"]


@pytest.mark.parametrize(
    "grammar",
    [Grammar.choice(["yes", "no"]), Grammar.json_schema({"type": "object"}), Grammar.regex("a+"), None],
    ids=str,
)
def test_the_content_of_a_trace_is_plain_json(grammar: Grammar | None) -> None:
    llm = SpecFuseLLM(members=["no/one"], grammar=grammar, stop=["x"], seed=3)
    reported = json.loads(json.dumps(llm.to_payload()))
    assert reported["model"] == "one"
    assert reported.get("grammar") == (None if grammar is None else asdict(grammar))
    assert json.loads(json.dumps(llm.metadata.model_dump()))["model_name"] == "one"
