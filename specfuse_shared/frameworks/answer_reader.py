"""Reads the events of one answer into the parts that every chat API reports: text, reasoning, tool calls, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from specfuse_shared.events import EnsembleResult, Event, FinishEvent, SegmentEvent, ThinkingEvent
from specfuse_shared.frameworks.records import (
    Detail,
    Thoughts,
    Whole,
    check_whole,
    finish_reason,
    last_parts,
    ledger,
    openai_logprobs,
    usage_record,
)
from specfuse_shared.messages import ToolCall
from specfuse_shared.text.tool_calls import CallDelta, CallReader, TextDelta

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The end of an answer. `usage` and `logprobs`: in the form of OpenAI's API. `record`: see `ledger`."""

    result: EnsembleResult
    finish_reason: str
    usage: dict[str, Any]
    logprobs: dict[str, Any] | None
    record: dict[str, Any]


@dataclass(slots=True)
class AnswerPart:
    """The part of an answer that one event adds. `calls`: at most one piece per call."""

    text: str = ""
    thoughts: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    end: AnswerEnd | None = None


class AnswerReader:
    """Folds the events of one answer.

    `calls`: reads calls if tools were offered; it holds back text that may become a call. `detail`: how much of the
    record the end includes. `whole`: the kind of answer that raises `UnfinishedValueError` when `max_tokens` cuts it.
    `may_close`: accept such an answer if brackets and quotes completed it.
    """

    def __init__(
        self, calls: CallReader | None, detail: Detail = "none", *, whole: Whole = "none", may_close: bool = False
    ) -> None:
        self._calls = calls
        self._detail = detail
        self._whole = whole
        self._may_close = may_close
        self._thoughts = Thoughts()

    @property
    def complete_calls(self) -> tuple[ToolCall, ...]:
        return tuple(self._calls.calls) if self._calls else ()

    def read(self, event: Event) -> AnswerPart:
        """The part that an event adds; it may be empty. Raises `UnfinishedValueError` at a cut end, if `whole`."""
        part = AnswerPart()
        if isinstance(event, ThinkingEvent):
            part.thoughts = self._thoughts.feed(event)
        elif isinstance(event, SegmentEvent):
            part.thoughts = self._thoughts.rest()
            _add(part, self._calls.feed(event.text) if self._calls else (TextDelta(event.text),))
        elif isinstance(event, FinishEvent):
            part.thoughts = self._thoughts.rest()
            self._finish(part, event.result)
        return part

    def _finish(self, part: AnswerPart, result: EnsembleResult) -> None:
        check_whole(result, self._whole, self._calls, may_close=self._may_close)
        _add(part, last_parts(self._calls, result, may_close=self._may_close))
        part.end = AnswerEnd(
            result,
            finish_reason(result, called=bool(self._calls and self._calls.calling)),
            usage_record(result.usage),
            openai_logprobs(result),
            ledger(result, self._detail),
        )


async def fold_async(fold: Callable[[Event], T], event: Event) -> T:
    """`fold(event)`. The end of an answer is folded in a thread: the record of a very long answer takes a second."""
    if isinstance(event, FinishEvent):
        return await asyncio.to_thread(fold, event)
    return fold(event)


def _add(part: AnswerPart, deltas: Iterable[TextDelta | CallDelta]) -> None:
    for delta in deltas:
        if isinstance(delta, TextDelta):
            part.text += delta.text
        elif part.calls and part.calls[-1].index == delta.index:
            part.calls[-1] = replace(part.calls[-1], arguments=part.calls[-1].arguments + delta.arguments)
        else:
            part.calls.append(delta)
