"""Scores of one verifier for the candidates of a round, in [0, 1]."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specfuse_shared.policies.protocols import CandidateLogprobs


@dataclass(frozen=True, slots=True)
class MeanLogprob:
    """exp(Σ log p / units): the geometric mean probability per token or per byte; per text, that of the whole.

    Means favour long fluent candidates over short decided ones ("Paris." and the end of the turn); the whole favours
    short ones; "root" (units = √tokens, a length penalty of ½ as in beam search) lies between.
    """

    per: Literal["token", "byte", "text", "root"] = "token"

    def __call__(self, candidates: Sequence[CandidateLogprobs]) -> list[float]:
        return [math.exp(math.fsum(c.logprobs) / self._units(c)) for c in candidates]

    def _units(self, candidate: CandidateLogprobs) -> float:
        if self.per == "byte":
            return sum(candidate.token_bytes)
        count = len(candidate.logprobs)
        return {"token": count, "root": math.sqrt(count), "text": 1}[self.per]


@dataclass(frozen=True, slots=True)
class MeanProb:
    """Mean p (the papers' score). Per byte, a token of b bytes counts as b bytes of probability p^(1/b)."""

    per: Literal["token", "byte"] = "token"

    def __call__(self, candidates: Sequence[CandidateLogprobs]) -> list[float]:
        return [self._mean(c.logprobs, c.token_bytes) for c in candidates]

    def _mean(self, logprobs: Sequence[float], token_bytes: Sequence[int]) -> float:
        if self.per == "token":
            return math.fsum(math.exp(lp) for lp in logprobs) / len(logprobs)
        spread = (b * math.exp(lp / b) for lp, b in zip(logprobs, token_bytes, strict=True))
        return math.fsum(spread) / sum(token_bytes)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Probability of the stretch that all candidates cover, so that the place of the cut does not matter.

    B: bytes of the shortest candidate. ℓ_i = log p of the first B bytes of candidate i: tokens within them, and the
    one across the border whole (`per` "token") or in proportion to its bytes (`per` "byte"). The score is exp ℓ_i.
    If all candidates end the turn, they are complete, and B is the size of the longest: answers are scored in full.

    The end of the turn is an event of its own. A candidate that ends within the stretch adds log p(end of turn), and
    one that goes on right behind the text of one that ends is compared up to there and adds log(1 − p(end of turn)):
    "end here" against "go on", whatever the length of what follows, and whether it ends too or not.

    With whole tokens, the scores of candidates that differ within the stretch are probabilities of events that exclude
    each other (Σ ≤ 1). So under a weighted mean, a draft whose whole text has half of the weighted probability wins
    against all that differs from it within the stretch, and against its own beginnings, if they are encoded as its own
    first tokens. What goes on from it may stand for it.
    """

    per: Literal["token", "byte"] = "token"

    def __call__(self, candidates: Sequence[CandidateLogprobs]) -> list[float]:
        ending = sorted((c for c in candidates if c.ends), key=lambda c: c.size)
        size = self._size(candidates)
        return [math.exp(self._logprob(c, next((e for e in ending if _goes_on(c, e)), None), size)) for c in candidates]

    def _size(self, candidates: Sequence[CandidateLogprobs]) -> int:
        """B in bytes."""
        sizes = [c.size for c in candidates]
        return max(sizes) if all(c.ends for c in candidates) else min(sizes)

    def _logprob(self, candidate: CandidateLogprobs, shorter: CandidateLogprobs | None, size: int) -> float:
        """ℓ_i; `shorter`: the shortest candidate that ends and behind which this one goes on."""
        reach = size if shorter is None else min(size, shorter.size)
        logprob, read = log_beginning(candidate, reach, self.per)
        if candidate.ends and candidate.size <= reach:
            return logprob + candidate.logprobs[-1]
        if shorter is not None and read == reach == shorter.size:
            return logprob + _log_not(shorter.logprobs[-1])
        return logprob


def whether_to_call(candidates: Sequence[CandidateLogprobs]) -> list[float] | None:
    """Scores that tell only tool calls from text: p of the tag that opens a call, and 1 − p. None: all are of a kind.

    A call is an event of its own, as the end of the turn is. By their stretches a call would win too often: most of it
    is dictated, while the same wish to answer is spread over many beginnings of a sentence.
    """
    calls = [c for c in candidates if c.call_bytes]
    if not 0 < len(calls) < len(candidates):
        return None
    call = max(calls, key=lambda c: c.call_bytes)
    p = min(1.0, math.exp(log_beginning(call, call.call_bytes)[0]))
    return [p if c.call_bytes else 1 - p for c in candidates]


def log_beginning(
    candidate: CandidateLogprobs, reach: int, per: Literal["token", "byte"] = "token"
) -> tuple[float, int]:
    """log p of the first `reach` bytes, and of how many bytes the tokens are that were counted."""
    count = len(candidate.logprobs) - candidate.ends
    # an encoding may reach back into the answer: what stands for text before the candidate lies below 0
    at, found = min(0, candidate.size - sum(candidate.token_bytes[:count])), []
    for logprob, size in zip(candidate.logprobs[:count], candidate.token_bytes, strict=False):
        if at >= reach:
            break
        share = 1.0 if per == "token" else min(1.0, (reach - at) / size)
        found.append(share * logprob)
        at += size
    return math.fsum(found), at


def mean_behind(candidate: CandidateLogprobs, size: int) -> float:
    """Probability a token (geometric mean) of what stands behind the first `size` bytes, the end of the turn included.

    1 where no token begins there; 0 for a candidate without log-probabilities.
    """
    if not candidate.logprobs:
        return 0.0
    sizes = candidate.token_bytes
    begins = itertools.accumulate(sizes[:-1], initial=candidate.size + candidate.ends - sum(sizes))
    tail = [logprob for logprob, begin in zip(candidate.logprobs, begins, strict=True) if begin >= size]
    return math.exp(math.fsum(tail) / len(tail)) if tail else 1.0


def _goes_on(candidate: CandidateLogprobs, ending: CandidateLogprobs) -> bool:
    """Whether the candidate begins with the text of one that ends there, and does not end there."""
    return candidate.text.startswith(ending.text) and (not candidate.ends or candidate.text != ending.text)


def _log_not(logprob: float) -> float:
    """log(1 − p), from log p."""
    rest = -math.expm1(min(0.0, logprob))
    return math.log(rest) if rest > 0 else -math.inf
