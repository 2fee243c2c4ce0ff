"""The record of an answer that is still growing, for its report."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from specfuse_shared.events import Event, ExitEvent, FinishEvent, SegmentEvent, StartEvent, ThinkingEvent, WarningEvent
from specfuse_shared.report.html import document, fragment
from specfuse_shared.types import AnswerRecord, FinishReason, MemberFault, RoundRecord, Usage

PAUSE = 0.2
"""Seconds between two reports of a growing answer."""


class GrowingAnswer:
    """Follows the events of one answer. Until its end, tokens are counted by the tokenizers of their authors.

    `title`: heading of the report as a file, usually the question.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._began = time.monotonic()
        self._last_report = -math.inf
        self._record: AnswerRecord | None = None
        self._ended = self._end_reported = False

    def observe(self, event: Event) -> None:
        """Update the record with an event."""
        if isinstance(event, StartEvent):
            self._record = self._started(event)
        elif isinstance(event, FinishEvent):
            self._record, self._ended = event.result, True
        elif self._record is not None:
            self._record = self._grown(self._record, event)

    @property
    def is_due(self) -> bool:
        """Whether a new report is due: `PAUSE` seconds after the last one, and once at the end of the answer."""
        if self._record is None or self._end_reported:
            return False
        return self._ended or time.monotonic() - self._last_report >= PAUSE

    def report(self) -> dict[str, str]:
        """The report of the answer so far, as an HTML element; at the end, also as a file."""
        assert self._record is not None, "the answer has not begun"
        self._last_report, self._end_reported = time.monotonic(), self._ended
        payload = {"report": fragment(self._record, running=not self._ended)}
        return {**payload, "document": document(self._record, self._title)} if self._ended else payload

    def _started(self, event: StartEvent) -> AnswerRecord:
        return AnswerRecord(
            text="",
            finish_reason=FinishReason.LENGTH,
            stop_sequence=None,
            usage=Usage(event.prompt_tokens, 0, event.members[0]),
            rounds=(),
            members=event.members,
            seed=None,
            prefill_seconds=self._since(),
            first_segment_seconds=None,
            total_seconds=self._since(),
        )

    def _grown(self, record: AnswerRecord, event: Event) -> AnswerRecord:
        record = replace(record, total_seconds=self._since())
        if isinstance(event, ThinkingEvent):
            thoughts = record.thinking.get(event.member, "") + event.text
            return replace(record, thinking={**record.thinking, event.member: thoughts})
        if isinstance(event, WarningEvent):
            fault = MemberFault(event.member, event.stage, event.message, event.kind)
            return replace(record, warnings=(*record.warnings, fault))
        if isinstance(event, ExitEvent) and record.rounds:
            *rounds, last = record.rounds
            exits = last.exits if event.exit in last.exits else (*last.exits, event.exit)
            return replace(record, rounds=(*rounds, replace(last, exits=exits)))
        return self._with_segment(record, event) if isinstance(event, SegmentEvent) else record

    def _with_segment(self, record: AnswerRecord, event: SegmentEvent) -> AnswerRecord:
        rounds = record.rounds if event.record is None else (*record.rounds, event.record)
        usage = replace(record.usage, completion_tokens=sum(map(_tokens, rounds)))
        first = record.first_segment_seconds
        return replace(
            record,
            text=record.text + event.text,
            rounds=rounds,
            usage=usage,
            first_segment_seconds=self._since() if first is None else first,
        )

    def _since(self) -> float:
        return time.monotonic() - self._began


def _tokens(record: RoundRecord) -> int:
    return next(c.tokens for c in record.candidates if record.winner in c.drafters)
