"""vLLM's `/v1/completions` over token ids: continuations, and log p of given tokens in two ways."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from specfuse_shared.errors import ServerError
from specfuse_shared.members.server.client import ServerClient
from specfuse_shared.members.server.dialect import (
    Place,
    ScoredLine,
    checked_logprob,
    of_whole_lines,
    row_of,
    whole_lines,
    with_place,
)
from specfuse_shared.members.stages import Top

MOST_IDS = 128
"""`logprob_token_ids` takes no more of them in a request."""
MOST_PROMPTS = 1024
"""A request takes no more of them."""

Wanted = dict[tuple[int, ...], set[int]]
"""Prefix → the tokens whose log p behind it is asked for."""


class CompletionsEndpoint:
    """The endpoint of the server behind `client`. Every method raises `ServerError`."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    async def generated(self, model: str, ids: Sequence[int], params: Mapping[str, Any]) -> dict[str, Any]:
        """The one choice of an answer to `ids`."""
        [choice] = await self._choices(model, {**params, "prompt": ids, "return_token_ids": True})
        return choice

    async def by_prefixes(
        self, model: str, lines: Sequence[ScoredLine], more: Mapping[str, Any] | None = None
    ) -> list[list[Place]]:
        """Each prefix is asked once, whoever shares it, in as few requests as the limits allow."""
        wanted: Wanted = {}
        for line in lines:
            ids, start = line.prefix + line.tokens, len(line.prefix)
            for n, token in enumerate(line.tokens):
                wanted.setdefault(ids[: start + n], set()).add(token)
            if line.stop_ids:
                wanted.setdefault(ids, set()).update(line.stop_ids)
        known: dict[tuple[int, ...], Place] = {}
        for answer in await asyncio.gather(*(self._asked(model, piece, more or {}) for piece in _pieces(wanted))):
            for prefix, place in answer:
                with_place(known, prefix, place)
        return [
            [known[line.prefix + line.tokens[:n]] for n in range(len(line.tokens) + bool(line.stop_ids))]
            for line in lines
        ]

    async def _asked(self, model: str, wanted: Wanted, more: Mapping[str, Any]) -> list[tuple[tuple[int, ...], Place]]:
        """The place behind each prefix, with log p of the tokens wanted; one request."""
        ids = sorted(set().union(*wanted.values()))
        body = {
            "prompt": list(wanted),
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": 0,
            "logprob_token_ids": ids,
            "return_tokens_as_token_ids": True,
            **more,
        }
        choices = await self._choices(model, body)
        found = []
        for (prefix, tokens), choice in zip(wanted.items(), choices, strict=True):
            told = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
            likeliest = None if more else _named((choice.get("logprobs") or {}).get("tokens") or [])
            try:
                logprobs = {token: checked_logprob(told[0][f"token_id:{token}"]) for token in tokens}
            except KeyError:
                raise NotToldError(f"the server at {self._client.address} does not score named tokens") from None
            found.append((prefix, Place(logprobs, likeliest)))
        return found

    async def by_prompts(self, model: str, lines: Sequence[ScoredLine]) -> list[list[Place]]:
        whole = whole_lines(lines)
        body = {"prompt": [ids for _, ids in whole], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        choices = await self._choices(model, body)
        found = []
        for (start, ids), choice in zip(whole, choices, strict=True):
            told = choice.get("prompt_logprobs")
            if told is None:
                raise ServerError(f"the server at {self._client.address} scores no given text: it is no vLLM")
            found.append([row_of(told[n], ids[n]) for n in range(start, len(ids))])
        return of_whole_lines(lines, found)

    async def tops(self, model: str, line: ScoredLine, count: int) -> list[Top]:
        """The most probable tokens in the place of each of the line's.

        In one request over the whole line: a prefix more for each token would take a decoded token each.
        """
        ids, start = line.prefix + line.tokens, len(line.prefix)
        body = {"prompt": [ids], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": count}
        [choice] = await self._choices(model, body)
        told = choice.get("prompt_logprobs")
        if told is None:
            raise ServerError(f"the server at {self._client.address} scores no given text: it is no vLLM")
        return [_top(told[n], count) for n in range(start, len(ids))]

    async def _choices(self, model: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        told = await self._client.post("/v1/completions", {"model": model, **body}, steps=body["max_tokens"])
        return sorted(told["choices"], key=lambda choice: int(choice["index"]))


class NotToldError(ServerError):
    """The server ignored the tokens that it was asked for."""


def _named(tokens: Sequence[str]) -> int | None:
    """The id of the first of tokens that are told as "token_id:N"."""
    name, _, number = str(next(iter(tokens), "")).partition(":")
    return int(number) if name == "token_id" and number.isdecimal() else None


def _top(told: Mapping[str, Mapping[str, Any]], count: int) -> Top:
    """The most probable tokens of a place, in which the prompt's own is told as well."""
    found = [(int(token), checked_logprob(entry["logprob"])) for token, entry in told.items()]
    if len(found) < count:
        raise ServerError(f"the server tells of {len(found)} tokens where {count} were asked for")
    return tuple(sorted(found, key=lambda pair: -pair[1])[:count])


def _pieces(wanted: Wanted) -> list[Wanted]:
    """The same, in parts that a request takes: of each prefix, all its tokens are in one part unless they are many."""
    pieces: list[Wanted] = []
    ids: set[int] = set()
    for prefix, tokens in wanted.items():
        for part in _parts(sorted(tokens)):
            if not pieces or len(ids | part) > MOST_IDS or len(pieces[-1]) >= MOST_PROMPTS or prefix in pieces[-1]:
                pieces.append({})
                ids = set()
            pieces[-1][prefix] = part
            ids |= part
    return pieces


def _parts(tokens: Sequence[int]) -> list[set[int]]:
    return [set(tokens[n : n + MOST_IDS]) for n in range(0, len(tokens), MOST_IDS)]
