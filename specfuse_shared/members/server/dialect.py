"""What a member asks of a server, to continue ids and to judge given ones, and checks of what comes back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specfuse_shared.errors import ServerError, ServerSettingsError
from specfuse_shared.policies import ROUNDING
from specfuse_shared.settings.sampling_params import SamplingParams

BAN = -100.0
"""What is added to the logit of a token that must not come."""


class RowsMissingError(ServerError):
    """The server did not tell what was asked of a candidate."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """At most `count` tokens behind `prompt`, sampled as `params` and `seed` say, until one of `stop_ids` comes.

    Never one of `banned`; only ones of `allowed`, where those are given; by a Lark `grammar` of all of them, where that
    is given, which is not believed to be kept. `vocabulary_size`: ids are below it.
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
    """What a server told of a place behind some ids: log p of tokens there, and the most probable one, if it is known.

    Both by the model as it is: no temperature, no penalty, no grammar.
    """

    logprobs: Mapping[int, float] = field(default_factory=dict)
    likeliest: int | None = None


@dataclass(frozen=True, slots=True)
class Continued:
    """Tokens up to the end of the turn, and whether that came; the places of them all, and of that end, if told."""

    ids: list[int]
    ended: bool
    places: Sequence[Place] = ()


@dataclass(frozen=True, slots=True)
class ScoredLine:
    """`tokens` behind `prefix`, which are to be judged, and where there are `stop_ids`, one of those behind them."""

    prefix: tuple[int, ...]
    tokens: tuple[int, ...]
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself. `models`: its names, each with what it was loaded from.

    `context`: tokens that it takes. `prefix_cache`: whether it has one; `block_tokens`: in blocks of how many tokens,
    of which only full ones are kept. None where it does not tell.
    """

    title: str
    models: Mapping[str, str]
    context: int | None
    prefix_cache: bool | None
    block_tokens: int | None = None


def cut_at_stop(ids: Sequence[int], wanted: Continuation, stopped: bool) -> tuple[list[int], bool]:
    """Ids before the first that ends the turn, and whether one did, or the server says that it `stopped`.

    Raises `ServerError` for ids that were not asked for.
    """
    _check_ids(ids, wanted)
    ends = set(wanted.stop_ids)
    place = next((n for n, token in enumerate(ids) if token in ends), None)
    if place is not None:
        return list(ids[:place]), True
    if not (ids or stopped):
        raise ServerError("the server gave no token: is its context full?")
    return list(ids), stopped


def _check_ids(ids: Sequence[int], wanted: Continuation) -> None:
    if len(ids) > wanted.count + 1:  # a server may count the end of the turn or not
        raise ServerError(f"the server gave {len(ids)} tokens where {wanted.count} were asked for")
    most = math.inf if wanted.vocabulary_size is None else wanted.vocabulary_size
    if not all(type(token) is int and 0 <= token < most for token in ids):
        raise ServerError("the server gave tokens that its model does not have")
    if wanted.allowed is not None and not set(ids) <= {*wanted.allowed, *wanted.stop_ids}:
        raise ServerError("the server gave tokens that the grammar does not allow")


def checked_logprob(value: object) -> float:
    """A log-probability as a server gives it, at most 0. Raises `ServerSettingsError` for what is none."""
    number = float(value) if isinstance(value, (int, float)) else math.nan
    if not number <= ROUNDING:
        raise ServerSettingsError(
            f"the server gives logits or other numbers ({str(value)[:20]}) where log-probabilities were asked for: "
            "start it with --logprobs-mode raw_logprobs"
        )
    return min(number, 0.0)


def row_of(row: Mapping[str, Mapping[str, Any]] | None, token: int) -> Place:
    """A place by its row of `prompt_logprobs`. Raises `RowsMissingError` where that tells of another token."""
    entry = (row or {}).get(str(token))
    if entry is None:
        raise RowsMissingError("the server tells of other tokens than those that it was asked to judge")
    return Place({token: checked_logprob(entry["logprob"])}, token if entry.get("rank") == 1 else None)


def sampling_of(wanted: Continuation) -> dict[str, Any]:
    """How a continuation is sampled, as both endpoints take it; all of it, since the server has defaults of its own."""
    params = wanted.params
    body: dict[str, Any] = {
        "max_tokens": wanted.count,
        "stop_token_ids": wanted.stop_ids,
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
        body["seed"] = wanted.seed
    if wanted.banned:
        body["logit_bias"] = ban_of(wanted.banned)
    if wanted.allowed is not None:
        body["allowed_token_ids"] = wanted.allowed
    if wanted.grammar is not None:
        body["structured_outputs"] = {"grammar": wanted.grammar}
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
    """Natural log p of a line's tokens, by what is known of each place of it; then that any of its stop ids comes."""
    own = [place.logprobs[token] for place, token in zip(places, line.tokens, strict=False)]
    return [*own, any_of(places[-1].logprobs[stop] for stop in line.stop_ids)] if line.stop_ids else own


def whole_lines(lines: Sequence[ScoredLine]) -> list[tuple[int, tuple[int, ...]]]:
    """Each line once for each of its stop ids, or once: how much of it is prefix, and all of it."""
    ends: list[list[tuple[int, ...]]] = [[(stop,) for stop in line.stop_ids] or [()] for line in lines]
    pairs = zip(lines, ends, strict=True)
    return [(len(line.prefix), line.prefix + line.tokens + end) for line, own in pairs for end in own]


def of_whole_lines(lines: Sequence[ScoredLine], found: Sequence[Sequence[Place]]) -> list[list[Place]]:
    """Places of `lines` from those of their `whole_lines` behind the prefixes."""
    left, judged = iter(found), list[list[Place]]()
    for line in lines:
        own = [next(left) for _ in line.stop_ids or (None,)]
        if any(len(places) != len(line.tokens) + bool(line.stop_ids) for places in own):
            raise ServerError("the server judged other tokens than those that were asked for")
        ends = [places[-1] for places in own] if line.stop_ids else []
        likeliest = next((end.likeliest for end in ends if end.likeliest is not None), None)
        behind = Place({stop: end.logprobs[stop] for stop, end in zip(line.stop_ids, ends, strict=True)}, likeliest)
        judged.append([*own[0][: len(line.tokens)], behind])
    return judged


def any_of(logprobs: Iterable[float]) -> float:
    """Log p that any of several tokens comes next."""
    known = list(logprobs)
    top = max(known)
    return top if math.isinf(top) else top + math.log(sum(math.exp(logprob - top) for logprob in known))


def with_place(told: dict[tuple[int, ...], Place], ids: tuple[int, ...], place: Place) -> None:
    """Add what is known of the place behind `ids`."""
    before = told.get(ids)
    if before is not None:
        likeliest = before.likeliest if place.likeliest is None else place.likeliest
        place = Place({**before.logprobs, **place.logprobs}, likeliest)
    told[ids] = place


def distance(some: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """Mean |Δ log p|."""
    pairs = [pair for a, b in zip(some, others, strict=True) for pair in zip(a, b, strict=True)]
    return sum(abs(x - y) for x, y in pairs) / len(pairs)
