"""An answer in OpenAI's Responses API: output items, and the events that report their growth."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from specfuse_shared.api_server.failures import error_body
from specfuse_shared.api_server.replies.answers import ChoicePiece, ChoiceReader, Folded
from specfuse_shared.api_server.replies.formats import Format, line
from specfuse_shared.api_server.requests.calls import Call
from specfuse_shared.api_server.requests.responses_api import ResponsesBody
from specfuse_shared.errors import SpecFuseError

Told = tuple[str, dict[str, Any]]
"""The type of an event, without "response.", and its fields."""


@dataclass(frozen=True, slots=True)
class TextKind:
    """An item with one text. `place`: the key of its parts. `part_event` and `text_event`: the events about them."""

    item: Mapping[str, Any]
    prefix: str
    place: str
    part: Mapping[str, Any]
    part_event: str
    text_event: str

    @property
    def index(self) -> dict[str, int]:
        return {f"{self.place}_index": 0}


MESSAGE = TextKind(
    item={"type": "message", "role": "assistant", "content": []},
    prefix="msg",
    place="content",
    part={"type": "output_text", "annotations": [], "logprobs": []},
    part_event="content_part",
    text_event="output_text",
)
THOUGHTS = TextKind(
    item={"type": "reasoning", "summary": [], "content": []},
    prefix="rs",
    place="content",
    part={"type": "reasoning_text"},
    part_event="content_part",
    text_event="reasoning_text",
)
SUMMARY = TextKind(
    item={"type": "reasoning", "summary": []},
    prefix="rs",
    place="summary",
    part={"type": "summary_text"},
    part_event="reasoning_summary_part",
    text_event="reasoning_summary_text",
)


@dataclass(slots=True)
class Output:
    """The items of an answer. Only the last one grows. Its events must be written before it changes again."""

    thoughts: TextKind
    items: list[dict[str, Any]] = field(default_factory=list)
    _open: TextKind | None = None
    """The kind of the last item; None for a call."""
    _waiting: list[dict[str, Any]] = field(default_factory=list)
    """Log-probabilities of tokens that were not sent yet."""
    _sent_bytes: int = 0
    """Bytes of the tokens whose log-probabilities were sent."""

    def write(self, piece: ChoicePiece | Folded) -> Iterator[Told]:
        """The events of a piece: reasoning, then text, then calls, which is their order in an answer."""
        if isinstance(piece, ChoicePiece) and piece.logprobs is not None:
            self._waiting += piece.logprobs["content"]
        if piece.thoughts:
            yield from self._text(self.thoughts, piece.thoughts)
        if piece.text:
            yield from self._text(MESSAGE, piece.text)
        for delta in piece.calls:
            yield from self._call(delta)
        if piece.finish_reason is not None:
            yield from self._finish(piece)

    def _text(self, kind: TextKind, text: str) -> Iterator[Told]:
        if not self.items or self._open is not kind:
            yield from self._close("completed")
            yield from self._begin({"id": f"{kind.prefix}_{secrets.token_hex(12)}", **kind.item, kind.place: []}, kind)
            part = {**kind.part, "text": ""}
            yield f"{kind.part_event}.added", {**self._at, **kind.index, "part": dict(part)}
            self.items[-1][kind.place].append(part)
        self.items[-1][kind.place][0]["text"] += text
        payload = {**self._at, **kind.index, "delta": text}
        if kind is MESSAGE:
            payload["logprobs"] = self._logprobs_within(self.items[-1]["content"][0]["text"])
        yield f"{kind.text_event}.delta", payload

    def _logprobs_within(self, text: str) -> list[Mapping[str, Any]]:
        """Log-probabilities of tokens that end in this text of the message and are in no earlier delta."""
        tokens = _within(self._waiting, len(text.encode()) - self._sent_bytes)
        del self._waiting[: len(tokens)]
        self._sent_bytes += sum(len(token["bytes"]) for token in tokens)
        return tokens

    def _call(self, delta: Mapping[str, Any]) -> Iterator[Told]:
        function = delta["function"]
        if "id" in delta:
            yield from self._close("completed")
            named = {"call_id": delta["id"], "name": function["name"], "arguments": ""}
            yield from self._begin({"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", **named}, None)
        if function["arguments"]:
            self.items[-1]["arguments"] += function["arguments"]
            yield "function_call_arguments.delta", {**self._at, "delta": function["arguments"]}

    def _finish(self, piece: ChoicePiece | Folded) -> Iterator[Told]:
        if all(item["type"] == "reasoning" for item in self.items):
            yield from self._text(MESSAGE, "")
        if piece.all_logprobs is not None:
            for item in self.items:
                if item["type"] == "message":
                    part = item["content"][0]
                    part["logprobs"] = _within(piece.all_logprobs["content"], len(part["text"].encode()))
        yield from self._close("incomplete" if piece.finish_reason == "length" else "completed")

    def _begin(self, item: dict[str, Any], kind: TextKind | None) -> Iterator[Told]:
        self.items.append(item | {"status": "in_progress"})
        self._open = kind
        yield "output_item.added", {"output_index": len(self.items) - 1, "item": dict(self.items[-1])}

    def _close(self, status: str) -> Iterator[Told]:
        """End the last item. Cut arguments get no "done" event, because clients would call the tool with them."""
        if not self.items:
            return
        item, kind = self.items[-1], self._open
        item["status"] = status
        if kind is not None:
            part = item[kind.place][0]
            text = {key: part[key] for key in ("text", "logprobs") if key in part}
            yield f"{kind.text_event}.done", {**self._at, **kind.index, **text}
            yield f"{kind.part_event}.done", {**self._at, **kind.index, "part": part}
        elif status == "completed":
            done = {key: item[key] for key in ("name", "arguments")}
            yield "function_call_arguments.done", {**self._at, **done}
        yield "output_item.done", {"output_index": len(self.items) - 1, "item": item}

    @property
    def _at(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


class ResponsesFormat(Format):
    """The format of one response. Its first events repeat the request, and the last one contains the whole answer."""

    def __init__(self, body: ResponsesBody, call: Call) -> None:
        self._numbers = count()
        self._output = Output(SUMMARY if body.summarises else THOUGHTS)
        self._folded = Folded()
        self._begun = {"id": f"resp_{secrets.token_hex(16)}", "created_at": int(time.time())} | _repeated(body, call)

    def whole(self, answers: Sequence[ChoiceReader], folded: Sequence[Folded]) -> dict[str, Any]:
        self._folded = folded[0]
        for _ in self._output.write(self._folded):
            pass
        return self._response(answers[0])

    def lines(self, answer: ChoiceReader, piece: ChoicePiece) -> Iterator[bytes]:
        """The events of a piece. Its `specfuse` details are in the first delta."""
        if piece.begins:
            for kind in ("created", "in_progress"):
                yield self._line(f"response.{kind}", {"response": self._response()})
        self._folded.add(piece)
        specfuse = piece.specfuse
        for kind, payload in self._output.write(piece):
            if specfuse and kind.endswith(".delta"):
                payload, specfuse = {**payload, "specfuse": specfuse}, {}
            yield self._line(f"response.{kind}", payload)

    def end(self, answers: Sequence[ChoiceReader]) -> Iterator[bytes]:
        response = self._response(answers[0])
        yield self._line(f"response.{response['status']}", {"response": response})

    def failure(self, error: SpecFuseError) -> bytes:
        """The error in the fields of OpenAI's event, and as an `error` object, for which its clients raise."""
        body = error_body(error)
        return self._line("error", {**{key: body["error"][key] for key in ("code", "message", "param")}, **body})

    def _line(self, kind: str, payload: Mapping[str, Any]) -> bytes:
        return line({"type": kind, "sequence_number": next(self._numbers), **payload}, kind)

    def _response(self, answer: ChoiceReader | None = None) -> dict[str, Any]:
        """The response object at the beginning, or after its `answer`."""
        if answer is None:
            return {**self._begun, "status": "in_progress", "output": [], "usage": None}
        cut = self._folded.finish_reason == "length"
        return {
            **self._begun,
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output.items,
            "usage": _usage(answer),
            **({"specfuse": self._folded.specfuse} if self._folded.specfuse else {}),
        }


def _repeated(body: ResponsesBody, call: Call) -> dict[str, Any]:
    """The settings of the request that the response repeats, with defaults filled in."""
    params, echoed = call.choices[0].params, body.model_dump(by_alias=True, include={"text", "tools", "tool_choice"})
    return {
        "object": "response",
        "model": call.model.id,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": bool(body.parallel_tool_calls),
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": "detailed" if body.summarises else None},
        "background": False,
        "store": False,
        "temperature": params.temperature,
        "top_logprobs": params.top_logprobs,
        "top_p": params.top_p,
        "text": {"format": echoed["text"]["format"] if body.text and body.text.format else {"type": "text"}},
        "tool_choice": echoed["tool_choice"] or "auto",
        "tools": echoed["tools"] or [],
        "truncation": "disabled",
    }


def _usage(answer: ChoiceReader) -> dict[str, Any]:
    details: Any = answer.usage.get("completion_tokens_details", {})
    return {
        "input_tokens": answer.usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0, **details},
        "total_tokens": answer.usage["total_tokens"],
    }


def _within(tokens: Sequence[Mapping[str, Any]], size: int) -> list[Mapping[str, Any]]:
    """The first tokens, up to this number of bytes."""
    inside = []
    for token in tokens:
        size -= len(token["bytes"])
        if size < 0:
            break
        inside.append(token)
    return inside
