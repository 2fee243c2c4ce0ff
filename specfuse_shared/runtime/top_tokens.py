"""The likeliest tokens behind all that a forward fed, sent to the host together with what it gave."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from specfuse_shared.runtime.logprobs import NotFiniteError
from specfuse_shared.runtime.sampler import NOT_FINITE
from specfuse_shared.runtime.transfer import Download

_ROWS_AT_ONCE = 256
"""Logits are copied to stand in one place: no more of them than that."""


class TopTokens:
    """The first of the largest of each row of `logits` (any number of (N, V)), on its way from the device."""

    def __init__(self, logits: Sequence[torch.Tensor]) -> None:
        rows = [piece for own in logits for piece in torch.split(own, _ROWS_AT_ONCE)]
        ends, blocks = 0, []
        for piece in rows:
            ends += len(piece)
            blocks.append((ends - 1) // _ROWS_AT_ONCE)
        pairs = groupby(zip(blocks, rows, strict=True), key=lambda pair: pair[0])
        self._sent = Download(torch.cat([_largest([piece for _, piece in some]) for _, some in pairs]))
        self._ids: list[int] | None = None

    def token(self, row: int) -> int:
        """The first to ask waits for the device. Raises `NotFiniteError`."""
        if self._ids is None:
            self._ids = self._sent.read()
        if self._ids[row] == NOT_FINITE:
            raise NotFiniteError
        return self._ids[row]


def _largest(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    best = (torch.cat(list(rows)) if len(rows) > 1 else rows[0]).max(-1)
    return best.indices.masked_fill(~best.values.isfinite(), NOT_FINITE)
