"""OpenTelemetry spans, one an answer, where `opentelemetry-api` is installed (extra "metrics").

Attributes follow the semantic conventions for generative AI. No text of prompts or answers is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specfuse_shared.events import Event, FinishEvent, SegmentEvent, WarningEvent
from specfuse_shared.settings.sampling_params import SamplingParams

try:
    from opentelemetry import trace
except ImportError:
    trace = None  # type: ignore[assignment]


class AnswerSpan:
    """The span of one answer, a child of the caller's current one; nothing where OpenTelemetry is missing."""

    def __init__(self, members: Sequence[str], params: SamplingParams) -> None:
        self._span: Any = None
        if trace is not None:
            self._span = trace.get_tracer("specfuse_shared").start_span(
                "chat specfuse",
                attributes={
                    "gen_ai.operation.name": "chat",
                    "gen_ai.provider.name": "specfuse",
                    "gen_ai.request.model": "+".join(members),
                    "gen_ai.request.max_tokens": params.max_tokens,
                    "gen_ai.request.temperature": float(params.temperature),
                },
            )

    def observe(self, item: Event | Exception) -> None:
        """Record an event; the last one ends the span."""
        span = self._span
        if span is None:
            return
        if isinstance(item, SegmentEvent) and item.record is not None:
            record = item.record
            span.add_event("segment", {"round": record.index, "member": record.winner, "active": len(record.active)})
        elif isinstance(item, WarningEvent):
            span.add_event("warning", {"member": item.member, "stage": item.stage})
        elif isinstance(item, FinishEvent):
            usage = item.result.usage
            span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
            span.set_attribute("gen_ai.response.finish_reasons", [str(item.result.finish_reason)])
            span.end()
        elif isinstance(item, Exception):
            span.set_attribute("error.type", type(item).__name__)
            span.set_status(trace.Status(trace.StatusCode.ERROR, type(item).__name__))
            span.end()
