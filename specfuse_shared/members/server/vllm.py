"""vLLM's dialect: OpenAI's completions with its own fields, over token ids.

Log p of given tokens is asked by prefixes: every prefix of the candidates is a prompt of one request, one token is
decoded behind each, and `logprob_token_ids` names the tokens whose log p is wanted. So the context comes from the
prefix cache. `prompt_logprobs`, the only way of older servers, reads all of it again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from specfuse_shared.errors import ServerError, ServerSettingsError
from specfuse_shared.members.server.client import ServerClient
from specfuse_shared.members.server.dialect import (
    Continuation,
    ScoredLine,
    ServerFacts,
    any_of,
    ban_of,
    checked_logprob,
    cut_at_stop,
    distance,
    of_whole_lines,
    whole_lines,
)
from specfuse_shared.members.stages import Top
from specfuse_shared.policies import ROUNDING

MOST_IDS = 128
"""`logprob_token_ids` takes no more of them in a request."""
MOST_PROMPTS = 1024
"""A request takes no more of them."""
_PENALTY = 8.0
_CACHE_SETTINGS = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_SETTING = re.compile(r'(\w+)="(\w*)"')

Wanted = dict[tuple[int, ...], set[int]]
"""Prefix → the tokens whose log p behind it is asked for."""


class VllmDialect:
    """The server behind `client`, of which `model` is asked. Every method raises `ServerError`.

    `verification`: how it judges: "prefixes" (all prefixes in one request, behind its cache) or "prompt" (whole lines).
    """

    def __init__(self, client: ServerClient, model: str) -> None:
        self._client = client
        self.model = model
        self.verification = "prefixes"

    async def facts(self) -> ServerFacts:
        """What the server says of itself."""
        cards = self._client.read(await self._client.get("/v1/models"))["data"]
        version = await self._client.get("/version")
        metrics = await self._client.get("/metrics")
        number = "" if version.is_error else f" {version.json().get('version', '')}"
        found = None if metrics.is_error else _CACHE_SETTINGS.search(metrics.text)
        cache = dict(_SETTING.findall(found[1])) if found else {}
        blocks = cache.get("block_size", "")
        return ServerFacts(
            title=f"vLLM{number}",
            models={str(card["id"]): str(card.get("root") or card["id"]) for card in cards},
            context=next((card.get("max_model_len") for card in cards if card["id"] == self.model), None),
            prefix_cache=cache["enable_prefix_caching"] == "True" if "enable_prefix_caching" in cache else None,
            block_tokens=int(blocks) if blocks.isdecimal() else None,
        )

    async def tokenized(self, text: str) -> list[int] | None:
        """Ids of a text as the server's tokenizer has them, without special tokens; None where it does not tell."""
        return await self._client.tokenized(self.model, text)

    async def continued(self, wanted: Continuation) -> tuple[list[int], bool]:
        """Ids up to the end of the turn, and whether that came."""
        params = wanted.params
        body: dict[str, Any] = {
            "prompt": wanted.prompt,
            "max_tokens": wanted.count,
            "stop_token_ids": wanted.stop_ids,
            "ignore_eos": True,  # the ends of turn are those named here
            "return_token_ids": True,
            # all of them, since the server has defaults of its own
            "temperature": 0.0 if params.greedy else params.temperature,
            "repetition_penalty": params.repetition_penalty,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        if not params.greedy:
            body["seed"] = wanted.seed
        if wanted.banned:
            body["logit_bias"] = ban_of(wanted.banned)
        if wanted.allowed is not None:
            body["allowed_token_ids"] = wanted.allowed
        [choice] = await self._choices(body)
        ids = choice.get("token_ids")
        if ids is None:
            raise ServerError(f"the server at {self._client.address} gives no token ids: use vLLM 0.11 or later")
        return cut_at_stop(ids, wanted, stopped=choice.get("finish_reason") == "stop")

    async def judged(self, lines: Sequence[ScoredLine]) -> list[list[float]]:
        """Natural log p of each line's tokens given all before them; then that any of its stop ids comes."""
        return await (self._by_prefixes(lines) if self.verification == "prefixes" else self._by_prompts(lines))

    async def settle(self, lines: Sequence[ScoredLine]) -> float:
        """Find out how to judge, on short `lines`; the mean |Δ log p| between its two ways of scoring.

        Raises `ServerSettingsError` for a server whose log-probabilities are not the model's own.
        """
        prompts = await self._by_prompts(lines)
        try:
            prefixes = await self._by_prefixes(lines)
        except _NotToldError:
            self.verification = "prompt"
            return 0.0
        self.verification = "prefixes"
        penalised = await self._by_prefixes(lines, {"repetition_penalty": _PENALTY})
        if (error := distance(prefixes, penalised)) > ROUNDING:
            raise ServerSettingsError(
                f"the log-probabilities of the server at {self._client.address} follow the sampling settings (off by "
                f"{error:.2g} nats): start it with --logprobs-mode raw_logprobs"
            )
        return distance(prefixes, prompts)

    async def _by_prefixes(
        self, lines: Sequence[ScoredLine], more: Mapping[str, Any] | None = None
    ) -> list[list[float]]:
        """Each prefix is asked once, whoever shares it, in as few requests as the limits allow."""
        wanted: Wanted = {}
        for line in lines:
            ids, start = line.prefix + line.tokens, len(line.prefix)
            for n, token in enumerate(line.tokens):
                wanted.setdefault(ids[: start + n], set()).add(token)
            if line.stop_ids:
                wanted.setdefault(ids, set()).update(line.stop_ids)
        answers = await asyncio.gather(*(self._asked(piece, more or {}) for piece in _pieces(wanted)))
        known = {key: logprob for answer in answers for key, logprob in answer.items()}
        judged = []
        for line in lines:
            ids, start = line.prefix + line.tokens, len(line.prefix)
            tokens_logprobs = [known[ids[: start + n], token] for n, token in enumerate(line.tokens)]
            judged.append(
                [*tokens_logprobs, any_of(known[ids, stop] for stop in line.stop_ids)]
                if line.stop_ids
                else tokens_logprobs
            )
        return judged

    async def _asked(self, wanted: Wanted, more: Mapping[str, Any]) -> dict[tuple[tuple[int, ...], int], float]:
        """Log p of the tokens wanted behind each prefix; one request."""
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
        choices = await self._choices(body)
        logprobs: dict[tuple[tuple[int, ...], int], float] = {}
        for (prefix, tokens), choice in zip(wanted.items(), choices, strict=True):
            tops = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
            try:
                logprobs |= {(prefix, token): checked_logprob(tops[0][f"token_id:{token}"]) for token in tokens}
            except KeyError:
                raise _NotToldError(f"the server at {self._client.address} does not score named tokens") from None
        return logprobs

    async def _by_prompts(self, lines: Sequence[ScoredLine]) -> list[list[float]]:
        whole = whole_lines(lines)
        body = {"prompt": [ids for _, ids in whole], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        choices = await self._choices(body)
        logprobs = []
        for (start, ids), choice in zip(whole, choices, strict=True):
            places = choice.get("prompt_logprobs")
            if places is None:
                raise ServerError(f"the server at {self._client.address} scores no given text: it is no vLLM")
            logprobs.append([checked_logprob(places[n][str(ids[n])]["logprob"]) for n in range(start, len(ids))])
        return of_whole_lines(lines, logprobs)

    async def tops(self, line: ScoredLine, count: int) -> list[Top]:
        """The most probable tokens in the place of each of the line's.

        In one request over the whole line: a prefix more for each token would take a decoded token each.
        """
        ids, start = line.prefix + line.tokens, len(line.prefix)
        body = {"prompt": [ids], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": count}
        [choice] = await self._choices(body)
        places = choice.get("prompt_logprobs")
        if places is None:
            raise ServerError(f"the server at {self._client.address} scores no given text: it is no vLLM")
        return [_top(places[n], count) for n in range(start, len(ids))]

    async def _choices(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        response = await self._client.post("/v1/completions", {"model": self.model, **body})
        return sorted(response["choices"], key=lambda choice: int(choice["index"]))


class _NotToldError(ServerError):
    """The server ignored the tokens that it was asked for."""


def _top(entries: Mapping[str, Mapping[str, Any]], count: int) -> Top:
    """The most probable tokens of a place, in which the prompt's own is told as well."""
    tokens = [(int(token), checked_logprob(entry["logprob"])) for token, entry in entries.items()]
    if len(tokens) < count:
        raise ServerError(f"the server tells of {len(tokens)} tokens where {count} were asked for")
    return tuple(sorted(tokens, key=lambda pair: -pair[1])[:count])


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
