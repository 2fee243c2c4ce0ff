"""What a member asks of a server, to continue ids and to judge given ones, and checks of what comes back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from specfuse_shared.errors import ServerError, ServerSettingsError
from specfuse_shared.policies import ROUNDING
from specfuse_shared.settings.sampling_params import SamplingParams

BAN = -100.0
"""What is added to the logit of a token that must not come."""


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


def ban_of(banned: Sequence[int]) -> dict[str, float]:
    """Biases that keep tokens away."""
    return dict.fromkeys(map(str, banned), BAN)


def whole_lines(lines: Sequence[ScoredLine]) -> list[tuple[int, tuple[int, ...]]]:
    """Each line once for each of its stop ids, or once: how much of it is prefix, and all of it."""
    ends: list[list[tuple[int, ...]]] = [[(stop,) for stop in line.stop_ids] or [()] for line in lines]
    pairs = zip(lines, ends, strict=True)
    return [(len(line.prefix), line.prefix + line.tokens + end) for line, line_ends in pairs for end in line_ends]


def of_whole_lines(lines: Sequence[ScoredLine], logprobs_of_lines: Sequence[Sequence[float]]) -> list[list[float]]:
    """Judgements of `lines` from log p of the tokens of their `whole_lines` behind the prefixes."""
    remaining, judged = iter(logprobs_of_lines), list[list[float]]()
    for line in lines:
        per_stop = [next(remaining) for _ in line.stop_ids or (None,)]
        if any(len(logprobs) != len(line.tokens) + bool(line.stop_ids) for logprobs in per_stop):
            raise ServerError("the server judged other tokens than those that were asked for")
        tokens = list(per_stop[0][: len(line.tokens)])
        judged.append([*tokens, any_of(logprobs[-1] for logprobs in per_stop)] if line.stop_ids else tokens)
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
