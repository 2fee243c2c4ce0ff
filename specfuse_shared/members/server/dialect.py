"""What a member needs of a server, whatever its dialect: to continue ids, and log p of given ids behind others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specfuse_shared.errors import ServerError, ServerSettingsError
from specfuse_shared.members.stages import Top
from specfuse_shared.sampling_params import SamplingParams

BAN = -100.0
"""What is added to the logit of a token that must not come."""
ROUNDING = 0.3
"""Largest difference of log-probabilities, in nats, that is taken for the rounding of half precision; settings of a
server that change them cost more."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """At most `count` tokens behind `prompt`, sampled as `params` and `seed` say, until one of `stop_ids` comes.

    Never one of `banned`; only ones of `allowed`, where those are given. `vocabulary_size`: ids are below it.
    """

    prompt: tuple[int, ...]
    count: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    banned: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None
    vocabulary_size: int | None = None


@dataclass(frozen=True, slots=True)
class Line:
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


class Dialect(Protocol):
    """How one kind of server is asked. Every method raises `ServerError`."""

    model: str
    """The server's name of the model."""
    verification: str
    """How it judges: "prefixes" (all prefixes in one request, behind its cache) or "prompt" (whole lines)."""

    async def facts(self) -> ServerFacts:
        """What the server says of itself."""
        ...

    async def tokenized(self, text: str) -> list[int] | None:
        """Ids of a text as the server's tokenizer has them, without special tokens; None where it does not tell."""
        ...

    async def continued(self, wanted: Continuation) -> tuple[list[int], bool]:
        """Ids up to the end of the turn, and whether that came."""
        ...

    async def judged(self, lines: Sequence[Line]) -> list[list[float]]:
        """Natural log p of each line's tokens given all before them; then that any of its stop ids comes."""
        ...

    async def settle(self, lines: Sequence[Line]) -> float:
        """Find out how to judge, on short `lines`; the mean |Δ log p| between its two ways of scoring.

        Raises `ServerSettingsError` for a server whose log-probabilities are not the model's own.
        """
        ...


@runtime_checkable
class TellsTops(Protocol):
    """A dialect that also tells of tokens that it is not asked for."""

    async def tops(self, line: Line, count: int) -> list[Top]:
        """The most probable tokens in the place of each of the line's. Raises `ServerError`."""
        ...


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


def ban_of(banned: Sequence[int]) -> dict[str, float]:
    """Biases that keep tokens away."""
    return dict.fromkeys(map(str, banned), BAN)


def whole_lines(lines: Sequence[Line]) -> list[tuple[int, tuple[int, ...]]]:
    """Each line once for each of its stop ids, or once: how much of it is prefix, and all of it."""
    ends: list[list[tuple[int, ...]]] = [[(stop,) for stop in line.stop_ids] or [()] for line in lines]
    pairs = zip(lines, ends, strict=True)
    return [(len(line.prefix), line.prefix + line.tokens + end) for line, own in pairs for end in own]


def of_whole_lines(lines: Sequence[Line], found: Sequence[Sequence[float]]) -> list[list[float]]:
    """Judgements of `lines` from log p of the tokens of their `whole_lines` behind the prefixes."""
    left, judged = iter(found), list[list[float]]()
    for line in lines:
        own = [next(left) for _ in line.stop_ids or (None,)]
        if any(len(logprobs) != len(line.tokens) + bool(line.stop_ids) for logprobs in own):
            raise ServerError("the server judged other tokens than those that were asked for")
        tokens = list(own[0][: len(line.tokens)])
        judged.append([*tokens, any_of(logprobs[-1] for logprobs in own)] if line.stop_ids else tokens)
    return judged


def any_of(logprobs: Iterable[float]) -> float:
    """Log p that any of several tokens comes next."""
    known = list(logprobs)
    top = max(known)
    return top if math.isinf(top) else top + math.log(sum(math.exp(logprob - top) for logprob in known))


def distance(some: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """Mean |Δ log p|."""
    pairs = [pair for a, b in zip(some, others, strict=True) for pair in zip(a, b, strict=True)]
    return sum(abs(x - y) for x, y in pairs) / len(pairs)
