"""An answer that is still being written, as a record that a report can be drawn from."""

from __future__ import annotations

import time
from dataclasses import replace

from specfuse_shared.events import Event, ExitEvent, FinishEvent, SegmentEvent, StartEvent, ThinkingEvent, WarningEvent
from specfuse_shared.report.html import fragment
from specfuse_shared.types import AnswerRecord, FinishReason, MemberFault, RoundRecord, Usage


class GrowingAnswer:
    """Follows the events of one answer. Tokens are counted as their authors count them, until the answer is over."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._record: AnswerRecord | None = None
        self._over = False

    def observe(self, event: Event) -> bool:
        """Take an event; True if there is something new to show."""
        if isinstance(event, StartEvent):
            self._record = self._started(event)
        elif isinstance(event, FinishEvent):
            self._record, self._over = event.result, True
        elif self._record is not None:
            self._record = self._grown(self._record, event)
        return self._record is not None

    def report(self) -> str:
        """The report of the answer so far, as an element."""
        assert self._record is not None, "the answer has not begun"
        return fragment(self._record, running=not self._over)

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
            fault = MemberFault(event.member, event.stage, event.message)
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
