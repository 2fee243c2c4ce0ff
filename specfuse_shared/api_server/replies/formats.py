"""The formats of OpenAI's chat completions and completions."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import Any

from specfuse_shared.api_server.failures import error_body
from specfuse_shared.api_server.replies.answers import ChoicePiece, ChoiceReader, Folded
from specfuse_shared.api_server.requests.bodies import Asked
from specfuse_shared.api_server.requests.calls import Call
from specfuse_shared.errors import SpecFuseError

FINGERPRINT = f"specfuse-{version('specfuse-llm')}"


class Format(ABC):
    """The format of a response: one object, or server-sent events."""

    @abstractmethod
    def whole(self, answers: Sequence[ChoiceReader], folded: Sequence[Folded]) -> dict[str, Any]:
        """The object that holds every choice."""

    @abstractmethod
    def lines(self, answer: ChoiceReader, piece: ChoicePiece) -> Iterator[bytes]:
        """The stream events of a piece."""

    @abstractmethod
    def end(self, answers: Sequence[ChoiceReader]) -> Iterator[bytes]:
        """The last events, once every choice is over."""

    @abstractmethod
    def failure(self, error: SpecFuseError) -> bytes:
        """The event that ends the stream of an answer that failed."""


class ChoicesFormat(Format):
    """The common format of chats and completions: an envelope with choices."""

    prefix, whole_object, chunk_object = "", "", ""

    def __init__(self, body: Asked, call: Call) -> None:
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = call.model.id
        self._wants_usage = body.wants_usage
        self._offsets = defaultdict[int, int](int)

    def whole(self, answers: Sequence[ChoiceReader], folded: Sequence[Folded]) -> dict[str, Any]:
        choices = [self._choice(answer.index, each) for answer, each in zip(answers, folded, strict=True)]
        return {**self._envelope(self.whole_object), "choices": choices, "usage": usage_of(answers)}

    def lines(self, answer: ChoiceReader, piece: ChoicePiece) -> Iterator[bytes]:
        """A chunk. If the stream ends with usage, all earlier chunks have `"usage": null`."""
        choice: dict[str, Any] = {
            "index": answer.index,
            **self._delta(piece),
            "logprobs": self._logprobs(piece.logprobs, answer.index),
            "finish_reason": piece.finish_reason,
            **({"specfuse": piece.specfuse} if piece.specfuse else {}),
        }
        none = {"usage": None} if self._wants_usage else {}
        yield line({**self._envelope(self.chunk_object), "choices": [choice], **none})

    def end(self, answers: Sequence[ChoiceReader]) -> Iterator[bytes]:
        if self._wants_usage:
            yield line({**self._envelope(self.chunk_object), "choices": [], "usage": usage_of(answers)})
        yield b"data: [DONE]\n\n"

    def failure(self, error: SpecFuseError) -> bytes:
        return line(error_body(error))

    def _envelope(self, kind: str) -> dict[str, Any]:
        envelope = {"id": self._id, "object": kind, "created": self._created}
        return {**envelope, "model": self._model, "system_fingerprint": FINGERPRINT}

    def _choice(self, index: int, folded: Folded) -> dict[str, Any]:
        return {
            "index": index,
            **self._message(folded),
            "logprobs": self._logprobs(folded.all_logprobs),
            "finish_reason": folded.finish_reason,
            **({"specfuse": folded.specfuse} if folded.specfuse else {}),
        }

    def _delta(self, piece: ChoicePiece) -> dict[str, Any]:
        raise NotImplementedError

    def _message(self, folded: Folded) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, logprobs: Mapping[str, Any] | None, streamed: int | None = None) -> dict[str, Any] | None:
        """Log-probabilities of a whole choice, or of a piece of the choice with the number `streamed`."""
        raise NotImplementedError


class ChatFormat(ChoicesFormat):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _delta(self, piece: ChoicePiece) -> dict[str, Any]:
        role = {"role": "assistant", "content": ""} if piece.begins else {}
        delta = {"content": piece.text, "reasoning_content": piece.thoughts, "tool_calls": piece.calls}
        return {"delta": role | {key: value for key, value in delta.items() if value}}

    def _message(self, folded: Folded) -> dict[str, Any]:
        extras = {"reasoning_content": folded.thoughts, "tool_calls": folded.calls}
        content = folded.text if folded.text or not folded.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
        return {"message": message | {key: value for key, value in extras.items() if value}}

    def _logprobs(self, logprobs: Mapping[str, Any] | None, streamed: int | None = None) -> dict[str, Any] | None:
        return None if logprobs is None else {**logprobs, "refusal": None}


class CompletionFormat(ChoicesFormat):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _delta(self, piece: ChoicePiece) -> dict[str, Any]:
        return {"text": piece.text}

    def _message(self, folded: Folded) -> dict[str, Any]:
        return {"text": folded.text}

    def _logprobs(self, logprobs: Mapping[str, Any] | None, streamed: int | None = None) -> dict[str, Any] | None:
        """Parallel lists; offsets refer to the joined text of the tokens."""
        if logprobs is None:
            return None
        tokens = [entry["token"] for entry in logprobs["content"]]
        start = 0 if streamed is None else self._offsets[streamed]
        *offsets, end = accumulate(map(len, tokens), initial=start)
        if streamed is not None:
            self._offsets[streamed] = end
        each = [entry["logprob"] for entry in logprobs["content"]]
        tops = list(map(_tops, logprobs["content"]))
        return {
            "tokens": tokens,
            "token_logprobs": each,
            "top_logprobs": tops if any(tops) else None,
            "text_offset": offsets,
        }


def _tops(entry: Mapping[str, Any]) -> dict[str, float]:
    """Token text → log p, including the answer's token. If parts of characters share a text, the most probable wins."""
    logprobs: dict[str, float] = {}
    for each in (*entry["top_logprobs"], entry) if entry["top_logprobs"] else ():
        logprobs.setdefault(each["token"], each["logprob"])
    return logprobs


def usage_of(answers: Sequence[ChoiceReader]) -> dict[str, Any]:
    """The sum over all choices; the prompt counts once per choice."""
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    usage: dict[str, Any] = {key: sum(answer.usage[key] for answer in answers) for key in counts}
    details = [answer.usage.get("completion_tokens_details", {}) for answer in answers]
    if thoughts := sum(each.get("reasoning_tokens", 0) for each in details):
        usage["completion_tokens_details"] = {"reasoning_tokens": thoughts}
    return usage


_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}


def line(data: Mapping[str, Any], event: str = "") -> bytes:
    """A server-sent event, without characters at which some clients split lines."""
    named = f"event: {event}\n" if event else ""
    encoded = json.dumps(data, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
    return f"{named}data: {encoded}\n\n".encode("utf-8", "replace")
