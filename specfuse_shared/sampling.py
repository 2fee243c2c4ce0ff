"""How a member picks its next token: the library's own logit processors, in the order of its `generate`."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from typing import cast

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specfuse_shared.config import SamplingParams
from specfuse_shared.context import NotFiniteError


class Sampler:
    """Picks tokens for one member of one request.

    Every draft draws from a generator of its own, seeded by (seed, member, round): the same seed gives the same
    answer, whatever else runs.
    """

    def __init__(self, params: SamplingParams, seed: int, member: str, device: torch.device) -> None:
        self._greedy, self._seed, self._member, self._device = params.greedy, seed, member, device
        self._processors = _processors(params)
        self._needs_history = params.repetition_penalty != 1.0
        self._generator = torch.Generator(device)

    def start(self, round_index: int) -> None:
        """Begin the draft of a round."""
        if not self._greedy:
            key = f"{self._seed}/{self._member}/{round_index}".encode()
            self._generator.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big"))

    def pick(self, logits: torch.Tensor, history: Sequence[int], blocked: torch.Tensor | None = None) -> int:
        """The next token after `history` (prompt and answer ids), from its logits (V); never one of `blocked`."""
        if self._greedy and not self._processors:
            best = _largest(logits)
            if blocked is None or not bool((blocked == best).any()):
                return best
        if blocked is not None:
            logits = logits.index_fill(0, blocked, float("-inf"))
        scores: torch.Tensor = logits.float()[None]
        past = history if self._needs_history else ()
        past_ids = torch.tensor([list(past)], dtype=torch.long, device=logits.device)
        scores = self._processors(cast(torch.LongTensor, past_ids), cast(torch.FloatTensor, scores))
        if self._greedy:
            return _largest(scores[0])
        shares = scores.softmax(-1)
        if not bool(shares.isfinite().all()):
            raise NotFiniteError
        return int(torch.multinomial(shares, 1, generator=self._generator))


def _largest(scores: torch.Tensor) -> int:
    """Index of the largest of scores (V). Raises `NotFiniteError`."""
    best = scores.max(0)
    if not math.isfinite(float(best.values)):
        raise NotFiniteError
    return int(best.indices)


def new_seed() -> int:
    """A seed for a sampled request that named none."""
    return secrets.randbits(32)


def _processors(params: SamplingParams) -> LogitsProcessorList:
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.greedy:
        return processors
    if params.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors
