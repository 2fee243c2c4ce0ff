"""The engine's events of one answer as pieces of OpenAI's stream, and their fold into a whole choice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from specfuse_shared.api_server.failures import public
from specfuse_shared.api_server.replies.growing import GrowingAnswer
from specfuse_shared.api_server.requests.bodies import Extension
from specfuse_shared.api_server.requests.calls import Call
from specfuse_shared.client.wire import error_to_json, event_to_json
from specfuse_shared.errors import UnfinishedValueError
from specfuse_shared.events import Event, SegmentEvent, StartEvent
from specfuse_shared.frameworks import (
    AnswerReader,
    CallDelta,
    fold_async,
    logprobs_content,
    segment_record,
)


@dataclass(slots=True)
class ChoicePiece:
    """The part of a choice that one event adds. `calls`: pieces of tool calls in the form of OpenAI's deltas.

    `logprobs`: of the tokens that end with this piece. `all_logprobs`: of the whole answer, at its end.
    """

    text: str = ""
    thoughts: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    begins: bool = False
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None
    all_logprobs: dict[str, Any] | None = None
    specfuse: dict[str, Any] = field(default_factory=dict)


class ChoiceReader:
    """Reads the events of one choice of a request, and counts its usage.

    A value or call that `max_tokens` cut ends the choice with the reason "length", as OpenAI's clients expect.
    """

    def __init__(self, index: int, call: Call, extension: Extension) -> None:
        self.index = index
        self.usage: dict[str, Any] = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        self._call = call
        self._extension = extension
        calls = call.use.reader() if not extension.events else None  # this package's clients parse calls themselves
        self._answer = AnswerReader(calls, "none" if extension.events else extension.ledger)
        questions = [turn.content for turn in call.choices[index].messages if turn.role == "user"]
        self._growing = GrowingAnswer(questions[-1] if questions else "")

    async def pieces(self, events: AsyncIterator[Event]) -> AsyncIterator[ChoicePiece]:
        """A piece for every event that clients see."""
        try:
            async for event in events:
                piece = await fold_async(self._piece, public(event))
                if piece != ChoicePiece() or self._extension.report:
                    yield piece
        except UnfinishedValueError as error:
            yield self._cut(error)

    async def report(self) -> dict[str, str]:
        """The report of the current answer; empty if the request wants none, or the last report is recent.

        Only the sender of pieces calls this, so no report is rendered for an answer that the client does not read.
        """
        if not (self._extension.report and self._growing.is_due):
            return {}
        return await asyncio.to_thread(self._growing.report)

    def _piece(self, event: Event) -> ChoicePiece:
        if self._extension.report:
            self._growing.observe(event)
        part = self._answer.read(event)
        piece = ChoicePiece(part.text, part.thoughts, list(map(_as_openai, part.calls)), isinstance(event, StartEvent))
        if isinstance(event, StartEvent):
            self._count(event.prompt_tokens, 0)
        elif isinstance(event, SegmentEvent):
            piece.logprobs = logprobs_content(event.logprobs) if event.logprobs else None
            piece.specfuse["segments"] = [segment_record(event)]
        elif part.end is not None:
            self.usage, piece.finish_reason = part.end.usage, part.end.finish_reason
            piece.all_logprobs = part.end.logprobs
            if part.end.record:
                piece.specfuse["record"] = part.end.record
        if self._extension.events:
            piece.specfuse = {"events": [event_to_json(event)]}
        return piece

    def _cut(self, error: UnfinishedValueError) -> ChoicePiece:
        if not self.usage["completion_tokens"]:
            model = self._call.model
            self._count(self.usage["prompt_tokens"], len(model.engine.tokenize(error.text, members=model.members)))
        details = {"error": error_to_json(error)} if self._extension.events else {}
        return ChoicePiece(finish_reason="length", specfuse=details)

    def _count(self, prompt: int, completion: int) -> None:
        usage = {"prompt_tokens": prompt, "completion_tokens": completion}
        self.usage = {**usage, "total_tokens": prompt + completion}


def _as_openai(call: CallDelta) -> dict[str, Any]:
    """The delta of a call in OpenAI's form. Only a call's first delta has its id and name."""
    named = {"id": call.id, "type": "function"} if call.id else {}
    function = {"name": call.name} if call.name else {}
    return {"index": call.index, **named, "function": {**function, "arguments": call.arguments}}


class Folded:
    """A whole choice, from its pieces."""

    def __init__(self) -> None:
        self.text = ""
        self.thoughts = ""
        self.calls: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.all_logprobs: dict[str, Any] | None = None
        self.specfuse: dict[str, Any] = {}

    def add(self, piece: ChoicePiece) -> None:
        self.text += piece.text
        self.thoughts += piece.thoughts
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.all_logprobs = piece.all_logprobs or self.all_logprobs
        for delta in piece.calls:
            if delta["index"] == len(self.calls):
                begun = {key: value for key, value in delta.items() if key != "index"}
                self.calls.append({**begun, "function": dict(delta["function"])})
            else:
                self.calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
        for key, value in piece.specfuse.items():
            self.specfuse[key] = [*self.specfuse.get(key, []), *value] if isinstance(value, list) else value
