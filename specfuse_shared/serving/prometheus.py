"""An engine's metrics for prometheus-client (extra "metrics")."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specfuse_shared.errors import MissingExtraError
from specfuse_shared.serving.engine import EnsembleEngine
from specfuse_shared.serving.telemetry import Histogram, MetricsSnapshot

if TYPE_CHECKING:
    from prometheus_client import Metric


def prometheus_collector(engine: EnsembleEngine | Mapping[str, EnsembleEngine], prefix: str = "specfuse") -> Any:
    """A collector for `prometheus_client`.

    Args:
        engine: An engine, or several by name; the label "ensemble" then has the name.
        prefix: Prefix of the metrics' names.

    Returns:
        The collector.

    Raises:
        MissingExtraError: `prometheus_client` is not installed.

    Example:
        ```python
        from prometheus_client import CollectorRegistry, generate_latest

        from specfuse_shared import prometheus_collector

        registry = CollectorRegistry()
        registry.register(prometheus_collector(engine))
        print(generate_latest(registry)[:60])
        ```
    """
    try:
        from prometheus_client import metrics_core
    except ImportError as error:
        raise MissingExtraError("prometheus_collector", "metrics") from error
    engines = {(name,): each for name, each in engine.items()} if isinstance(engine, Mapping) else {(): engine}
    labels = ["ensemble"] if isinstance(engine, Mapping) else []

    class Collector:
        def collect(self) -> Iterator[Metric]:
            return _families(metrics_core, prefix, labels, {of: each.metrics() for of, each in engines.items()})

    return Collector()


def _families(
    core: Any, prefix: str, labels: Sequence[str], snapshots: Mapping[tuple[str, ...], MetricsSnapshot]
) -> Iterator[Metric]:
    """Each metric of all engines; `snapshots`: values of the labels → counters."""
    for name in _LABELLED:
        label = "end" if name == "requests" else "member"
        family = core.CounterMetricFamily(f"{prefix}_{name}", _help(name), labels=[*labels, label])
        for of, snapshot in snapshots.items():
            counted: Mapping[str, float] = getattr(snapshot, name)
            for key, value in counted.items():
                family.add_metric([*of, key], value)
        yield family
    for name in (*_COUNTERS, *_GAUGES):
        kind = core.CounterMetricFamily if name in _COUNTERS else core.GaugeMetricFamily
        single = kind(f"{prefix}_{name}", _help(name), labels=labels)
        for of, snapshot in snapshots.items():
            single.add_metric(of, getattr(snapshot, name))
        yield single
    for name in ("queue_seconds", "first_segment_seconds", "answer_seconds", "active_members", "batch_size"):
        histogram = core.HistogramMetricFamily(f"{prefix}_{name}", _help(name), labels=labels)
        for of, snapshot in snapshots.items():
            values: Histogram = getattr(snapshot, name)
            histogram.add_metric(of, _buckets(values), values.total)
        yield histogram


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Upper bounds, and how many values are not above each."""
    ends = [*map(str, histogram.bounds), "+Inf"]
    return [(end, sum(histogram.counts[: n + 1])) for n, end in enumerate(ends)]


_LABELLED = (
    *("requests", "wins", "exits", "faults", "late_rounds", "forwards", "forward_seconds"),
    *("accepted_guesses", "rejected_guesses", "answer_forwards", "answer_tokens"),
)
_COUNTERS = (
    *("prompt_tokens", "completion_tokens", "reused_prompt_tokens"),
    *("rounds", "verified_rounds", "led_rounds"),
)
_GAUGES = ("running", "waiting", "cache_bytes", "prefix_bytes")
_HELP: dict[str, str] = {
    "requests": "Requests by how they ended",
    "wins": "Rounds that a member's candidate won",
    "exits": "Answers that a member left",
    "faults": "Answers that a member left because it failed",
    "late_rounds": "Rounds that a member sat out because it was late",
    "forwards": "Forward passes",
    "forward_seconds": "Seconds in forward passes",
    "accepted_guesses": "Guessed tokens that a member said itself",
    "rejected_guesses": "Guessed tokens that went through a model in vain",
    "answer_forwards": "Forward passes that finished answers took part in, after their prompts",
    "answer_tokens": "Tokens of finished answers, in each member's own encoding",
    "led_rounds": "Rounds in which one member drafted first",
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
