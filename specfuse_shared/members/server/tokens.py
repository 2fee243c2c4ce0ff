"""vLLM's token endpoint, `/inference/v1/generate` (server flag `--enable-scale-out`): tokens in, tokens out.

Here `prompt_logprobs` may read the prefix cache, so that a candidate is one request, and what is computed is what
stands behind the last cached block. Rows in front of that are memory that nobody wrote: only rows are read that the
server must have computed, as a hit ends at a block and leaves at least one token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from specfuse_shared.errors import (
    ServerError,
    ServerKeyError,
    ServerModelError,
    ServerSettingsError,
    ServerUnreachableError,
)
from specfuse_shared.members.server.client import ServerClient
from specfuse_shared.members.server.dialect import Place, RowsMissingError, ScoredLine, checked_logprob, row_of

PATH = "/inference/v1/generate"
MOST_ROWS = 4096
"""A server that tells a row of every token takes longer to write more of them than to judge by prefixes."""
_MOST_PARTS = 3
"""A line over more blocks than that is read whole, without the cache, in one request."""

_FINAL = (ServerKeyError, ServerModelError, ServerSettingsError, ServerUnreachableError, RowsMissingError)
"""Other errors may come of one candidate alone."""

Params = dict[str, Any]


class TokenEndpoint:
    """The endpoint of the server behind `client`, whose cache is kept in blocks of `block_tokens`."""

    def __init__(self, client: ServerClient, block_tokens: int) -> None:
        self._client = client
        self._block = block_tokens
        self._tells_all = True

    def is_short(self, line: ScoredLine) -> bool:
        """Whether an answer about the line has few enough rows."""
        return not self._tells_all or len(line.prefix) + len(line.tokens) <= MOST_ROWS

    async def generated(
        self, model: str, ids: Sequence[int], params: Params, watched: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[Place]]:
        """The one choice of an answer, and the place of each of its tokens with log p of those that are `watched`."""
        told = await self._told(model, ids, params, watched)
        return _generated(told, watched)

    async def judged(self, model: str, line: ScoredLine) -> list[Place]:
        """The places of a line's tokens, and the one behind them. Raises `RowsMissingError`."""
        ids, start = line.prefix + line.tokens, len(line.prefix)
        ends = [*self._ends(start, len(ids)), len(ids)]
        try:
            if len(ends) > _MOST_PARTS:
                return await self._part(model, ids, start, line.stop_ids, cached=False)
            watched = [(ids[end],) if end < len(ids) else line.stop_ids for end in ends]
            starts = [start, *(end + 1 for end in ends[:-1])]
            parts = zip(starts, ends, watched, strict=True)
            # a part ends at a block, and the next begins behind the token there, which the first decodes
            found = await asyncio.gather(*(self._part(model, ids[:end], own, ends) for own, end, ends in parts))
            return [place for places in found for place in places]
        except _FINAL:
            raise
        except ServerError as error:  # such memory may hold what JSON cannot say
            raise RowsMissingError(str(error)) from error

    def _ends(self, start: int, size: int) -> range:
        """Ends of blocks behind which rows of a line from `start` on may be missing."""
        first = -(-start // self._block) * self._block
        return range(max(first, self._block), size, self._block)

    async def _part(
        self, model: str, ids: Sequence[int], start: int, watched: Sequence[int], cached: bool = True
    ) -> list[Place]:
        """The places from `start` on, and the one behind."""
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "skip_reading_prefix_cache": not cached}
        told = await self._told(model, ids, params, watched)
        rows, own = told.get("prompt_logprobs") or [], ids[start:]
        if cached and len(ids) > 2 * self._block:  # newer servers tell those alone that they computed
            self._tells_all = 2 * len(rows) > len(ids)
        if len(rows) < len(own):
            raise RowsMissingError("the server tells too few rows of a candidate")
        places = [row_of(row, token) for row, token in zip(rows[len(rows) - len(own) :], own, strict=True)]
        behind = _generated(told, watched)[1]
        if not behind:
            raise RowsMissingError("the server decodes nothing behind a candidate")
        return [*places, behind[0]]

    async def _told(self, model: str, ids: Sequence[int], params: Params, watched: Sequence[int]) -> dict[str, Any]:
        # as many are told as are named, the decoded one among them: so one is named twice
        named = [*watched, *watched[-1:]]
        scored = {"logprobs": len(named), **({"logprob_token_ids": named} if named else {})}
        # text is not wanted, and made of rows that nobody wrote it fails
        sampling = {"ignore_eos": True, "detokenize": False, **scored, **params}
        body = {"model": model, "token_ids": list(ids), "sampling_params": sampling}
        told = await self._client.post(PATH, body, steps=params["max_tokens"])
        if not isinstance(told, dict):
            raise ServerError("the server answers something else than it was asked")
        return told


def _generated(told: Mapping[str, Any], watched: Sequence[int]) -> tuple[dict[str, Any], list[Place]]:
    [choice] = told["choices"]
    content = choice["logprobs"]["content"]
    if [entry["token_id"] for entry in content] != choice["token_ids"]:
        raise ServerError("the server scored other tokens than it gave")
    return choice, [_place(entry, watched) for entry in content]


def _place(entry: Mapping[str, Any], watched: Sequence[int]) -> Place:
    told = {each["token_id"]: each["logprob"] for each in entry["top_logprobs"]}
    if not set(watched) <= set(told):
        raise ServerError("the server does not score the tokens that it was asked for")
    wanted = {token: checked_logprob(told[token]) for token in watched}
    own = entry["token_id"]
    return Place({**wanted, own: checked_logprob(entry["logprob"])}, own if entry.get("rank") == 1 else None)
