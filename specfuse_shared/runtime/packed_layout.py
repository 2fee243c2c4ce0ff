"""The places of packed tokens and the slots that each sees, for the operation over pages and its kernel.

Symbols: T tokens, A answers, P pages of an answer, W slots of its tail, B runs of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

PAGE = 16
"""Slots of a page."""
WORKER_ROWS = 16
"""Queries of one head of keys that a worker takes. More win only with two heads of keys (measured on an H200)."""


def tokens_of_a_worker(groups: int) -> int:
    """How many tokens of an answer share a worker, each with `groups` heads of queries."""
    return max(1, WORKER_ROWS // groups)


class Run(NamedTuple):
    """Adjacent tokens of one answer: the first token, their number, the answer, and its slots in use."""

    first: int
    tokens: int
    answer: int
    slots: int


@dataclass(slots=True)
class Layout:
    """The places of a step's tokens, and the slots that each sees. All tensors are on the arena's device, and int32
    unless another type is given.

    Attributes:
        tokens: (T, 3): for each token its answer, the number of slots that it sees from the first on, its position.
            Padding has answer -1: its output is zero.
        answers: (A, 2): the slot at which the tail begins, and the number of slots in use.
        pages: (A, P): the pages of each answer, in order.
        tail: (T, W), uint8: which slots of its answer's tail each token sees besides.
        tail_positions: (A, W): the position of each slot of the tail. Before the tail, slots are positions.
        blocks: (B, 2): runs of tokens of one answer that share a worker: the first token, and how many; 0: none.
        longest: Maximum tokens of a worker's run.
        runs: What the host knows of it, so that plain torch need not wait for the device; None: it reads `tokens`.
    """

    tokens: torch.Tensor
    answers: torch.Tensor
    pages: torch.Tensor
    tail: torch.Tensor
    tail_positions: torch.Tensor
    blocks: torch.Tensor
    longest: int
    runs: Sequence[Run] | None = None


@dataclass(frozen=True, slots=True)
class Sight:
    """Further settings of a layer's attention: `scale` of the scores, soft `cap` of them (0: none), `window` and
    `chunk` of the positions that a token sees (0: all)."""

    scale: float
    cap: float = 0.0
    window: int = 0
    chunk: int = 0
