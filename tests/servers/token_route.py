"""vLLM's token endpoint over the model of a test server: `prompt_logprobs` that read a prefix cache of whole blocks.

Like vLLM's it sends a row for every token of the prompt, and the rows before the computed part are stale memory:
here the rows of an earlier answer, which look valid.
"""

from __future__ import annotations

import json
import math
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from starlette.responses import Response

if TYPE_CHECKING:
    from tests.servers.model_server import ModelServer

PATH = "/inference/v1/generate"
Row = dict[str, dict[str, Any]] | None


class RefusedError(Exception):
    """A request that the server refuses."""


class TokenRoute:
    """The endpoint, its cache of blocks, and the memory that rows are written to."""

    def __init__(self, server: ModelServer) -> None:
        self._server, self._ways = server, server.ways
        self._cached: set[tuple[int, ...]] = set()
        self._memory: list[Row] = []

    def answer(self, body: dict[str, Any]) -> Response:
        if (unknown := self._server.unknown(body)) is not None:
            return unknown
        ids, params = list(body["token_ids"]), body["sampling_params"]
        named = params.get("logprob_token_ids") or []
        max_tokens = params["max_tokens"]
        self._server.check(len(ids) + max_tokens <= self._ways.context, "this model's maximum context length")
        self._server.check(params.get("logprobs") == len(named), "logprobs must equal len(logprob_token_ids)")
        self._server.check(params["detokenize"] is False, "Error in token ids of rows")
        for request in (named, params.get("allowed_token_ids"), map(int, params.get("logit_bias") or {})):
            self._server.check(all(0 <= t < self._server.size for t in request or ()), "out-of-vocab token ids")
        rows = self._rows(ids, params) if params.get("prompt_logprobs") is not None else None
        reported = {"prompt_logprobs": rows, "choices": [self._choice(ids, params, named)]}
        if self._ways.replace_tokens is not None:
            reported = self._ways.replace_tokens(reported)
        return Response(json.dumps(reported), media_type="application/json")

    def _rows(self, ids: list[int], params: dict[str, Any]) -> list[Row]:
        scores = self._server.logits(ids).log_softmax(-1) + self._ways.off_by_tokens
        rows: list[Row] = [None]
        for n, token in enumerate(ids[1:]):
            rank = int((scores[n] > scores[n][token]).sum()) + 1
            rows.append({str(token): {"logprob": float(scores[n][token]), "rank": rank, "decoded_token": None}})
        hit = 0 if params["skip_reading_prefix_cache"] else self._hit(ids)
        before, self._memory = self._memory, rows
        if hit and self._ways.broken_rows:
            self._ways.broken_rows -= 1
            raise RefusedError("Out of range float values are not JSON compliant")
        if not self._ways.all_rows:
            return rows[hit + 1 :]
        return [*(before + [None] * len(ids))[: hit + 1], *rows[hit + 1 :]]

    def _hit(self, ids: list[int]) -> int:
        """Tokens whose blocks are cached; at least one is left to compute."""
        block = self._ways.block
        ends = range(block, len(ids), block)
        return max((end for end in ends if tuple(ids[:end]) in self._cached), default=0)

    def _choice(self, ids: list[int], params: dict[str, Any], named: list[int]) -> dict[str, Any]:
        server, ids, size, content, ended = self._server, list(ids), len(ids), [], "length"
        grammar = (params.get("structured_outputs") or {}).get("grammar")
        matcher = None if grammar is None else self._matcher(grammar)
        for _ in range(params["max_tokens"]):
            raw = server.next_logits(tuple(ids))
            if matcher is not None:  # before log p is taken, as in vLLM
                raw = _masked(raw, matcher.compute_bitmask())
            processed = server.processed(raw, ids, params)
            token = server.pick(processed, params, len(ids))
            content.append(self._entry(raw.log_softmax(-1), token, named))
            ids.append(token)
            if matcher is not None:
                matcher.consume_token(token)
            if token in params.get("stop_token_ids", ()) or (matcher is not None and matcher.is_stopped()):
                ended = "stop"
                break
        self._cached |= {tuple(ids[:end]) for end in range(self._ways.block, len(ids), self._ways.block)}
        return {"index": 0, "token_ids": ids[size:], "finish_reason": ended, "logprobs": {"content": content}}

    @cached_property
    def _vocabulary(self) -> Any:
        import llguidance.hf

        return llguidance.hf.from_tokenizer(self._server.tokenizer, n_vocab=self._server.size)

    def _matcher(self, grammar: str) -> Any:
        import llguidance

        if not self._ways.keeps_grammars or re.search(self._ways.fails_under, grammar):
            raise RefusedError("Invalid grammar specification")
        matcher = llguidance.LLMatcher(
            self._vocabulary, json.dumps({"grammars": [{"lark_grammar": grammar}]}), log_level=0
        )
        self._server.check(not matcher.is_error(), f"Invalid grammar specification: {matcher.get_error()}")
        return matcher

    def _entry(self, scores: torch.Tensor, token: int, named: list[int]) -> dict[str, Any]:
        def reported(t: int) -> dict[str, Any]:
            rank = int((scores > scores[t]).sum()) + 1
            return {"token_id": t, "logprob": max(float(scores[t]), -9999.0), "rank": rank}

        return {**reported(token), "top_logprobs": [reported(t) for t in dict.fromkeys([token, *named])][: len(named)]}


def _masked(scores: torch.Tensor, bits: bytes) -> torch.Tensor:
    keep = torch.tensor([bits[t >> 3] >> (t & 7) & 1 for t in range(len(scores))], dtype=torch.bool)
    return scores.masked_fill(~keep, -math.inf)
