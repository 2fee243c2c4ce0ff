"""Sampling: the library's own logit processors, in the order of its `generate`; log-probabilities; transfers.

Choices stay on the device: `Sampler.pick` fetches its one, `BatchSampling` leaves many there. Log-probabilities and
argmax tokens of a forward pass are sent to the host together. Transfers do not wait for the device's pending work.

Symbols: B answers, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specfuse_shared.config import SamplingParams
from specfuse_shared.runtime.mps import forget_read, is_mps, keep_until_read


def upload(values: Sequence[int] | NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor, an array, or numbers as int64, on `device`.

    Page-locked memory on the way to a CUDA device: from pageable memory the driver may wait for all that is queued.
    MPS reads the source after this has returned: it reads a copy, which is kept until the next `Download`.
    """
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(values)
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.long)
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    elif is_mps(device):
        tensor = tensor if isinstance(values, Sequence) else tensor.clone()  # a caller may change what it gave
        keep_until_read(tensor)
    return tensor.to(device, non_blocking=True)


class Download:
    """Numbers that are sent to the host as soon as they are computed; later work does not delay them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._sent = None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._sent = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> list[Any]:
        """The numbers as nested lists, once they are there."""
        if self._sent is not None:
            self._sent.synchronize()
        numbers = list(self._tensor.tolist())
        if is_mps(self._tensor.device):
            forget_read()
        return numbers


_ROWS_A_KERNEL = 64
_ROW_BY_ROW = {"cpu"}
"""Devices on which a block of rows gains nothing: it fits no cache, and a call costs little."""
TopLogprobs = tuple[tuple[int, float], ...]
"""Ids of the most probable tokens in one place, and their natural log p; the most probable first."""


class NotFiniteError(ArithmeticError):
    """The model's logits are not numbers."""

    def __init__(self) -> None:
        super().__init__("its logits are not finite numbers (overflow in half precision, or broken weights)")


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Tokens in a row: `nodes` whose logits speak of each, and of any of `stops` next; one token more if there are."""

    nodes: Sequence[int]
    tokens: Sequence[int]
    stops: Sequence[int]


class _Numbers:
    """What is sent for many judgements at once; the first to ask waits for the device."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sent = Download(torch.cat(list(tensors)))
        self._read = list[float]()

    def part(self, places: Sequence[slice]) -> list[float]:
        self._read = self._read or self._sent.read()
        return list(chain.from_iterable(self._read[place] for place in places))


class PendingLogprobs:
    """Log-probabilities of lines, on their way from the device; `logits` (V) of a node.

    `top`: number of most probable alternatives for each token.
    """

    def __init__(self, lines: Sequence[TokenRow], logits: Callable[[int], torch.Tensor], top: int = 0) -> None:
        self._lines = lines
        self._logits = logits
        self._top = top
        self.tops: list[list[TopLogprobs]] = [[] for _ in lines]
        """Of each line's tokens, once it was read."""
        self._nodes = list(dict.fromkeys(chain.from_iterable(line.nodes for line in lines)))
        self._asked = list(chain.from_iterable(line.nodes[: len(line.tokens)] for line in lines))
        """The nodes that predict each token, in the order of the lines."""
        self._numbers: _Numbers | None = None
        self._places: list[slice] = []

    @classmethod
    def together(cls, judgements: Sequence[PendingLogprobs]) -> None:
        """Let the device find them all at once: a few kernels, and one thing to wait for."""
        pending = [judgement for judgement in judgements if judgement._nodes]
        if not pending:
            return
        rows = {id(j): {n: j._logits(n) for n in j._nodes} for j in pending}
        tensors = [_log_masses([row for by_row in rows.values() for row in by_row.values()])]
        if top_rows := [rows[id(j)][n] for j in pending for n in j._asked]:
            tensors.append(_picked(top_rows, [token for j in pending for line in j._lines for token in line.tokens]))
        ends = [(rows[id(j)][line.nodes[-1]], line.stops) for j in pending for line in j._lines if line.stops]
        tensors += [_log_mass_of(row, stops) for row, stops in ends]
        for j in pending:
            if j._top:
                tensors += _most_probable([rows[id(j)][n] for n in j._asked], j._top)
        numbers, start = _Numbers(tensors), 0
        for size in (_nodes_of, _asked_of, _ends_of, _tops_of):
            for j in pending:
                j._numbers = numbers
                j._places.append(slice(start, start + size(j)))
                start += size(j)

    def read(self) -> list[list[float]]:
        """Natural log p of the tokens of each line, and of its end; waits for the device. Raises `NotFiniteError`."""
        if self._numbers is None:
            return [[] for _ in self._lines]
        numbers = iter(self._numbers.part(self._places))
        mass = {node: next(numbers) for node in self._nodes}
        if not all(map(math.isfinite, mass.values())):
            raise NotFiniteError
        judged = [[next(numbers) - mass[n] for n in line.nodes[: len(line.tokens)]] for line in self._lines]
        for line, logprobs in zip(self._lines, judged, strict=True):
            logprobs += [next(numbers) - mass[line.nodes[-1]]] if line.stops else []
        if self._top:
            self.tops = self._read_tops(list(numbers), mass)
        return judged

    def _read_tops(self, numbers: Sequence[float], mass: Mapping[int, float]) -> list[list[TopLogprobs]]:
        """Of all tokens in their order: logits first, then the ids that have them."""
        half = len(numbers) // 2
        pairs = [(int(token), score) for score, token in zip(numbers[:half], numbers[half:], strict=True)]
        places = (pairs[n : n + self._top] for n in range(0, half, self._top))
        return [
            [
                tuple((token, score - mass[node]) for token, score in next(places))
                for node in line.nodes[: len(line.tokens)]
            ]
            for line in self._lines
        ]


def _nodes_of(judgement: PendingLogprobs) -> int:
    return len(judgement._nodes)


def _asked_of(judgement: PendingLogprobs) -> int:
    return len(judgement._asked)


def _ends_of(judgement: PendingLogprobs) -> int:
    return sum(1 for line in judgement._lines if line.stops)


def _tops_of(judgement: PendingLogprobs) -> int:
    return 2 * judgement._top * len(judgement._asked)


def _log_masses(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """log Σ exp of each of the rows (V), in float32."""
    if rows[0].device.type in _ROW_BY_ROW:
        return torch.stack([_log_mass(row) for row in rows])
    return torch.cat([torch.stack(block).float().logsumexp(-1) for block in _in_blocks(rows)])


def _log_mass(row: torch.Tensor) -> torch.Tensor:
    """log Σ exp of a row (V) on the processor, in float32.

    Row by row and in the same memory, because blocks of float32 copies would not fit a cache, and pages of new memory
    cost more than the sum.
    """
    scores = _scratch.of(len(row)).copy_(row)
    peak = scores.amax()
    return scores.sub_(peak).exp_().sum().log_().add_(peak)


class _Scratch(threading.local):
    """Memory of a thread, for the last size that was asked for."""

    def __init__(self) -> None:
        self._row = torch.empty(0)

    def of(self, size: int) -> torch.Tensor:
        if len(self._row) != size:
            self._row = torch.empty(size)
        return self._row


_scratch = _Scratch()


def _picked(rows: Sequence[torch.Tensor], tokens: Sequence[int]) -> torch.Tensor:
    """The log-probability of each row's (V) token, in float32."""
    if rows[0].device.type in _ROW_BY_ROW:
        return torch.stack([row[token] for row, token in zip(rows, tokens, strict=True)]).float()
    places = torch.split(upload(tokens, rows[0].device)[:, None], _ROWS_A_KERNEL)
    picked = [torch.stack(block).gather(1, at) for block, at in zip(_in_blocks(rows), places, strict=True)]
    return torch.cat(picked)[:, 0].float()


def _most_probable(rows: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """The largest logits of each of the rows (V), then their places, in float32, which is exact for any vocabulary."""
    blocks = [[row] for row in rows] if rows[0].device.type in _ROW_BY_ROW else _in_blocks(rows)
    ranked = [torch.stack(block).topk(count, dim=-1) for block in blocks]
    values, places = (torch.cat(part).flatten().float() for part in zip(*ranked, strict=True))
    return [values, places]


def _log_mass_of(row: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """log Σ exp of the logits of some tokens in a row (V), in float32; (1)."""
    return row.index_select(0, upload(tokens, row.device)).float().logsumexp(0, keepdim=True)


def _in_blocks(rows: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [list(rows[n : n + _ROWS_A_KERNEL]) for n in range(0, len(rows), _ROWS_A_KERNEL)]


_PIECE = 512
_LEAST_NOISE = torch.finfo(torch.float32).tiny
NOT_FINITE = -1
"""Chosen in place of a token where the logits are not numbers."""


class Sampler:
    """Picks tokens for one member of one request.

    The noise of a token comes from (seed, member, round, number of earlier draws in the round): the same seed
    gives the same answer, independent of concurrent work and batching.
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
        # a token with zero probability is never taken, independent of the noise
        has_share = shares.gather(-1, chosen[:, None])[:, 0] > 0
        chosen = torch.where(has_share, chosen, shares.argmax(-1))
        # one score that is no number leaves no share that is one
        return chosen.masked_fill(~shares[:, 0].isfinite(), NOT_FINITE)

    def noise(self, offset: int, size: int) -> torch.Tensor:
        """Exponential noise (V) for the token that is chosen `offset` tokens later."""
        number = number_of_draw(self._seed, self._member, self._round, self.drawn + offset)
        generator = torch.Generator(self.device).manual_seed(number)
        return torch.empty(size, device=self.device).exponential_(generator=generator)


def number_of_draw(seed: int, member: str, round_index: int, place: int) -> int:
    """The number (56 bits) that seeds the noise of a token, on any device."""
    key = f"{seed}/{member}/{round_index}/{place}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")


@dataclass(slots=True)
class BatchSampling:
    """The next tokens of many drafts: answers that choose by the same rule share the kernels.

    `samplers`, the ids that each must not choose (`blocked`) and the ids before its draft (`histories`), for B answers.
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

    def __call__(self, logits: torch.Tensor, offset: int) -> torch.Tensor:
        """The tokens (B) at `offset` in the drafts, for logits (B, V); `NOT_FINITE` where logits are no numbers."""
        tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        for rows, at in self._groups:
            first = self.samplers[rows[0]]
            noise = None
            if not first.greedy:
                noise = torch.stack([self.samplers[n].noise(offset, logits.shape[-1]) for n in rows])
            selected = logits if at is None else logits.index_select(0, at)
            past = self._past.get(rows[0], tokens.new_empty(len(rows), 0))
            chosen = first.choose(selected, past, self.blocked[rows[0]], noise)
            if first.needs_history:
                self._past[rows[0]] = torch.cat([past, chosen.clamp(min=0)[None]], dim=-1)
            if at is None:
                return chosen
            tokens.index_copy_(0, at, chosen)
        return tokens


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """How to choose the next token from its logits.

    `history`: the ids before it, if the sampler asks for them. `blocked` (N): ids that it must not choose. `allowed`:
    the ids that a grammar allows, a bit each (see `masked`); None: all.
    """

    sampler: Sampler
    history: Sequence[int]
    blocked: torch.Tensor | None
    allowed: bytes | None

    def pick(self, logits: torch.Tensor) -> int:
        """The next token from its logits (V); waits for the device. Raises `NotFiniteError`."""
        if self.allowed is not None:
            [logits] = masked(logits[None], [self.allowed])
        return self.sampler.pick(logits, self.history, self.blocked)


class PendingToken:
    """A token that is chosen from `logits` (V), on its way from the device once `together` has run."""

    def __init__(self, logits: torch.Tensor, choice: TokenChoice) -> None:
        self._logits = logits
        self._choice = choice
        self._tokens: SentTokens | None = None
        self._row = 0

    @classmethod
    def together(cls, pending: Sequence[PendingToken]) -> None:
        """Let the device choose all at once: a mask and a few kernels for each rule, and one thing to wait for."""
        if not pending:
            return
        choices = [each._choice for each in pending]
        logits = torch.stack([each._logits for each in pending])
        if any(choice.allowed is not None for choice in choices):
            logits = masked(logits, [choice.allowed for choice in choices])
        choose = BatchSampling([c.sampler for c in choices], [c.blocked for c in choices], [c.history for c in choices])
        tokens = SentTokens(choose(logits, 0))
        for row, each in enumerate(pending):
            each._tokens, each._row = tokens, row

    def read(self) -> int:
        """The token; the first of a batch to be read waits for the device. Raises `NotFiniteError`."""
        assert self._tokens is not None, "`together` comes first"
        self._choice.sampler.drawn += 1
        return self._tokens.token(self._row)


def masked(logits: torch.Tensor, allowed: Sequence[bytes | None]) -> torch.Tensor:
    """Logits (B, V) with -inf for every token whose bit in `allowed` (the lowest first) is not set; None allows all."""
    size = -(-logits.shape[-1] // 8)
    rows = [b"\xff" * size if bits is None else bits[:size].ljust(size, b"\0") for bits in allowed]
    keep = _bits(b"".join(rows), logits.device).view(len(rows), -1)[:, : logits.shape[-1]]
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


_ROWS_AT_ONCE = 256
"""Maximum number of logit rows that are copied into one tensor."""


class SentTokens:
    """Tokens (N) of many places, on their way from the device; `NOT_FINITE` where logits are no numbers."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._sent = Download(tokens)
        self._ids: list[int] | None = None

    def token(self, row: int) -> int:
        """The first to ask waits for the device. Raises `NotFiniteError`."""
        if self._ids is None:
            self._ids = self._sent.read()
        if self._ids[row] == NOT_FINITE:
            raise NotFiniteError
        return self._ids[row]


class ArgmaxTokens(SentTokens):
    """The first of the largest of each row of `logits` (any number of (N, V)), on its way from the device."""

    def __init__(self, logits: Sequence[torch.Tensor]) -> None:
        rows = [piece for tensor in logits for piece in torch.split(tensor, _ROWS_AT_ONCE)]
        ends, blocks = 0, []
        for piece in rows:
            ends += len(piece)
            blocks.append((ends - 1) // _ROWS_AT_ONCE)
        pairs = groupby(zip(blocks, rows, strict=True), key=lambda pair: pair[0])
        super().__init__(torch.cat([_argmax_of_rows([piece for _, piece in group]) for _, group in pairs]))


def _argmax_of_rows(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    best = (torch.cat(list(rows)) if len(rows) > 1 else rows[0]).max(-1)
    return best.indices.masked_fill(~best.values.isfinite(), NOT_FINITE)
