"""An engine's metrics for prometheus-client (extra "metrics")."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specfuse_shared.errors import MissingExtraError
from specfuse_shared.serving.engine import EnsembleEngine
from specfuse_shared.serving.metrics import Histogram, MetricsSnapshot


def prometheus_collector(engine: EnsembleEngine, prefix: str = "specfuse") -> Any:
    """A collector to register: `prometheus_client.REGISTRY.register(prometheus_collector(engine))`."""
    try:
        from prometheus_client.metrics_core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
            Metric,
        )
    except ImportError as error:
        raise MissingExtraError("prometheus_collector", "metrics") from error

    def families(snapshot: MetricsSnapshot) -> Iterator[Metric]:
        for name in ("requests", "wins", "exits", "faults", "forwards", "forward_seconds"):
            label = "end" if name == "requests" else "member"
            counted: Mapping[str, float] = getattr(snapshot, name)
            family = CounterMetricFamily(f"{prefix}_{name}", _help(name), labels=[label])
            for key, value in counted.items():
                family.add_metric([key], value)
            yield family
        for name in ("prompt_tokens", "completion_tokens", "reused_prompt_tokens", "rounds", "verified_rounds"):
            yield CounterMetricFamily(f"{prefix}_{name}", _help(name), value=getattr(snapshot, name))
        for name in ("running", "waiting", "cache_bytes", "prefix_bytes"):
            yield GaugeMetricFamily(f"{prefix}_{name}", _help(name), value=getattr(snapshot, name))
        for name in ("queue_seconds", "first_segment_seconds", "answer_seconds", "active_members", "batch_size"):
            found: Histogram = getattr(snapshot, name)
            ends = [*map(str, found.bounds), "+Inf"]
            below = [sum(found.counts[: n + 1]) for n in range(len(ends))]
            buckets = list(zip(ends, below, strict=True))
            yield HistogramMetricFamily(f"{prefix}_{name}", _help(name), buckets=buckets, sum_value=found.total)

    class Collector:
        def collect(self) -> Iterator[Metric]:
            return families(engine.metrics())

    return Collector()


_HELP: dict[str, str] = {
    "requests": "Requests by how they ended",
    "wins": "Rounds that a member's candidate won",
    "exits": "Answers that a member left",
    "faults": "Answers that a member left because it failed",
    "forwards": "Forward passes",
    "forward_seconds": "Seconds in forward passes",
    "reused_prompt_tokens": "Prompt tokens (of all members) that were not read again",
    "running": "Answers in progress",
    "waiting": "Requests in the queue",
    "cache_bytes": "Bytes of the running answers' caches",
    "prefix_bytes": "Bytes of remembered prefixes",
    "queue_seconds": "Seconds between a request and its start",
    "first_segment_seconds": "Seconds between an answer's start and its first text",
    "answer_seconds": "Seconds an answer took",
    "active_members": "Members that took part in a round",
    "batch_size": "Answers that shared a forward pass",
}


def _help(name: str) -> str:
    return _HELP.get(name, name.replace("_", " ").capitalize())
