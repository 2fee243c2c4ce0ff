"""SGLang's dialect: its own `/generate`, over token ids. Written from its documentation, not run against a server yet.

Log p of given tokens is asked by whole lines, one for each candidate: `logprob_start_len` says where the judged tokens
begin, and up to there the context comes from the radix cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specfuse_shared.errors import ServerError
from specfuse_shared.members.server.client import ServerClient
from specfuse_shared.members.server.dialect import (
    Continuation,
    Line,
    ServerFacts,
    ban_of,
    checked_logprob,
    cut_at_stop,
    distance,
    of_whole_lines,
    whole_lines,
)


class SglangDialect:
    """The server behind `client`; it has one model."""

    def __init__(self, client: ServerClient, model: str) -> None:
        self._client, self.model, self.verification = client, model, "prefixes"

    async def facts(self) -> ServerFacts:
        info = self._client.read(await self._client.get("/get_model_info"))
        told = await self._client.get("/server_info")
        settings: Mapping[str, Any] = {} if told.is_error else told.json()
        path = str(info["model_path"])
        off = settings.get("disable_radix_cache")
        return ServerFacts(
            title=f"SGLang {settings.get('version', '')}".rstrip(),
            models={str(settings.get("served_model_name") or path): path},
            context=settings.get("max_req_input_len"),
            prefix_cache=None if off is None else not off,
        )

    async def tokenized(self, text: str) -> list[int] | None:
        return await self._client.tokenized(self.model, text)

    async def continued(self, wanted: Continuation) -> tuple[list[int], bool]:
        params = wanted.params
        sampling: dict[str, Any] = {
            "max_new_tokens": wanted.count,
            "stop_token_ids": wanted.stop_ids,
            "ignore_eos": True,  # the ends of turn are those named here
            "temperature": 0.0 if params.greedy else params.temperature,
            "repetition_penalty": params.repetition_penalty,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
        }
        if not params.greedy:
            sampling["sampling_seed"] = wanted.seed
        if wanted.banned:
            sampling["logit_bias"] = ban_of(wanted.banned)
        if wanted.allowed is not None:
            raise ServerError(
                "SGLang takes no list of allowed tokens, so this member cannot draft under a grammar: let another "
                "member of the answer draft there"
            )
        told = await self._client.post("/generate", {"input_ids": wanted.prompt, "sampling_params": sampling})
        stopped = told["meta_info"]["finish_reason"]["type"] == "stop"
        return cut_at_stop(told["output_ids"], wanted, stopped)

    async def judged(self, lines: Sequence[Line]) -> list[list[float]]:
        whole = whole_lines(lines)
        return of_whole_lines(lines, await self._scored(whole))

    async def settle(self, lines: Sequence[Line]) -> float:
        """Behind the cache and, from one token earlier on each line, as a second way."""
        earlier = [(start - 1, ids) for start, ids in whole_lines(lines)]
        again = [logprobs[1:] for logprobs in await self._scored(earlier)]
        return distance(await self.judged(lines), of_whole_lines(lines, again))

    async def _scored(self, whole: Sequence[tuple[int, tuple[int, ...]]]) -> list[list[float]]:
        """Log p of each line's tokens from its start on; one request."""
        if not whole:
            return []
        body = {
            "input_ids": [ids for _, ids in whole],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": [start - 1 for start, _ in whole],
        }
        answers = await self._client.post("/generate", body)
        # the first entry is that of the token before, which has none
        rows = [told["meta_info"]["input_token_logprobs"][1:] for told in answers]
        return [[checked_logprob(entry[0]) for entry in row] for row in rows]
