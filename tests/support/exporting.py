"""Third-party OpenTelemetry exporters with our models: the spans of an instrumentor during a test."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

Attributes = Mapping[str, Any]


class Spans:
    """The exported spans."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def of_models(self, key: str) -> list[Attributes]:
        """The attributes of spans with this attribute, oldest first, without duplicates."""
        spans: tuple[ReadableSpan, ...] = self._exporter.get_finished_spans()
        self._exporter.clear()
        return [span.attributes for span in spans if span.attributes and key in span.attributes]


@contextmanager
def instrumented(module: str, name: str) -> Iterator[Spans]:
    """The spans of an instrumentor, which watches until the block ends; skips where it is not installed."""
    pytest.importorskip(module)
    spans, instrumentor = Spans(), getattr(import_module(module), name)()
    instrumentor.instrument(tracer_provider=spans.provider, skip_dep_check=True)
    try:
        yield spans
    finally:
        instrumentor.uninstrument()


def parameters(span: Attributes) -> dict[str, Any]:
    """OpenInference's invocation parameters."""
    reported: dict[str, Any] = json.loads(span["llm.invocation_parameters"])
    return reported
