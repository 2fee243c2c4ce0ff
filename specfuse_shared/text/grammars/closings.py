"""Texts that complete a value under a grammar, found within a budget.

A search is greedy, a byte at a time, and copies the matcher for each byte that is allowed, once for each set of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

MOST_BYTES = 1024
MOST_TRIALS = 20_000
"""Copies of a matcher for one answer at once; a usual JSON object takes some hundred."""
MOST_SECONDS = 0.5
"""Of the processor, for searches at once; only grammars whose single steps are slow need as many."""
_TRIALS_A_ROUND, _SECONDS_A_ROUND = 1_000, 0.02
_PATIENCE = 256
_LOOKS_AHEAD, _LETTERS_AHEAD = 3, 3
_STRING_MARKS = b'"\\'
_DIGITS = b"0123456789"
_CLOSERS = b'}])>"'
_OF_TEXT = b"xqQ"
"""Letters that stand in text alone: where one of them is allowed, a bracket may be text, too."""
_DETOURS = b"\\,.eE{[(<"


class Closings:
    """Searches the closings of one answer, within a budget that every round refills a little."""

    def __init__(self) -> None:
        self._trials = MOST_TRIALS
        self._seconds = MOST_SECONDS
        self._stops_at = 0.0
        self._steps: dict[bytes, bytes] = {}
        self._idle: dict[bytes, bool] = {}
        self._looks: Counter[bytes] = Counter()
        self._last = b""

    @property
    def spent(self) -> bool:
        """No budget is left for this round."""
        return self._trials <= 0 or self._seconds <= 0

    def refill(self) -> None:
        """A round is over."""
        self._trials = min(MOST_TRIALS, max(0, self._trials) + _TRIALS_A_ROUND)
        self._seconds = min(MOST_SECONDS, max(0.0, self._seconds) + _SECONDS_A_ROUND)

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
    def _is_over(self) -> bool:
        return self._trials <= 0 or time.thread_time() >= self._stops_at

    def _search(self, matcher: Any) -> bytes | None:
        after, found, self._last = matcher.deep_copy(), bytearray(), b""
        while len(found) < MOST_BYTES and not self._is_over:
            if after.is_accepting():
                return bytes(found)
            step = bytes(after.compute_ff_bytes()) or self._step(after, max(0, len(found) - _PATIENCE))
            if not step or not after.consume_tokens(list(step)):
                return None
            found += step
        return None

    def _step(self, matcher: Any, turn: int) -> bytes:
        """The allowed bytes that most likely lead to the end: what closes or is short, else what gets on.

        Where that leads nowhere for long, the allowed bytes take turns. Places that allow the same are alike.
        """
        self._trials -= 1
        mask: bytes = matcher.compute_bitmask()
        allowed = _bytes_of(mask)
        if not allowed:
            return b""
        if turn:
            return bytes([allowed[turn % len(allowed)]])
        closers = [byte for byte in _CLOSERS if byte in allowed]
        if closers and not any(letter in allowed for letter in _OF_TEXT):
            return bytes(closers[:1])
        if mask not in self._steps:
            self._steps[mask] = self._best(matcher, mask, allowed)
        idle, self._last = self._idle[mask] or mask == self._last, mask
        if idle and self._looks[mask] < _LOOKS_AHEAD:
            self._looks[mask] += 1
            ways = [way for byte in allowed if (way := self._ahead(matcher, byte, mask))]
            if ways:
                self._steps[mask], self._idle[mask] = (
                    min(ways, key=lambda way: (len(way), way[0] not in _DIGITS)),
                    False,
                )
        return self._steps[mask]

    def _best(self, matcher: Any, mask: bytes, allowed: Sequence[int]) -> bytes:
        tried: list[tuple[bool | int, ...]] = []
        for byte in allowed:
            if self._is_over:
                break
            self._trials -= 1
            tried.append(_detour(matcher, byte, mask))
        *_, idle, _is_detour, _is_other, _dictated, byte = min(tried, default=(False, False, False, 0, allowed[0]))
        self._idle[mask] = bool(idle)
        return bytes([byte])

    def _ahead(self, matcher: Any, byte: int, mask: bytes) -> bytes:
        """The byte, and as few letters behind it as change what is allowed, as in the end of a mail address."""
        if byte > 127 or byte in _STRING_MARKS:
            return b""
        after, way = matcher.deep_copy(), bytes([byte])
        while len(way) <= _LETTERS_AHEAD and not self._is_over and after.consume_token(way[-1]):
            self._trials -= 1
            seen: bytes = after.compute_bitmask()
            if after.is_accepting() or seen != mask:
                return way
            way += b"a"
        return b""


def _detour(matcher: Any, byte: int, mask: bytes) -> tuple[bool | int, ...]:
    """Orders bytes: those that end the value, then those behind which something else is allowed, the shortest first.

    Within text, a quote that changes what is allowed ends a string, and one that does not is a character like others.
    """
    after = matcher.deep_copy()
    after.consume_token(byte)
    unusual, idle = byte > 127 or byte == ord("\\"), after.compute_bitmask() == mask
    dictated = len(after.compute_ff_bytes())
    ends = after.is_accepting() or (byte == ord('"') and not idle)
    return not ends, unusual, idle, byte in _DETOURS, byte not in _DIGITS, dictated, byte


def completes(matcher: Any, closing: str) -> bool:
    """Whether the value is complete behind `closing`."""
    data = list(closing.encode())
    if matcher.validate_tokens(data) < len(data):
        return False
    after = matcher.deep_copy()
    return bool(after.consume_tokens(data) and after.is_accepting())


def _bytes_of(mask: bytes) -> list[int]:
    return [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
