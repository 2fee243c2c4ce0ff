"""Log-probabilities of tokens from logits that lie on a device: sent together, however many are asked for."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from specfuse_shared.runtime.transfer import Download, upload

_ROWS_A_KERNEL = 64
_ROW_BY_ROW = {"cpu"}
"""Devices on which a block of rows gains nothing: it fits no cache, and a call costs little."""
TopTokens = tuple[tuple[int, float], ...]
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

    def __init__(self, found: Sequence[torch.Tensor]) -> None:
        self._sent = Download(torch.cat(list(found)))
        self._read = list[float]()

    def part(self, places: Sequence[slice]) -> list[float]:
        self._read = self._read or self._sent.read()
        return list(chain.from_iterable(self._read[place] for place in places))


class PendingLogprobs:
    """Log-probabilities of lines, on their way from the device; `logits` (V) of a node.

    `top`: so many of the most probable tokens in the place of each are found, too.
    """

    def __init__(self, lines: Sequence[TokenRow], logits: Callable[[int], torch.Tensor], top: int = 0) -> None:
        self._lines = lines
        self._logits = logits
        self._top = top
        self.tops: list[list[TopTokens]] = [[] for _ in lines]
        """Of each line's tokens, once it was read."""
        self._nodes = list(dict.fromkeys(chain.from_iterable(line.nodes for line in lines)))
        self._asked = list(chain.from_iterable(line.nodes[: len(line.tokens)] for line in lines))
        """The nodes that tell of each token, in the order of the lines."""
        self._numbers: _Numbers | None = None
        self._places: list[slice] = []

    @classmethod
    def together(cls, judgements: Sequence[PendingLogprobs]) -> None:
        """Let the device find them all at once: a few kernels, and one thing to wait for."""
        some = [judgement for judgement in judgements if judgement._nodes]
        if not some:
            return
        rows = {id(j): {n: j._logits(n) for n in j._nodes} for j in some}
        found = [_log_masses([row for own in rows.values() for row in own.values()])]
        if asked := [rows[id(j)][n] for j in some for n in j._asked]:
            found.append(_picked(asked, [token for j in some for line in j._lines for token in line.tokens]))
        ends = [(rows[id(j)][line.nodes[-1]], line.stops) for j in some for line in j._lines if line.stops]
        found += [_log_mass_of(row, stops) for row, stops in ends]
        for j in some:
            if j._top:
                found += _most_probable([rows[id(j)][n] for n in j._asked], j._top)
        numbers, start = _Numbers(found), 0
        for size in (_nodes_of, _asked_of, _ends_of, _tops_of):
            for j in some:
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

    def _read_tops(self, numbers: Sequence[float], mass: Mapping[int, float]) -> list[list[TopTokens]]:
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
    return torch.cat([torch.stack(some).float().logsumexp(-1) for some in _in_blocks(rows)])


def _log_mass(row: torch.Tensor) -> torch.Tensor:
    """log Σ exp of a row (V) on the processor, in float32.

    Row by row and in the same memory, because blocks of float32 copies would not fit a cache, and pages of new memory
    cost more than the sum.
    """
    scores = _scratch.of(len(row)).copy_(row)
    most = scores.amax()
    return scores.sub_(most).exp_().sum().log_().add_(most)


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
    """What each of the rows (V) says of its token, in float32."""
    if rows[0].device.type in _ROW_BY_ROW:
        return torch.stack([row[token] for row, token in zip(rows, tokens, strict=True)]).float()
    places = torch.split(upload(tokens, rows[0].device)[:, None], _ROWS_A_KERNEL)
    found = [torch.stack(some).gather(1, at) for some, at in zip(_in_blocks(rows), places, strict=True)]
    return torch.cat(found)[:, 0].float()


def _most_probable(rows: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """The largest logits of each of the rows (V), then their places, in float32, which is exact for any vocabulary."""
    blocks = [[row] for row in rows] if rows[0].device.type in _ROW_BY_ROW else _in_blocks(rows)
    found = [torch.stack(some).topk(count, dim=-1) for some in blocks]
    values, places = (torch.cat(part).flatten().float() for part in zip(*found, strict=True))
    return [values, places]


def _log_mass_of(row: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """log Σ exp of the logits of some tokens in a row (V), in float32; (1)."""
    return row.index_select(0, upload(tokens, row.device)).float().logsumexp(0, keepdim=True)


def _in_blocks(rows: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [list(rows[n : n + _ROWS_A_KERNEL]) for n in range(0, len(rows), _ROWS_A_KERNEL)]
