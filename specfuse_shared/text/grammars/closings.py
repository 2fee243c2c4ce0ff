"""Texts that complete a value under a grammar, found within a budget.

A search is greedy, a byte at a time, and copies the matcher for each byte that is allowed, once for each set of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

MOST_BYTES = 1024
MOST_TRIALS = 20_000
"""Copies of a matcher for one answer; a usual JSON object takes some hundred."""
MOST_SECONDS = 0.5
"""Of the processor, for all searches of one answer; only grammars whose single steps are slow need as many."""
_PATIENCE = 256
_CLOSERS, _CLOSERS_IN_STRING = b'}])>"', b'"0'
_DETOURS = b"\\,.eE{[(<"


class Closings:
    """Searches the closings of one answer. Where the budget is used up, none is found any more."""

    def __init__(self) -> None:
        self._trials = MOST_TRIALS
        self._seconds = MOST_SECONDS
        self._stops_at = 0.0

    def shortest(self, matcher: Any) -> str | None:
        """A short text that completes the value; None if none was found."""
        if matcher.is_accepting():
            return ""
        began = time.thread_time()
        self._stops_at = began + self._seconds
        closing = self._search(matcher)
        self._seconds -= time.thread_time() - began
        try:
            return None if closing is None else closing.decode()
        except UnicodeDecodeError:
            return None

    @property
    def _spent(self) -> bool:
        return self._trials <= 0 or time.thread_time() >= self._stops_at

    def _search(self, matcher: Any) -> bytes | None:
        after, found = matcher.deep_copy(), bytearray()
        steps: dict[bytes, int] = {}
        while len(found) < MOST_BYTES and not self._spent:
            if after.is_accepting():
                return bytes(found)
            step = bytes(after.compute_ff_bytes()) or self._step(after, max(0, len(found) - _PATIENCE), steps)
            if not step or not after.consume_tokens(list(step)):
                return None
            found += step
        return None

    def _step(self, matcher: Any, turn: int, steps: dict[bytes, int]) -> bytes:
        """The allowed byte that most likely leads to the end: one that closes or is short, else one that gets on.

        Where that leads nowhere for long, the allowed bytes take turns. `steps`: the choices of this search so far,
        by what was allowed; places that allow the same are alike.
        """
        self._trials -= 1
        mask: bytes = matcher.compute_bitmask()
        allowed = _bytes_of(mask)
        if not allowed:
            return b""
        if turn:
            return bytes([allowed[turn % len(allowed)]])
        in_string = ord("x") in allowed and ord(" ") in allowed
        closers = [byte for byte in (_CLOSERS_IN_STRING if in_string else _CLOSERS) if byte in allowed]
        if closers:
            return bytes(closers[:1])
        if mask not in steps:
            steps[mask] = self._best(matcher, mask, allowed)
        return bytes([steps[mask]])

    def _best(self, matcher: Any, mask: bytes, allowed: Sequence[int]) -> int:
        tried: list[tuple[bool | int, ...]] = []
        for byte in allowed:
            if self._spent:
                break
            self._trials -= 1
            tried.append(_detour(matcher, byte, mask))
        return int(min(tried)[-1]) if tried else allowed[0]


def _detour(matcher: Any, byte: int, mask: bytes) -> tuple[bool | int, ...]:
    """Orders bytes: those that end the value, then those behind which something else is allowed, the shortest first."""
    after = matcher.deep_copy()
    after.consume_token(byte)
    unusual, idle = byte > 127, after.compute_bitmask() == mask
    dictated = len(after.compute_ff_bytes())
    return not after.is_accepting(), unusual, idle, byte in _DETOURS, byte not in b"0123456789", dictated, byte


def completes(matcher: Any, closing: str) -> bool:
    """Whether the value is complete behind `closing`."""
    data = list(closing.encode())
    if matcher.validate_tokens(data) < len(data):
        return False
    after = matcher.deep_copy()
    return bool(after.consume_tokens(data) and after.is_accepting())


def _bytes_of(mask: bytes) -> list[int]:
    return [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
