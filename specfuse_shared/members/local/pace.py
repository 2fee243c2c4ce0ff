"""How many tokens of prompts a forward reads, so that answers that have begun go on at half of their speed or more.

A forward takes the seconds to read the weights, and more for each token of a prompt. Pieces of prompts ride on the
forwards of answers that have begun, or take one of their own when these have paid for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from specfuse_shared.members.local.forwards import PREFILL_CHUNK

PIECE_SECONDS = 0.3
"""The longest forward for pieces of prompts: a timeout or a cancellation is seen after it."""
_SHARE = 1.0
"""Seconds for pieces of prompts beside a second for answers that have begun: these keep half of the time."""
_WORTH = 4.0
"""Where reading the weights takes long, a piece takes this many times as long: smaller ones would be dear."""
_LEAST, _GRAIN = 64, 16
"""Tokens of a piece that is worth its forward, also before any was timed; kernels are chosen by shape, so sizes are
multiples."""
SHORT_PROMPT = 64
"""Tokens of prompts that need not wait until answers that have begun have saved time for them."""
_NEWS, _SLOWER = 0.3, 0.05
"""Weight of the newest forward in a mean; of one that took longer than the weights, for it did more than read them."""


@dataclass(slots=True)
class Pace:
    """How fast a member is: a forward takes `step` seconds, mostly to read the weights, and `token` more for each token
    of a prompt. `last`: prompt tokens of the last forward with any."""

    step: float = 0.0
    token: float = 0.0
    last: int = _LEAST // 2

    def learn(self, seconds: float, prompt_tokens: int) -> None:
        """A forward took so long, so many tokens of prompts among it."""
        if not prompt_tokens:
            self.step = _mean(self.step, seconds, _SLOWER if seconds > self.step else _NEWS)
        else:
            self.step = min(self.step, seconds)
            self.token = _mean(self.token, (seconds - self.without_prompts(seconds, prompt_tokens)) / prompt_tokens)
            self.last = prompt_tokens

    def without_prompts(self, seconds: float, prompt_tokens: int) -> float:
        """What such a forward would have taken without its tokens of prompts."""
        return min(self.step, 0.9 * seconds) if prompt_tokens else seconds

    @property
    def longest(self) -> float:
        """Seconds of the longest forward for prompts alone."""
        return max(PIECE_SECONDS, _WORTH * self.step)

    @property
    def alone(self) -> int:
        """Tokens of a forward for prompts that no answer waits for."""
        return max(_LEAST, self.tokens(self.longest - self.step))

    def tokens(self, seconds: float) -> int:
        """Tokens of prompts that take so many seconds more than a forward without.

        They grow by a factor of two at most, for what was measured may be off.
        """
        most = min(PREFILL_CHUNK, 2 * max(self.last, _LEAST))
        if not self.token:
            return most
        return min(most, int(max(0.0, seconds) / self.token) // _GRAIN * _GRAIN)


def _mean(before: float, new: float, weight: float = _NEWS) -> float:
    return new if not before else before + weight * (new - before)


@dataclass(slots=True)
class ReadingTime:
    """Seconds that prompts may take from answers that have begun: `_SHARE` for each second of theirs."""

    saved: float = 0.0

    def pieces(self, pace: Pace, rides: bool, left: int) -> tuple[int, float]:
        """Tokens of prompts in the next forward of a member, and the seconds that they may take.

        `rides`: it is a forward of answers that have begun; another one reads the weights for prompts alone. `left`:
        what the shortest prompt needs. A piece that is too small for its costs waits until it may be larger.
        """
        seconds = self.saved + (_SHARE if rides else -1.0) * pace.step
        tokens = pace.tokens(min(seconds, pace.longest))
        if tokens >= min(left, _LEAST):
            return tokens, seconds if rides else self.saved
        if self.saved >= pace.longest:
            return _LEAST, self.saved
        return 0, 0.0

    def learn(self, pace: Pace, planned: float, answers: float, prompts: float) -> None:
        """A forward took so many seconds for answers, and so many for prompts, for which it had `planned`."""
        saved = self.saved + planned + _SHARE * answers - prompts
        self.saved = max(-pace.longest, min(saved, pace.longest))
