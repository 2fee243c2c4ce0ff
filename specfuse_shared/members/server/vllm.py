"""vLLM's dialect: OpenAI's completions with its own fields, over token ids, and its token endpoint where that is on.

Log p of given tokens is asked by prefixes: every prefix of the candidates is a prompt of one request, one token is
decoded behind each, and `logprob_token_ids` names the tokens whose log p is wanted. So the context comes from the
prefix cache. The token endpoint (`specfuse_shared.members.server.tokens`) does it in one request a candidate.
`prompt_logprobs`, the only way of older servers, reads all of the context again.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Literal

from specfuse_shared.errors import ServerError, ServerModelError, ServerSettingsError, ServerUnreachableError
from specfuse_shared.members.server.client import ServerClient
from specfuse_shared.members.server.completions import MOST_IDS, CompletionsEndpoint, NotToldError
from specfuse_shared.members.server.dialect import (
    Continuation,
    Continued,
    Place,
    RowsMissingError,
    ScoredLine,
    ServerFacts,
    cut_at_stop,
    distance,
    first_of,
    sampling_of,
    scores_of,
)
from specfuse_shared.members.server.tokens import TokenEndpoint
from specfuse_shared.members.stages import Top
from specfuse_shared.policies import ROUNDING
from specfuse_shared.settings.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

FLAG_MISSING = "it has no token endpoint: start it with --enable-scale-out"
TOKEN_BY_TOKEN = (
    "a draft under a grammar is a request a token: start it with --structured-outputs-config.backend guidance"
)
_FAILED = f"the server at %s failed under a grammar (%s). Where it always does, {TOKEN_BY_TOKEN}"
_PENALTY, _TRIES = 8.0, 3
_OTHERWISE = (ServerError, LookupError, TypeError, ValueError, AttributeError)
"""What comes of an answer of another shape."""
_CACHE_SETTINGS = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_SETTING = re.compile(r'(\w+)="(\w*)"')


class VllmDialect:
    """The server behind `client`, of which `model` is asked. Every method raises `ServerError`.

    `verification`: how it judges: "tokens" (one request a candidate at the token endpoint), "prefixes" (all prefixes
    in one request, both behind its cache) or "prompt" (whole lines). `takes_grammars`: a draft may be bound by a Lark
    grammar with ranges of tokens. `no_tokens`: why not "tokens".
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

    async def continued(self, wanted: Continuation) -> Continued:
        """Ids up to the end of the turn, whether that came, and what the token endpoint tells of their places.

        Nothing where the server fails under the grammar, which not each of its libraries can follow.
        """
        try:
            return await self._continued(wanted)
        except ServerUnreachableError:
            raise
        except ServerError as error:
            if wanted.grammar is None:
                raise
            logger.log(logging.DEBUG if self._complained else logging.WARNING, _FAILED, self._client.address, error)
            self._complained = True
            return Continued([], False)

    async def _continued(self, wanted: Continuation) -> Continued:
        body = sampling_of(wanted)
        if self._tokens is not None:
            watched = wanted.stop_ids[: MOST_IDS - 1]
            choice, places = await self._tokens.generated(self.model, wanted.prompt, body, watched)
            if wanted.is_bound:  # log p of tokens that a grammar bars is told as if they could not come
                places = []
        else:
            choice, places = await self._completions.generated(self.model, wanted.prompt, body), []
        ids = choice.get("token_ids")
        if ids is None:
            raise ServerError(f"the server at {self._client.address} gives no token ids: use vLLM 0.11 or later")
        kept, ended = cut_at_stop(ids, wanted, stopped=choice.get("finish_reason") == "stop")
        return Continued(kept, ended, places[: len(kept) + ended])

    async def judged(self, lines: Sequence[ScoredLine]) -> list[list[Place]]:
        """The place of each token of each line, and the one behind, where there are stop ids."""
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
        except NotToldError:
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
            self.no_tokens = "it does not tell the block size of its cache in /metrics, without which rows may be stale"
        return error

    async def _settle_tokens(
        self, endpoint: TokenEndpoint, lines: Sequence[ScoredLine], expected: Sequence[Sequence[float]]
    ) -> float:
        """Use the token endpoint if it is there and scores as `expected`; how far it is off, or 0."""
        try:
            found = [await _persistently(endpoint, self.model, line) for line in lines]
            error = distance(_scores(lines, found), expected)
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
                wanted = Continuation(line.prefix, 2, SamplingParams(), 0, (), grammar=grammar)
                choice, _ = await endpoint.generated(self.model, line.prefix, sampling_of(wanted))
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
        asked = (endpoint.judged(self.model, lines[n]) for n in short)
        found: dict[int, list[Place]] = {}
        for n, places in zip(short, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if not isinstance(places, BaseException):
                found[n] = places
            elif not isinstance(places, RowsMissingError):
                raise places
        left = [n for n in range(len(lines)) if n not in found]
        again = await self._completions.by_prefixes(self.model, [lines[n] for n in left]) if left else []
        found |= dict(zip(left, again, strict=True))
        return [found[n] for n in range(len(lines))]


async def _persistently(endpoint: TokenEndpoint, model: str, line: ScoredLine) -> list[Place]:
    """The places of a line, asked again where rows are missing: memory that nobody wrote differs each time."""
    for _ in range(_TRIES):
        try:
            return await endpoint.judged(model, line)
        except RowsMissingError as error:
            problem = error
    raise problem


def _scores(lines: Sequence[ScoredLine], places: Sequence[Sequence[Place]]) -> list[list[float]]:
    return [scores_of(line, own) for line, own in zip(lines, places, strict=True)]
