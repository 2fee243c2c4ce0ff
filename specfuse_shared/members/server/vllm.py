"""vLLM's dialect: OpenAI's completions with its own fields, over token ids, and its token endpoint where that is on.

Log p of given tokens is requested by prefixes: every prefix of the candidates is a prompt of one request, one token is
decoded after each, and `logprob_token_ids` names the tokens that need log p. So the context comes from the
prefix cache. The token endpoint (`TokenEndpoint`) does it in one request a candidate.
`prompt_logprobs`, the only way of older servers, reads all of the context again.

JSON over HTTP with one server of a model: connections that are kept, timeouts, and errors by name.

vLLM's `/v1/completions` over token ids: continuations, and log p of given tokens in two ways.

Requests to continue and to judge given ids, and checks of the responses.

vLLM's token endpoint, `/inference/v1/generate` (server flag `--enable-scale-out`): tokens in, tokens out.

Here `prompt_logprobs` may read the prefix cache, so that a candidate is one request, and only rows after the last
cached block are computed. Rows before that are uninitialised memory: only rows are read that the
server must have computed, as a hit ends at a block and leaves at least one token.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from specfuse_shared import bounded_http
from specfuse_shared.addresses import trusted
from specfuse_shared.bounded_http import ResponseRefusedError
from specfuse_shared.config import SamplingParams
from specfuse_shared.errors import (
    ServerError,
    ServerKeyError,
    ServerModelError,
    ServerSettingsError,
    ServerUnreachableError,
)
from specfuse_shared.members.stages import Top
from specfuse_shared.policies import ROUNDING

_KEPT_SECONDS = 4.0
"""Idle connections go before the servers, which keep them for 5 s, end them."""
_MOST_SHOWN = 300
"""Maximum characters of a server's error message."""

OnRequest = Callable[[float, int], None]
"""Called after each request with the seconds that it took, and the steps that a model made for it."""


class ServerClient:
    """Belongs to one event loop. `key`: sent as `Authorization: Bearer …`, and shown nowhere.

    `timeout`: seconds for a whole request, after which it is cancelled, as by a client that disconnects.
    `key_name`: the key's name in an error.
    """

    def __init__(
        self,
        address: str,
        timeout: float,
        key: str | None = None,
        key_name: str | None = None,
        on_request: OnRequest = lambda seconds, steps: None,
    ) -> None:
        self.address = address
        self.on_request = on_request
        self._key_name = key_name
        self._timeout = timeout
        self._http = httpx.AsyncClient(
            base_url=address,
            headers={**bounded_http.HEADERS, **({"Authorization": f"Bearer {key}"} if key else {})},
            event_hooks={"response": [bounded_http.abound]},
            verify=trusted(),
            timeout=httpx.Timeout(None, connect=bounded_http.CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEPT_SECONDS),
        )

    def __repr__(self) -> str:
        return f"ServerClient({self.address!r})"

    async def get(self, path: str) -> httpx.Response:
        """The server's response, with any status. Raises `ServerUnreachableError`."""
        return await self._sent(lambda: self._http.get(path), min(self._timeout, bounded_http.CONNECT_SECONDS))

    async def post(self, path: str, body: Mapping[str, Any], steps: int = 1) -> Any:
        """The JSON response to `body`, for which a model makes `steps` steps. Raises `ServerError`."""
        began = time.monotonic()
        response = await self._sent(lambda: self._http.post(path, json=dict(body)), self._timeout)
        answer = self.read(response)
        self.on_request(time.monotonic() - began, steps)
        return answer

    async def tokenized(self, model: str, text: str) -> list[int]:
        """Ids of a text as the server's tokenizer has them, without special tokens."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        ids: list[int] = (await self.post("/tokenize", body))["tokens"]
        return ids

    def read(self, response: httpx.Response) -> Any:
        """The JSON of a response. Raises `ServerError` for one that is none, or says that something went wrong."""
        if response.is_error:
            raise self._refusal(response)
        try:
            return json.loads(response.content)
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{self.address}{response.url.path} answers no JSON: is a model served there?") from error

    async def close(self) -> None:
        await self._http.aclose()

    async def _sent(self, send: Callable[[], Any], seconds: float) -> httpx.Response:
        """Requests are complete in themselves, so one whose connection breaks is repeated once."""
        try:
            async with asyncio.timeout(seconds):
                try:
                    response: httpx.Response = await send()
                except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                    response = await send()
                return response
        except TimeoutError as error:
            raise ServerUnreachableError(
                f"the server at {self.address} did not answer within {seconds:g} s: check that it is "
                "healthy or, for drafts and scores, raise MemberConfig(server_timeout=…)"
            ) from error
        except ResponseRefusedError as error:
            raise ServerError(f"the response of the server at {self.address} was refused: {error}") from error
        except httpx.TransportError as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise ServerUnreachableError(
                f"no server answers at {self.address} ({reason}): start it, or correct MemberConfig(server=…)"
            ) from error

    def _refusal(self, response: httpx.Response) -> ServerError:
        message = _message(response)
        if response.status_code in (401, 403):
            named = f"the one in {self._key_name} is not its own" if self._key_name else "name it with api_key_env=…"
            return ServerKeyError(f"the server at {self.address} asks for its key: {named}")
        kind = ServerModelError if response.status_code == 404 else ServerError
        return kind(f"the server at {self.address} answers {response.status_code} to {response.url.path}: {message}")


def _message(response: httpx.Response) -> str:
    """A server's own error message."""
    try:
        body = response.json()
    except ValueError:
        body = response.text
    if isinstance(body, Mapping):
        body = body.get("error", body)
    if isinstance(body, Mapping):
        body = body.get("message", body)
    return " ".join(str(body).split())[:_MOST_SHOWN]


BAN = -100.0
"""What is added to the logit of a token that must not come."""


class RowsMissingError(ServerError):
    """The response lacks required logprobs of a candidate."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """At most `count` tokens after `prompt`, sampled by `params` and `seed`, until one of `stop_ids` comes.

    Never one of `banned`; only `allowed` ones, if given; following the Lark `grammar`, if given, which the
    caller checks again. `vocabulary_size`: upper bound of ids.
    """

    prompt: tuple[int, ...]
    count: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    banned: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None
    grammar: str | None = None
    vocabulary_size: int | None = None

    @property
    def is_bound(self) -> bool:
        """Whether the server may not choose among all tokens."""
        return bool(self.banned) or self.allowed is not None or self.grammar is not None


@dataclass(frozen=True, slots=True)
class Place:
    """A server's logprobs after some ids: log p of tokens there, and the most probable one, if known.

    Both by the raw model: no temperature, no penalty, no grammar.
    """

    logprobs: Mapping[int, float] = field(default_factory=dict)
    most_likely: int | None = None


@dataclass(frozen=True, slots=True)
class Continued:
    """Tokens up to the end of the turn, and whether it came; logprobs of them and of the end, if reported."""

    ids: list[int]
    ended: bool
    places: Sequence[Place] = ()


@dataclass(frozen=True, slots=True)
class ScoredLine:
    """`tokens` after `prefix` to judge, and with `stop_ids`, one of those after them."""

    prefix: tuple[int, ...]
    tokens: tuple[int, ...]
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's description. `models`: its names, each with its source.

    `context`: maximum tokens. `prefix_cache`: whether it has one; `block_tokens`: the block size of its cache, which
    keeps only full blocks. None if the server does not report it.
    """

    title: str
    models: Mapping[str, str]
    context: int | None
    prefix_cache: bool | None
    block_tokens: int | None = None


def cut_at_stop(ids: Sequence[int], request: Continuation, stopped: bool) -> tuple[list[int], bool]:
    """Ids before the first that ends the turn, and whether one did, or the server says that it `stopped`.

    Raises `ServerError` for ids that were not asked for.
    """
    _check_ids(ids, request)
    ends = set(request.stop_ids)
    place = next((n for n, token in enumerate(ids) if token in ends), None)
    if place is not None:
        return list(ids[:place]), True
    if not (ids or stopped):
        raise ServerError("the server gave no token: is its context full?")
    return list(ids), stopped


def _check_ids(ids: Sequence[int], request: Continuation) -> None:
    if len(ids) > request.count + 1:  # a server may count the end of the turn or not
        raise ServerError(f"the server gave {len(ids)} tokens where {request.count} were asked for")
    vocabulary_size = math.inf if request.vocabulary_size is None else request.vocabulary_size
    if not all(type(token) is int and 0 <= token < vocabulary_size for token in ids):
        raise ServerError("the server gave tokens that its model does not have")
    if request.allowed is not None and not set(ids) <= {*request.allowed, *request.stop_ids}:
        raise ServerError("the server gave tokens that the grammar does not allow")


def checked_logprob(value: object) -> float:
    """A log-probability from a server, at most 0. Raises `ServerSettingsError` for invalid values."""
    number = float(value) if isinstance(value, (int, float)) else math.nan
    if not number <= ROUNDING:
        raise ServerSettingsError(
            f"the server gives logits or other numbers ({str(value)[:20]}) where log-probabilities were asked for: "
            "start it with --logprobs-mode raw_logprobs"
        )
    return min(number, 0.0)


def row_of(row: Mapping[str, Mapping[str, Any]] | None, token: int) -> Place:
    """The logprobs from a row of `prompt_logprobs`. Raises `RowsMissingError` if it is about another token."""
    entry = (row or {}).get(str(token))
    if entry is None:
        raise RowsMissingError("the server returned rows of other tokens than the requested ones")
    return Place({token: checked_logprob(entry["logprob"])}, token if entry.get("rank") == 1 else None)


def sampling_of(request: Continuation) -> dict[str, Any]:
    """Sampling settings of a continuation for both endpoints; complete, since servers have other defaults."""
    params = request.params
    body: dict[str, Any] = {
        "max_tokens": request.count,
        "stop_token_ids": request.stop_ids,
        "ignore_eos": True,  # the ends of turn are those named here
        "temperature": 0.0 if params.greedy else params.temperature,
        "repetition_penalty": params.repetition_penalty,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    if not params.greedy:
        body["seed"] = request.seed
    if request.banned:
        body["logit_bias"] = ban_of(request.banned)
    if request.allowed is not None:
        body["allowed_token_ids"] = request.allowed
    if request.grammar is not None:
        body["structured_outputs"] = {"grammar": request.grammar}
    return body


def first_of(allowed: Sequence[int], stop_ids: Sequence[int], vocabulary_size: int) -> str:
    """A Lark grammar of texts whose first token is one of `allowed`, which are in order; any tokens may follow."""
    starts = [n for n, token in enumerate(allowed) if not n or token != allowed[n - 1] + 1]
    spans = [(allowed[a], allowed[b - 1]) for a, b in zip(starts, [*starts[1:], len(allowed)], strict=True)]
    ranges = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    text = f"<[{ranges}]> <[0-{vocabulary_size - 1}]>*"
    return f"start: ({text})?" if set(stop_ids) & set(allowed) else f"start: {text}"


def text_first(text: str) -> str:
    """A Lark grammar of texts that begin with this one."""
    return f"start: {json.dumps(text, ensure_ascii=False)} /(.|\\n)*/"


def ban_of(banned: Sequence[int]) -> dict[str, float]:
    """Biases that keep tokens away."""
    return dict.fromkeys(map(str, banned), BAN)


def scores_of(line: ScoredLine, places: Sequence[Place]) -> list[float]:
    """Natural log p of each token of a line, then log p that any of its stop ids follows."""
    logprobs = [place.logprobs[token] for place, token in zip(places, line.tokens, strict=False)]
    return [*logprobs, any_of(places[-1].logprobs[stop] for stop in line.stop_ids)] if line.stop_ids else logprobs


def whole_lines(lines: Sequence[ScoredLine]) -> list[tuple[int, tuple[int, ...]]]:
    """Each line once for each of its stop ids, or once: how much of it is prefix, and all of it."""
    ends: list[list[tuple[int, ...]]] = [[(stop,) for stop in line.stop_ids] or [()] for line in lines]
    pairs = zip(lines, ends, strict=True)
    return [(len(line.prefix), line.prefix + line.tokens + end) for line, endings in pairs for end in endings]


def of_whole_lines(lines: Sequence[ScoredLine], judged_lines: Sequence[Sequence[Place]]) -> list[list[Place]]:
    """Logprobs of `lines`, joined from the logprobs of their `whole_lines` after the prefixes."""
    remaining, judged = iter(judged_lines), list[list[Place]]()
    for line in lines:
        endings = [next(remaining) for _ in line.stop_ids or (None,)]
        if any(len(places) != len(line.tokens) + bool(line.stop_ids) for places in endings):
            raise ServerError("the server judged other tokens than those that were asked for")
        ends = [places[-1] for places in endings] if line.stop_ids else []
        most_likely = next((end.most_likely for end in ends if end.most_likely is not None), None)
        after = Place({stop: end.logprobs[stop] for stop, end in zip(line.stop_ids, ends, strict=True)}, most_likely)
        judged.append([*endings[0][: len(line.tokens)], after])
    return judged


def any_of(logprobs: Iterable[float]) -> float:
    """Log p that any of several tokens comes next."""
    ids = list(logprobs)
    top = max(ids)
    return top if math.isinf(top) else top + math.log(sum(math.exp(logprob - top) for logprob in ids))


def with_place(places: dict[tuple[int, ...], Place], ids: tuple[int, ...], place: Place) -> None:
    """Add the logprobs after `ids`."""
    before = places.get(ids)
    if before is not None:
        most_likely = before.most_likely if place.most_likely is None else place.most_likely
        place = Place({**before.logprobs, **place.logprobs}, most_likely)
    places[ids] = place


def distance(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> float:
    """Mean |Δ log p|."""
    pairs = [pair for a, b in zip(first, second, strict=True) for pair in zip(a, b, strict=True)]
    return sum(abs(x - y) for x, y in pairs) / len(pairs)


MOST_IDS = 128
"""`logprob_token_ids` takes no more of them in a request."""
MOST_PROMPTS = 1024
"""A request takes no more of them."""

Wanted = dict[tuple[int, ...], set[int]]
"""Prefix → the tokens that need log p after it."""


class CompletionsEndpoint:
    """The endpoint of `client`'s server. Every method raises `ServerError`."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    async def generated(self, model: str, ids: Sequence[int], params: Mapping[str, Any]) -> dict[str, Any]:
        """The one choice of an answer to `ids`."""
        [choice] = await self._choices(model, {**params, "prompt": ids, "return_token_ids": True})
        return choice

    async def by_prefixes(
        self, model: str, lines: Sequence[ScoredLine], more: Mapping[str, Any] | None = None
    ) -> list[list[Place]]:
        """Each prefix is requested once for all lines that share it, in as few requests as the limits allow."""
        requested: Wanted = {}
        for line in lines:
            ids, start = line.prefix + line.tokens, len(line.prefix)
            for n, token in enumerate(line.tokens):
                requested.setdefault(ids[: start + n], set()).add(token)
            if line.stop_ids:
                requested.setdefault(ids, set()).update(line.stop_ids)
        places: dict[tuple[int, ...], Place] = {}
        for answer in await asyncio.gather(*(self._asked(model, piece, more or {}) for piece in _pieces(requested))):
            for prefix, place in answer:
                with_place(places, prefix, place)
        return [
            [places[line.prefix + line.tokens[:n]] for n in range(len(line.tokens) + bool(line.stop_ids))]
            for line in lines
        ]

    async def _asked(
        self, model: str, requested: Wanted, more: Mapping[str, Any]
    ) -> list[tuple[tuple[int, ...], Place]]:
        """The logprobs after each prefix, including the requested tokens; one request."""
        ids = sorted(set().union(*requested.values()))
        body = {
            "prompt": list(requested),
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": 0,
            "logprob_token_ids": ids,
            "return_tokens_as_token_ids": True,
            **more,
        }
        choices = await self._choices(model, body)
        places = []
        for (prefix, tokens), choice in zip(requested.items(), choices, strict=True):
            top_logprobs = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
            most_likely = None if more else _named((choice.get("logprobs") or {}).get("tokens") or [])
            try:
                logprobs = {token: checked_logprob(top_logprobs[0][f"token_id:{token}"]) for token in tokens}
            except KeyError:
                raise MissingLogprobError(f"the server at {self._client.address} does not score named tokens") from None
            places.append((prefix, Place(logprobs, most_likely)))
        return places

    async def by_prompts(self, model: str, lines: Sequence[ScoredLine]) -> list[list[Place]]:
        whole = whole_lines(lines)
        body = {"prompt": [ids for _, ids in whole], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        choices = await self._choices(model, body)
        judged = []
        for (start, ids), choice in zip(whole, choices, strict=True):
            logprobs = choice.get("prompt_logprobs")
            if logprobs is None:
                raise ServerError(f"the server at {self._client.address} scores no given text: it is no vLLM")
            judged.append([row_of(logprobs[n], ids[n]) for n in range(start, len(ids))])
        return of_whole_lines(lines, judged)

    async def tops(self, model: str, line: ScoredLine, count: int) -> list[Top]:
        """The most probable tokens in the place of each of the line's.

        In one request over the whole line: a prefix more for each token would take a decoded token each.
        """
        ids, start = line.prefix + line.tokens, len(line.prefix)
        body = {"prompt": [ids], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": count}
        [choice] = await self._choices(model, body)
        logprobs = choice.get("prompt_logprobs")
        if logprobs is None:
            raise ServerError(f"the server at {self._client.address} scores no given text: it is no vLLM")
        return [_top(logprobs[n], count) for n in range(start, len(ids))]

    async def _choices(self, model: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        response = await self._client.post("/v1/completions", {"model": model, **body}, steps=body["max_tokens"])
        return sorted(response["choices"], key=lambda choice: int(choice["index"]))


class MissingLogprobError(ServerError):
    """The server ignored the tokens that it was asked for."""


def _named(tokens: Sequence[str]) -> int | None:
    """The id of the first of the tokens that are named "token_id:N"."""
    name, _, number = str(next(iter(tokens), "")).partition(":")
    return int(number) if name == "token_id" and number.isdecimal() else None


def _top(entries: Mapping[str, Mapping[str, Any]], count: int) -> Top:
    """The most probable tokens of a position; the response also contains the prompt's own token."""
    ranked = [(int(token), checked_logprob(entry["logprob"])) for token, entry in entries.items()]
    if len(ranked) < count:
        raise ServerError(f"the server returned {len(ranked)} tokens instead of {count}")
    return tuple(sorted(ranked, key=lambda pair: -pair[1])[:count])


def _pieces(requested: Wanted) -> list[Wanted]:
    """The same, in parts that a request takes: of each prefix, all its tokens are in one part unless they are many."""
    pieces: list[Wanted] = []
    ids: set[int] = set()
    for prefix, tokens in requested.items():
        for part in _parts(sorted(tokens)):
            if not pieces or len(ids | part) > MOST_IDS or len(pieces[-1]) >= MOST_PROMPTS or prefix in pieces[-1]:
                pieces.append({})
                ids = set()
            pieces[-1][prefix] = part
            ids |= part
    return pieces


def _parts(tokens: Sequence[int]) -> list[set[int]]:
    return [set(tokens[n : n + MOST_IDS]) for n in range(0, len(tokens), MOST_IDS)]


PATH = "/inference/v1/generate"
MOST_ROWS = 4096
"""Up to this many rows: a server that reports every row takes longer to write more than to judge by prefixes."""
_MOST_PARTS = 3
"""A line over more blocks than that is read whole, without the cache, in one request."""

_FINAL = (ServerKeyError, ServerModelError, ServerSettingsError, ServerUnreachableError, RowsMissingError)
"""Other errors may come of one candidate alone."""

Params = dict[str, Any]


class TokenEndpoint:
    """The endpoint of `client`'s server, whose cache has blocks of `block_tokens`."""

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
        response = await self._request(model, ids, params, watched)
        return _generated(response, watched)

    async def judged(self, model: str, line: ScoredLine) -> list[Place]:
        """The logprobs of a line's tokens, and those after them. Raises `RowsMissingError`."""
        ids, start = line.prefix + line.tokens, len(line.prefix)
        ends = [*self._ends(start, len(ids)), len(ids)]
        try:
            if len(ends) > _MOST_PARTS:
                return await self._part(model, ids, start, line.stop_ids, cached=False)
            watched = [(ids[end],) if end < len(ids) else line.stop_ids for end in ends]
            starts = [start, *(end + 1 for end in ends[:-1])]
            parts = zip(starts, ends, watched, strict=True)
            # a part ends at a block: log p of the token there comes from the step that is decoded after the part,
            # whichever token that step chooses; the next part begins one token later
            judged_parts = await asyncio.gather(
                *(self._part(model, ids[:end], first, ends) for first, end, ends in parts)
            )
            return [place for places in judged_parts for place in places]
        except _FINAL:
            raise
        except ServerError as error:  # such memory may hold what JSON cannot say
            raise RowsMissingError(str(error)) from error

    def _ends(self, start: int, size: int) -> range:
        """Ends of blocks after which rows of a line from `start` on may be missing."""
        first = -(-start // self._block) * self._block
        return range(max(first, self._block), size, self._block)

    async def _part(
        self, model: str, ids: Sequence[int], start: int, watched: Sequence[int], cached: bool = True
    ) -> list[Place]:
        """The logprobs from `start` on, and those after the last token."""
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "skip_reading_prefix_cache": not cached}
        response = await self._request(model, ids, params, watched)
        rows, ids_of_part = response.get("prompt_logprobs") or [], ids[start:]
        if cached and len(ids) > 2 * self._block:  # newer servers report only the rows that they computed
            self._tells_all = 2 * len(rows) > len(ids)
        if len(rows) < len(ids_of_part):
            raise RowsMissingError("the server returned too few rows of a candidate")
        places = [
            row_of(row, token) for row, token in zip(rows[len(rows) - len(ids_of_part) :], ids_of_part, strict=True)
        ]
        after = _generated(response, watched)[1]
        if not after:
            raise RowsMissingError("the server decoded no token after a candidate")
        return [*places, after[0]]

    async def _request(self, model: str, ids: Sequence[int], params: Params, watched: Sequence[int]) -> dict[str, Any]:
        # a position reports one id per name, and the decoded token takes one place: so one id is named twice
        named = [*watched, *watched[-1:]]
        scored = {"logprobs": len(named), **({"logprob_token_ids": named} if named else {})}
        # text is not needed, and detokenising uninitialised rows fails
        sampling = {"ignore_eos": True, "detokenize": False, **scored, **params}
        body = {"model": model, "token_ids": list(ids), "sampling_params": sampling}
        response = await self._client.post(PATH, body, steps=params["max_tokens"])
        if not isinstance(response, dict):
            raise ServerError("the server answers something else than it was asked")
        return response


def _generated(response: Mapping[str, Any], watched: Sequence[int]) -> tuple[dict[str, Any], list[Place]]:
    [choice] = response["choices"]
    content = choice["logprobs"]["content"]
    if [entry["token_id"] for entry in content] != choice["token_ids"]:
        raise ServerError("the server scored other tokens than it gave")
    return choice, [_place(entry, watched) for entry in content]


def _place(entry: Mapping[str, Any], watched: Sequence[int]) -> Place:
    top_logprobs = {each["token_id"]: each["logprob"] for each in entry["top_logprobs"]}
    if not set(watched) <= set(top_logprobs):
        raise ServerError("the server does not score the tokens that it was asked for")
    watched_logprobs = {token: checked_logprob(top_logprobs[token]) for token in watched}
    token_id = entry["token_id"]
    return Place(
        {**watched_logprobs, token_id: checked_logprob(entry["logprob"])}, token_id if entry.get("rank") == 1 else None
    )


logger = logging.getLogger(__name__)

FLAG_MISSING = "it has no token endpoint: start it with --enable-scale-out"
TOKEN_BY_TOKEN = (
    "each token drafted under a grammar takes its own request: start it with "
    "--structured-outputs-config.backend guidance"
)
_FAILED = f"the server at %s failed under a grammar (%s). If every such request fails, {TOKEN_BY_TOKEN}"
_PENALTY, _TRIES = 8.0, 3
_OTHERWISE = (ServerError, LookupError, TypeError, ValueError, AttributeError)
"""Exceptions for an unusable response. While the server is tested, they mean that it lacks a feature."""
_CACHE_SETTINGS = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_SETTING = re.compile(r'(\w+)="(\w*)"')


class VllmDialect:
    """The server of `client`, with its `model`. Every method raises `ServerError`.

    `verification`: "tokens" (one request a candidate at the token endpoint), "prefixes" (all prefixes in one request,
    both using its cache) or "prompt" (whole lines). `takes_grammars`: a draft may follow a Lark grammar with ranges of
    tokens. `no_tokens`: the reason against "tokens".
    """

    def __init__(self, client: ServerClient, model: str) -> None:
        self._client = client
        self.model = model
        self.verification: Literal["tokens", "prefixes", "prompt"] = "prefixes"
        self.takes_grammars = False
        self.no_tokens = ""
        self._complained = False
        self._completions = CompletionsEndpoint(client)
        self._tokens: TokenEndpoint | None = None

    async def facts(self) -> ServerFacts:
        """The server's description."""
        cards = self._client.read(await self._client.get("/v1/models"))["data"]
        version = await self._client.get("/version")
        metrics = await self._client.get("/metrics")
        number = "" if version.is_error else f" {version.json().get('version', '')}"
        match = None if metrics.is_error else _CACHE_SETTINGS.search(metrics.text)
        cache = dict(_SETTING.findall(match[1])) if match else {}
        blocks = cache.get("block_size", "")
        return ServerFacts(
            title=f"vLLM{number}",
            models={str(card["id"]): str(card.get("root") or card["id"]) for card in cards},
            context=next((card.get("max_model_len") for card in cards if card["id"] == self.model), None),
            prefix_cache=cache["enable_prefix_caching"] == "True" if "enable_prefix_caching" in cache else None,
            block_tokens=int(blocks) if blocks.isdecimal() else None,
        )

    async def tokenized(self, text: str) -> list[int]:
        """Ids of a text from the server's tokenizer, without special tokens."""
        return await self._client.tokenized(self.model, text)

    async def continued(self, request: Continuation) -> Continued:
        """Ids up to the end of the turn, whether it came, and the logprobs from the token endpoint.

        No ids if the server fails under the grammar, which not all of its grammar libraries support.
        """
        try:
            return await self._continued(request)
        except ServerUnreachableError:
            raise
        except ServerError as error:
            if request.grammar is None:
                raise
            logger.log(logging.DEBUG if self._complained else logging.WARNING, _FAILED, self._client.address, error)
            self._complained = True
            return Continued([], False)

    async def _continued(self, request: Continuation) -> Continued:
        body = sampling_of(request)
        if self._tokens is not None:
            watched = request.stop_ids[: MOST_IDS - 1]
            choice, places = await self._tokens.generated(self.model, request.prompt, body, watched)
            if request.is_bound:  # log p of tokens that a grammar bars is reported as if they were impossible
                places = []
        else:
            choice, places = await self._completions.generated(self.model, request.prompt, body), []
        ids = choice.get("token_ids")
        if ids is None:
            raise ServerError(f"the server at {self._client.address} gives no token ids: use vLLM 0.11 or later")
        cut_ids, ended = cut_at_stop(ids, request, stopped=choice.get("finish_reason") == "stop")
        return Continued(cut_ids, ended, places[: len(cut_ids) + ended])

    async def judged(self, lines: Sequence[ScoredLine]) -> list[list[Place]]:
        """The logprobs of each token of each line, and those after it, if there are stop ids."""
        if self._tokens is not None:
            return await self._by_tokens(self._tokens, lines)
        by_prefixes = self.verification == "prefixes"
        way = self._completions.by_prefixes if by_prefixes else self._completions.by_prompts
        return await way(self.model, lines)

    async def tops(self, line: ScoredLine, count: int) -> list[Top]:
        """The most probable tokens in the place of each of the line's."""
        return await self._completions.tops(self.model, line, count)

    async def settle(self, lines: Sequence[ScoredLine], block_tokens: int | None) -> float:
        """Find out how to judge, on short `lines`; the mean |Δ log p| between its two ways of scoring.

        Raises `ServerSettingsError` for a server whose log-probabilities are not the model's own.
        """
        self._tokens, self.takes_grammars, self.no_tokens = None, False, ""
        prompts = _scores(lines, await self._completions.by_prompts(self.model, lines))
        try:
            prefixes = _scores(lines, await self._completions.by_prefixes(self.model, lines))
        except MissingLogprobError:
            self.verification = "prompt"
            return 0.0
        self.verification = "prefixes"
        penalised = _scores(
            lines, await self._completions.by_prefixes(self.model, lines, {"repetition_penalty": _PENALTY})
        )
        if (error := distance(prefixes, penalised)) > ROUNDING:
            raise ServerSettingsError(
                f"the log-probabilities of the server at {self._client.address} follow the sampling settings (off by "
                f"{error:.2g} nats): start it with --logprobs-mode raw_logprobs"
            )
        error = distance(prefixes, prompts)
        if error <= ROUNDING and block_tokens:
            error = max(error, await self._settle_tokens(TokenEndpoint(self._client, block_tokens), lines, prefixes))
        elif not block_tokens:
            self.no_tokens = "/metrics lacks the block size of its cache, without which rows may be stale"
        return error

    async def _settle_tokens(
        self, endpoint: TokenEndpoint, lines: Sequence[ScoredLine], expected: Sequence[Sequence[float]]
    ) -> float:
        """Use the token endpoint if it is there and scores as `expected`; how far it is off, or 0."""
        try:
            scores = [await _persistently(endpoint, self.model, line) for line in lines]
            error = distance(_scores(lines, scores), expected)
        except ServerUnreachableError:
            raise
        except ServerModelError:
            self.no_tokens = FLAG_MISSING
            return 0.0
        except _OTHERWISE as problem:
            self.no_tokens = f"its token endpoint does not judge ({str(problem)[:100]})"
            return 0.0
        if error > ROUNDING:
            self.no_tokens = f"its token endpoint scores otherwise (off by {error:.2g} nats)"
            return 0.0
        self.verification, self._tokens = "tokens", endpoint
        self.takes_grammars = await self._keeps_grammars(endpoint, lines[0])
        return error

    async def _keeps_grammars(self, endpoint: TokenEndpoint, line: ScoredLine) -> bool:
        """Whether grammars of tokens bind what is drafted: tokens that hardly come by themselves, in each form."""
        first, second = line.prefix[:2]
        size = max(*line.prefix, *line.stop_ids) + 1
        forms = {f"start: <[{first}]> <[{second}]>": [first, second]}
        forms |= {first_of((token,), (), size): [token] for token in (first, second)}
        try:
            for grammar, expected in forms.items():
                request = Continuation(line.prefix, 2, SamplingParams(), 0, (), grammar=grammar)
                choice, _ = await endpoint.generated(self.model, line.prefix, sampling_of(request))
                if list(choice["token_ids"][: len(expected)]) != expected:
                    return False
            return True
        except ServerUnreachableError:
            raise
        except _OTHERWISE:
            return False

    async def _by_tokens(self, endpoint: TokenEndpoint, lines: Sequence[ScoredLine]) -> list[list[Place]]:
        """Each line by itself; those that are too long, or whose rows are missing, by prefixes, all in one request."""
        short = [n for n, line in enumerate(lines) if endpoint.is_short(line)]
        pending = (endpoint.judged(self.model, lines[n]) for n in short)
        judged: dict[int, list[Place]] = {}
        for n, places in zip(short, await asyncio.gather(*pending, return_exceptions=True), strict=True):
            if not isinstance(places, BaseException):
                judged[n] = places
            elif not isinstance(places, RowsMissingError):
                raise places
        missing = [n for n in range(len(lines)) if n not in judged]
        by_prefixes = await self._completions.by_prefixes(self.model, [lines[n] for n in missing]) if missing else []
        judged |= dict(zip(missing, by_prefixes, strict=True))
        return [judged[n] for n in range(len(lines))]


async def _persistently(endpoint: TokenEndpoint, model: str, line: ScoredLine) -> list[Place]:
    """The logprobs of a line, requested again if rows are missing: uninitialised memory differs each time."""
    for _ in range(_TRIES):
        try:
            return await endpoint.judged(model, line)
        except RowsMissingError as error:
            problem = error
    raise problem


def _scores(lines: Sequence[ScoredLine], places: Sequence[Sequence[Place]]) -> list[list[float]]:
    return [scores_of(line, of_line) for line, of_line in zip(lines, places, strict=True)]
