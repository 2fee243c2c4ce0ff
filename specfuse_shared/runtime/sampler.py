"""How members pick their next tokens: the library's own logit processors, in the order of its `generate`.

B answers, V vocabulary. Choices stay on the device: `Sampler.pick` fetches its one, `BatchSampling` leaves many there.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
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

from specfuse_shared.runtime.logprobs import NotFiniteError
from specfuse_shared.runtime.transfer import upload
from specfuse_shared.settings.sampling_params import SamplingParams

_PIECE = 512
_LEAST_NOISE = torch.finfo(torch.float32).tiny
NOT_FINITE = -1
"""Chosen in place of a token where the logits are not numbers."""


class Sampler:
    """Picks tokens for one member of one request.

    The noise behind a token comes from (seed, member, round, how many tokens the round drew before): the same seed
    gives the same answer, whatever else runs and however tokens are batched.
    """

    def __init__(self, params: SamplingParams, seed: int, member: str, device: torch.device) -> None:
        self.greedy = params.greedy
        self.device = device
        chance = () if params.greedy else (params.temperature, params.top_k, params.top_p, params.min_p)
        self.rule = (*chance, params.repetition_penalty)
        self.needs_history = params.repetition_penalty != 1.0
        self.drawn = 0
        self._seed = seed
        self._member = member
        self._round = 0
        self._processors = _processors(params)

    @property
    def is_plain(self) -> bool:
        """Whether it picks the largest of the logits as they are."""
        return self.greedy and not self._processors

    def start(self, round_index: int) -> None:
        """Begin the draft of a round."""
        self._round, self.drawn = round_index, 0

    def pick(self, logits: torch.Tensor, history: Sequence[int], blocked: torch.Tensor | None = None) -> int:
        """The next token after `history` (prompt and answer ids), from its logits (V); never one of `blocked`."""
        if self.is_plain and self.device.type == "cpu":
            best = _largest(logits)
            if blocked is None or not bool((blocked == best).any()):
                return best
        past = upload(history if self.needs_history else (), self.device)[None]
        noise = None if self.greedy else self.noise(0, len(logits))[None]
        token = int(self.choose(logits[None], past, blocked, noise))
        self.drawn += 1
        if token == NOT_FINITE:
            raise NotFiniteError
        return token

    def choose(
        self, logits: torch.Tensor, history: torch.Tensor, blocked: torch.Tensor | None, noise: torch.Tensor | None
    ) -> torch.Tensor:
        """Tokens (B) for logits (B, V), or `NOT_FINITE`; `noise` (B, V) unless greedy, which is used up."""
        if blocked is not None:
            logits = logits.index_fill(-1, blocked, float("-inf"))
        scores: torch.Tensor = logits
        if not self.greedy or self._processors:
            scores = self._processors(cast(torch.LongTensor, history), cast(torch.FloatTensor, logits.float()))
        if noise is None:
            best = scores.max(-1)
            return best.indices.masked_fill(~best.values.isfinite(), NOT_FINITE)
        shares = scores.softmax(-1)
        # who of many exponential clocks with these rates rings first is a draw from these shares; MPS draws -0.0, too
        chosen = torch.div(shares, noise.clamp_(min=_LEAST_NOISE), out=noise).argmax(-1)
        # whatever the noise was, a token without a share is none that may be taken
        has_share = shares.gather(-1, chosen[:, None])[:, 0] > 0
        chosen = torch.where(has_share, chosen, shares.argmax(-1))
        # one score that is no number leaves no share that is one
        return chosen.masked_fill(~shares[:, 0].isfinite(), NOT_FINITE)

    def noise(self, ahead: int, size: int) -> torch.Tensor:
        """Exponential noise (V) of the token that is `ahead` picks away."""
        number = number_of_draw(self._seed, self._member, self._round, self.drawn + ahead)
        generator = torch.Generator(self.device).manual_seed(number)
        return torch.empty(size, device=self.device).exponential_(generator=generator)


def number_of_draw(seed: int, member: str, round_index: int, place: int) -> int:
    """The number (56 bits) that the noise behind a token comes from, wherever it is drawn."""
    key = f"{seed}/{member}/{round_index}/{place}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")


@dataclass(slots=True)
class BatchSampling:
    """The next tokens of many drafts: answers that choose by the same rule share the kernels.

    `samplers`, what each must not say (`blocked`) and what stands before its draft (`histories`), for B answers.
    """

    samplers: Sequence[Sampler]
    blocked: Sequence[torch.Tensor | None]
    histories: Sequence[Sequence[int]]
    _past: dict[int, torch.Tensor] = field(default_factory=dict)
    _groups: list[tuple[list[int], torch.Tensor | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for n, sampler in enumerate(self.samplers):
            device = sampler.device
            if sampler.needs_history:
                self._past[n] = upload(self.histories[n], device)[None]
            alike[sampler.rule, id(self.blocked[n]), n if sampler.needs_history else None].append(n)
        whole = len(alike) == 1
        self._groups = [(rows, None if whole else upload(rows, device)) for rows in alike.values()]

    def __call__(self, logits: torch.Tensor, ahead: int) -> torch.Tensor:
        """Tokens (B) or `NOT_FINITE`, `ahead` picks into the drafts, for logits (B, V)."""
        tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        for rows, at in self._groups:
            first = self.samplers[rows[0]]
            noise = None
            if not first.greedy:
                noise = torch.stack([self.samplers[n].noise(ahead, logits.shape[-1]) for n in rows])
            own = logits if at is None else logits.index_select(0, at)
            past = self._past.get(rows[0], tokens.new_empty(len(rows), 0))
            chosen = first.choose(own, past, self.blocked[rows[0]], noise)
            if first.needs_history:
                self._past[rows[0]] = torch.cat([past, chosen.clamp(min=0)[None]], dim=-1)
            if at is None:
                return chosen
            tokens.index_copy_(0, at, chosen)
        return tokens


def masked(logits: torch.Tensor, allowed: bytes) -> torch.Tensor:
    """Logits (V) with -inf for every token whose bit in `allowed` (the lowest first) is not set."""
    keep = _bits(allowed, logits.device)[: logits.shape[-1]]
    return logits.masked_fill(~keep, float("-inf"))


def allowed_ids(allowed: bytes) -> list[int]:
    """The tokens whose bit in `allowed` (the lowest first) is set."""
    ids: list[int] = _bits(allowed, torch.device("cpu")).nonzero().flatten().tolist()
    return ids


def _bits(packed: bytes, device: torch.device) -> torch.Tensor:
    """The bits of bytes, the lowest first, as booleans (8 · bytes)."""
    data = upload(torch.frombuffer(bytearray(packed), dtype=torch.uint8), device)
    return (data[:, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1).flatten().bool()


def _largest(scores: torch.Tensor) -> int:
    """Index of the largest of scores (V), the first of equal ones. Raises `NotFiniteError`."""
    # a maximum alone is found many numbers at a time, one with its index is not: so first the piece, then the place
    whole = len(scores) // _PIECE * _PIECE
    tops = scores[:whole].view(-1, _PIECE).amax(-1)
    if whole < len(scores):
        tops = torch.cat([tops, scores[whole:].amax(0, keepdim=True)])
    best = tops.float().max(0)
    if not math.isfinite(float(best.values)):
        raise NotFiniteError
    start = int(best.indices) * _PIECE
    return start + int(scores[start : start + _PIECE].argmax())


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
