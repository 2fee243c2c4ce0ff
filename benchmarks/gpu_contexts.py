"""Costs of longer contexts on a card: decoding of each member, and concurrent answers, with and without guesses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from figures import Figure

from specfuse_shared.members.local.member import LocalMember

if TYPE_CHECKING:
    from gpu import Bench

WARMED_TOKENS = 8192
"""Longer prompts, all together, are not read twice: their steps were captured before."""


def parts(bench: Bench) -> Iterator[tuple[str, Callable[[], Sequence[Figure]]]]:
    """For each context that some members reach: decoding first, then few answers before many."""
    for size in bench.sizes.contexts:
        if some := within(bench, size):
            yield f"context {size}: decode", lambda n=size, m=some: decode(bench, m, n)  # type: ignore[misc]
    for count in bench.sizes.at_once:
        for size in bench.sizes.contexts:
            if some := within(bench, size):
                yield f"context {size}: {count} at once", lambda n=size, c=count, m=some: answers(bench, m, n, c)  # type: ignore[misc]


def within(bench: Bench, size: int) -> list[LocalMember]:
    """Members whose context holds a prompt of `size` tokens and an answer."""
    needed = size + 2 * bench.sizes.tokens
    return [member for member in bench.members if member.context_limit is None or member.context_limit >= needed]


def decode(bench: Bench, some: Sequence[LocalMember], size: int) -> list[Figure]:
    """Milliseconds a token of plain decoding of each member after a prompt of `size` tokens."""
    for member in some:
        step = bench.step_seconds(member, size, repeats=2)
        bench.facts.append((f"context {size}: decode, {member.name}", f"{1e3 * step:.2f} ms a token"))
    return []


def answers(bench: Bench, some: Sequence[LocalMember], size: int, count: int) -> list[Figure]:
    """Tokens a second of `count` answers, the reading of their prompts included."""
    said = []
    for way in ("off", "auto"):
        with bench.engine(some, way) as engine:
            rate, needed = bench.rate(engine, some, size, count, warm=size * count <= WARMED_TOKENS)
            said.append(f"{rate:.1f} tokens/s and {needed:.2f} forward passes a token with speculation {way}")
    bench.facts.append((f"context {size}: {count} at once, {len(some)} members", "; ".join(said)))
    return []
