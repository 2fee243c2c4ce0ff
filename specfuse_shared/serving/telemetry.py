"""Metrics of an engine, and OpenTelemetry spans of its answers (`opentelemetry-api`, extra "metrics").

`EnsembleEngine.metrics()` returns a `MetricsSnapshot`: requests, waiting, first segments, tokens, rounds, wins, exits,
forward passes, cache use. Spans follow the semantic conventions for generative AI. They record no text.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from specfuse_shared.config import SamplingParams
from specfuse_shared.events import Event, ExitEvent, FinishEvent, SegmentEvent, WarningEvent

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
MEMBERS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)
BATCHES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)

_BY_MEMBER = (
    *("wins", "exits", "faults", "late_rounds", "forwards"),
    *("accepted_guesses", "rejected_guesses", "answer_forwards", "answer_tokens"),
)

End = Literal["finished", "cancelled", "failed"]


@dataclass(slots=True)
class Histogram:
    """Counts of values up to each bound and beyond the last one, and their sum."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def add(self, value: float) -> None:
        """Count a value.

        Args:
            value: The value; it belongs to the first bound that is not below it.

        Example:
            ```python
            from specfuse_shared import Histogram

            seconds = Histogram((0.1, 1.0))
            seconds.add(0.5)
            print(seconds.counts)
            ```
        """
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class MetricsSnapshot:
    """The state of an engine's counters at one moment. Times are seconds, memory is bytes."""

    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("finished", "cancelled", "failed"), 0))
    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_prompt_tokens: int = 0
    rounds: int = 0
    verified_rounds: int = 0
    led_rounds: int = 0
    wins: dict[str, int] = field(default_factory=dict)
    exits: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    late_rounds: dict[str, int] = field(default_factory=dict)
    forwards: dict[str, int] = field(default_factory=dict)
    forward_seconds: dict[str, float] = field(default_factory=dict)
    accepted_guesses: dict[str, int] = field(default_factory=dict)
    rejected_guesses: dict[str, int] = field(default_factory=dict)
    answer_forwards: dict[str, int] = field(default_factory=dict)
    answer_tokens: dict[str, int] = field(default_factory=dict)
    cache_bytes: int = 0
    prefix_bytes: int = 0
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    first_segment_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    answer_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    active_members: Histogram = field(default_factory=lambda: Histogram(MEMBERS))
    batch_size: Histogram = field(default_factory=lambda: Histogram(BATCHES))

    def to_dict(self) -> dict[str, Any]:
        """The counters as plain JSON.

        Returns:
            Name → value. Histograms are objects with `bounds`, `counts` and `total`.

        Example:
            ```python
            from specfuse_shared import MetricsSnapshot

            print(MetricsSnapshot().to_dict()["requests"])
            ```
        """
        return asdict(self)


class Metrics:
    """Collects; may be read and written from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = MetricsSnapshot()
        self._by_member: dict[str, Counter[str]] = {name: Counter() for name in _BY_MEMBER}
        self._forward_seconds: Counter[str] = Counter()
        self._steps: Counter[str] = Counter()

    def started(self, waited: float) -> None:
        with self._lock:
            self._now.queue_seconds.add(waited)

    def ended(self, how: End) -> None:
        with self._lock:
            self._now.requests[how] += 1

    def forward(self, member: str, answers: int, seconds: float, steps: int = 1) -> None:
        with self._lock:
            self._by_member["forwards"][member] += 1
            self._steps[member] += steps
            self._forward_seconds[member] += seconds  # type: ignore[assignment]
            self._now.batch_size.add(answers)

    def step_seconds(self) -> dict[str, float]:
        """Mean seconds of a step of each member that has run: a forward pass here, a token of a draft at a server."""
        with self._lock:
            return {name: self._forward_seconds[name] / count for name, count in self._steps.items()}

    def observe(self, event: Event) -> None:
        """Count an event."""
        with self._lock:
            if isinstance(event, SegmentEvent) and event.record is not None:
                self._now.rounds += 1
                self._now.verified_rounds += event.record.verified
                self._now.led_rounds += event.record.leader is not None
                self._now.active_members.add(len(event.record.present))
                self._by_member["wins"][event.record.winner] += 1
                self._by_member["late_rounds"].update(absence.member for absence in event.record.absent)
            elif isinstance(event, ExitEvent):
                self._by_member["exits"][event.exit.member] += 1
            elif isinstance(event, WarningEvent):
                self._by_member["faults"][event.member] += 1
            elif isinstance(event, FinishEvent):
                result = event.result
                self._now.prompt_tokens += result.usage.prompt_tokens
                self._now.completion_tokens += result.usage.completion_tokens
                for name, usage in result.usage.members.items():
                    self._by_member["accepted_guesses"][name] += usage.accepted
                    self._by_member["rejected_guesses"][name] += usage.guessed - usage.accepted
                    self._by_member["answer_forwards"][name] += usage.forwards
                    self._by_member["answer_tokens"][name] += usage.answer
                self._now.answer_seconds.add(result.total_seconds)
                if result.first_segment_seconds is not None:
                    self._now.first_segment_seconds.add(result.first_segment_seconds)

    def snapshot(self, **gauges: int) -> MetricsSnapshot:
        """A copy, with gauges that the caller read elsewhere."""
        with self._lock:
            values = asdict(self._now)
            counters = {name: dict(counter) for name, counter in self._by_member.items()}
            seconds: dict[str, float] = dict(self._forward_seconds)
        histograms = {k: Histogram(**v) for k, v in values.items() if isinstance(v, dict) and "bounds" in v}
        return MetricsSnapshot(**{**values, **histograms, **counters, **gauges, "forward_seconds": seconds})


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
