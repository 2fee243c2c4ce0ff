"""Pieces and whole choices as OpenAI writes them: of chats, and of completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import Any

from specfuse_shared.api_server.answers import Answer, Folded, Piece

FINGERPRINT = f"specfuse-{version('specfuse-llm')}"


class Format:
    """One response: its envelope, and how choices look in it."""

    prefix, whole_object, chunk_object = "", "", ""

    def __init__(self, model: str) -> None:
        self._id, self._model, self._created = f"{self.prefix}-{secrets.token_hex(12)}", model, int(time.time())

    def whole(self, answers: Sequence[Answer], folded: Sequence[Folded]) -> dict[str, Any]:
        choices = [self._choice(answer.index, each) for answer, each in zip(answers, folded, strict=True)]
        return {**self._envelope(self.whole_object), "choices": choices, "usage": usage_of(answers)}

    def chunk(self, answer: Answer, piece: Piece, wants_usage: bool) -> dict[str, Any]:
        """`wants_usage`: the stream ends with usage, so that all chunks before say that they have none."""
        choice: dict[str, Any] = {
            "index": answer.index,
            **self._delta(piece),
            "logprobs": self._logprobs(piece.logprobs),
            "finish_reason": piece.finish_reason,
            **({"specfuse": piece.specfuse} if piece.specfuse else {}),
        }
        none = {"usage": None} if wants_usage else {}
        return {**self._envelope(self.chunk_object), "choices": [choice], **none}

    def usage_chunk(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return {**self._envelope(self.chunk_object), "choices": [], "usage": usage_of(answers)}

    def _envelope(self, kind: str) -> dict[str, Any]:
        told = {"id": self._id, "object": kind, "created": self._created}
        return {**told, "model": self._model, "system_fingerprint": FINGERPRINT}

    def _choice(self, index: int, folded: Folded) -> dict[str, Any]:
        return {
            "index": index,
            **self._message(folded),
            "logprobs": self._logprobs(folded.logprobs),
            "finish_reason": folded.finish_reason,
            **({"specfuse": folded.specfuse} if folded.specfuse else {}),
        }

    def _delta(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _message(self, folded: Folded) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, logprobs: Mapping[str, Any] | None) -> dict[str, Any] | None:
        raise NotImplementedError


class ChatFormat(Format):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _delta(self, piece: Piece) -> dict[str, Any]:
        role = {"role": "assistant", "content": ""} if piece.begins else {}
        told = {"content": piece.text, "reasoning_content": piece.thoughts, "tool_calls": piece.calls}
        return {"delta": role | {key: value for key, value in told.items() if value}}

    def _message(self, folded: Folded) -> dict[str, Any]:
        told = {"reasoning_content": folded.thoughts, "tool_calls": folded.calls}
        content = folded.text if folded.text or not folded.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
        return {"message": message | {key: value for key, value in told.items() if value}}

    def _logprobs(self, logprobs: Mapping[str, Any] | None) -> dict[str, Any] | None:
        return None if logprobs is None else {**logprobs, "refusal": None}


class CompletionFormat(Format):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _delta(self, piece: Piece) -> dict[str, Any]:
        return {"text": piece.text}

    def _message(self, folded: Folded) -> dict[str, Any]:
        return {"text": folded.text}

    def _logprobs(self, logprobs: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Lists side by side; offsets are those of the tokens' texts joined."""
        if logprobs is None:
            return None
        tokens = [entry["token"] for entry in logprobs["content"]]
        offsets = list(accumulate(map(len, tokens), initial=0))[:-1]
        each = [entry["logprob"] for entry in logprobs["content"]]
        return {"tokens": tokens, "token_logprobs": each, "top_logprobs": None, "text_offset": offsets}


def usage_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Of all choices; the prompt of several is counted once for each."""
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    told: dict[str, Any] = {key: sum(answer.usage[key] for answer in answers) for key in counts}
    details = [answer.usage.get("completion_tokens_details", {}) for answer in answers]
    if thoughts := sum(each.get("reasoning_tokens", 0) for each in details):
        told["completion_tokens_details"] = {"reasoning_tokens": thoughts}
    return told
