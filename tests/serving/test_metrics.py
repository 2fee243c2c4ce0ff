"""The counters of an engine, and their export to Prometheus and OpenTelemetry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from specfuse_shared import (
    EnsembleEngine,
    EnsembleResult,
    Histogram,
    RequestTimeoutError,
    SamplingParams,
    prometheus_collector,
)

SECRET = "the vault code is 4711"


@pytest.fixture(scope="module")
def engine(tiny_engine: EnsembleEngine) -> Iterator[EnsembleEngine]:
    with EnsembleEngine(replace(tiny_engine.config, exit="entropy")) as made:
        yield made.load()


@pytest.fixture(scope="module")
def results(engine: EnsembleEngine) -> list[EnsembleResult]:
    answers = engine.generate_batch([f"Question {n} about tides" for n in range(4)], SamplingParams(max_tokens=40))
    return [answer for answer in answers if isinstance(answer, EnsembleResult)]


def test_counters_agree_with_the_results(engine: EnsembleEngine, results: list[EnsembleResult]) -> None:
    result = engine.metrics()
    assert result.requests == {"finished": 4, "cancelled": 0, "failed": 0}
    assert result.completion_tokens == sum(r.usage.completion_tokens for r in results)
    assert result.prompt_tokens == sum(r.usage.prompt_tokens for r in results)
    assert result.rounds == sum(len(r.rounds) for r in results)
    for name in engine.config.names:
        assert result.wins.get(name, 0) == sum(round_.winner == name for r in results for round_ in r.rounds)
        assert result.forwards[name] > 0 < result.forward_seconds[name]
    assert result.answer_seconds.count == result.queue_seconds.count == 4
    assert result.answer_seconds.total == pytest.approx(sum(r.total_seconds for r in results))
    assert result.active_members.count == result.rounds
    assert result.running == result.waiting == result.cache_bytes == 0
    json.dumps(result.to_dict())


def test_histograms_count_up_to_their_bounds() -> None:
    result = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        result.add(value)
    assert result.counts == [2, 1, 1]
    assert result.count == 4
    assert result.mean == 3.0


def test_prometheus_sees_the_same_numbers(engine: EnsembleEngine, results: list[EnsembleResult]) -> None:
    registry = CollectorRegistry()
    registry.register(prometheus_collector(engine))
    now = engine.metrics()
    assert registry.get_sample_value("specfuse_requests_total", {"end": "finished"}) == now.requests["finished"]
    assert registry.get_sample_value("specfuse_completion_tokens_total") == now.completion_tokens
    assert registry.get_sample_value("specfuse_answer_seconds_count") == now.answer_seconds.count
    assert registry.get_sample_value("specfuse_answer_seconds_bucket", {"le": "+Inf"}) == now.answer_seconds.count
    assert b"# HELP specfuse_running Answers in progress" in generate_latest(registry)


def test_a_span_describes_an_answer_without_its_text(engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    result = engine.generate(f"Remember that {SECRET}", SamplingParams(max_tokens=20))
    with pytest.raises(RequestTimeoutError):
        engine.generate(f"Forget that {SECRET}", SamplingParams(max_tokens=300), timeout=0.001)
    finished, late = exporter.get_finished_spans()
    assert finished.attributes is not None
    assert finished.attributes["gen_ai.usage.output_tokens"] == result.usage.completion_tokens
    assert finished.attributes["gen_ai.request.model"] == "chat+base"
    assert [e.name for e in finished.events] == ["segment"] * len(result.rounds)
    assert late.attributes is not None
    assert late.attributes["error.type"] == "RequestTimeoutError"
    for span in (finished, late):
        assert SECRET not in span.to_json()
        assert not result.text or result.text not in span.to_json()
