"""Where packed tokens lie and what each sees, for the operation over pages and its kernel.

Symbols: T tokens, A answers, P pages of an answer, W slots of its tail, B runs of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAGE = 16
"""Slots of a page."""


@dataclass(slots=True)
class Layout:
    """Where the tokens of a step lie, and what each sees. All tensors are on the arena's device; int32 unless said.

    Attributes:
        tokens: (T, 3): for each token its answer, the number of slots that it sees from the first on, its position.
            Padding has answer -1: its output is zero.
        answers: (A, 2): the slot at which the tail begins, and the number of slots in use.
        pages: (A, P): the pages of each answer, in order.
        tail: (T, W), uint8: which slots of its answer's tail each token sees besides.
        tail_positions: (A, W): the position of each slot of the tail. Before the tail, slots are positions.
        blocks: (B, 2): runs of tokens of one answer that share a worker: the first token, and how many; 0: none.
    """

    tokens: torch.Tensor
    answers: torch.Tensor
    pages: torch.Tensor
    tail: torch.Tensor
    tail_positions: torch.Tensor
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class Sight:
    """What a layer does besides: `scale` of the scores, soft `cap` of them (0: none), `window` and `chunk` of the
    positions that a token sees (0: all)."""

    scale: float
    cap: float = 0.0
    window: int = 0
    chunk: int = 0
