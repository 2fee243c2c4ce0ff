"""Steps of fixed shape over the cache rows: what a CUDA graph can replay, and what a CPU runs as it is.

A step feeds the first rows of each block that it needs, the same number of tokens in each, rounded up generously, so
that few shapes occur. Everything it reads lies in buffers of its own. Rows that sit the step out, and the padding of
others, are inert tokens: they see slot 0 and are written into their row's spare slot.

Symbols: R rows of a part, Q tokens of each, K slots of each, T tokens of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache

from specfuse_shared.runtime.attention import ForwardInput, Kernel
from specfuse_shared.runtime.cache.blocks import CacheBlock, CacheRow
from specfuse_shared.runtime.masks import MaskPlan, additive
from specfuse_shared.runtime.transfer import upload

_MOST_TOKENS = {"cuda": 1024}
_DEFAULT_MOST_TOKENS = 256
"""Longer steps are bound by arithmetic, not by launches, and would be padded for nothing: they run unpadded. On a CUDA
device 32 answers, one of which makes a guess, still fit."""
CAPTURE_AT = 3
"""At which use a step is captured: many shapes occur once and never again."""
_QUERIES = (8, 32, 64, 128)
"""Tokens of a row in a verification: a few more cost less than another shape to capture."""
WARMED_QUERIES = _QUERIES[:3]
"""What a lone answer's verifications usually need."""


def most_tokens(device: torch.device) -> int:
    """Tokens of the longest step, padding included."""
    return _MOST_TOKENS.get(device.type, _DEFAULT_MOST_TOKENS)


@dataclass(frozen=True, slots=True)
class Shape:
    """R rows of a block, Q tokens of each."""

    block: CacheBlock
    rows: int
    queries: int

    @property
    def tokens(self) -> int:
        return self.rows * self.queries


@dataclass(slots=True)
class _Part:
    """A shape in a step: its tokens are `start` … `stop` - 1.

    `visible` (R, Q, K): the slots each token sees, `places` (R, K): the position of each; both None in a draft, where
    slots are positions and a token sees every slot up to its own.
    """

    shape: Shape
    start: int
    version: int
    row_at: torch.Tensor
    slots: torch.Tensor
    visible: torch.Tensor | None
    places: torch.Tensor
    masks: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.start + self.shape.tokens

    def first(self, row: CacheRow) -> int:
        """Number of the row's first token."""
        return self.start + row.index * self.shape.queries


class StaticStep(Cache):
    """One forward over parts of fixed shape; passes for the model's cache.

    `inputs` (3, T): ids, positions and slots to write to. `moving` (T): 1 where a draft goes on.
    """

    def __init__(self, shapes: Sequence[Shape], plan: MaskPlan, device: torch.device, dtype: torch.dtype, tree: bool):
        super().__init__(layers=[])
        self._plan = plan
        self._dtype = dtype
        self.tokens = sum(shape.tokens for shape in shapes)
        self.inputs = torch.zeros(3, self.tokens, dtype=torch.long, device=device)
        self.ids, self.positions, self._slots = self.inputs
        self.moving = torch.zeros(self.tokens, dtype=torch.long, device=device)
        self.logits: torch.Tensor | None = None
        self.replay: Callable[[], None] | None = None
        self.uses = 0
        self.capture_at = CAPTURE_AT
        self.replays = 0
        self.parts: list[_Part] = []
        start = 0
        for shape in shapes:
            self.parts.append(self._part(shape, start, tree))
            start += shape.tokens

    def _part(self, shape: Shape, start: int, tree: bool) -> _Part:
        rows, queries, capacity, device = shape.rows, shape.queries, shape.block.capacity, self.inputs.device
        return _Part(
            shape,
            start,
            shape.block.version,
            row_at=torch.arange(rows, device=device)[:, None],
            slots=self._slots[start : start + shape.tokens].view(rows, queries),
            visible=torch.zeros(rows, queries, capacity, dtype=torch.bool, device=device) if tree else None,
            places=torch.arange(capacity, device=device).repeat(rows, 1),
        )

    @property
    def is_valid(self) -> bool:
        """Whether the buffers that it was made over are still the blocks' own."""
        return all(part.version == part.shape.block.version for part in self.parts)

    def part_of(self, row: CacheRow) -> _Part:
        return next(part for part in self.parts if part.shape.block is row.block)

    def fill(self, segments: Sequence[ForwardInput]) -> torch.Tensor:
        """Take what answers feed; the numbers of the tokens whose logits they want, on the device."""
        inputs = self._inert()
        seen = [np.zeros(part.visible.shape, dtype=bool) for part in self.parts if part.visible is not None]
        places = [np.tile(np.arange(part.places.shape[1]), (len(part.places), 1)) for part in self.parts]
        for mask in seen:
            mask[:, :, 0] = True
        wanted: list[int] = []
        for segment in segments:
            part, row, count = self.part_of(segment.row), segment.row, len(segment.ids)
            first, number, at = part.first(row), self.parts.index(part), segment.slot_positions()
            inputs[:, first : first + count] = segment.ids, at[-count:], np.arange(row.used, segment.slots)
            seen[number][row.index, :count, : segment.slots] = segment.seen()
            places[number][row.index, : segment.slots] = at
            wanted += range(first + count - segment.wanted, first + count)
        self.inputs.copy_(upload(inputs, self.inputs.device))
        for part, mask, at in zip(self.parts, seen, places, strict=True):
            assert part.visible is not None
            part.visible.copy_(upload(mask, self.inputs.device))
            part.places.copy_(upload(at, self.inputs.device))
        return upload(wanted, self.inputs.device)

    def begin(self, rows: Sequence[CacheRow]) -> torch.Tensor:
        """Start drafts behind what these rows hold; the number of each one's token, on the device."""
        inputs, numbers = self._inert(), [self.part_of(row).first(row) for row in rows]
        moving = np.zeros(self.tokens, dtype=np.int64)
        for row, number in zip(rows, numbers, strict=True):
            inputs[1:, number] = row.used
            moving[number] = 1
        self.inputs.copy_(upload(inputs, self.inputs.device))
        self.moving.copy_(upload(moving, self.inputs.device))
        return upload(numbers, self.inputs.device)

    def advance(self) -> None:
        """On to the next token of every draft."""
        self.inputs[1:].add_(self.moving)

    def _inert(self) -> NDArray[np.int64]:
        inputs = np.zeros((3, self.tokens), dtype=np.int64)
        for part in self.parts:
            inputs[2, part.start : part.stop] = part.shape.block.capacity - 1
        return inputs

    def make_masks(self) -> None:
        """Additive masks (R, 1, Q, K) of every layer kind."""
        for part in self.parts:
            at = self.positions[part.start : part.stop].view(part.shape.rows, part.shape.queries)
            visible = part.places[:, None, :] <= at[:, :, None] if part.visible is None else part.visible
            for kind in self._plan.kinds:
                part.masks[kind] = additive(self._plan.restrict(kind, visible, at, part.places), self._dtype)[:, None]

    def drop_masks(self) -> None:
        """A step that is over needs them no more, and in a pool of graphs others are made in the same place."""
        for part in self.parts:
            part.masks.clear()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values (1, H, T, D) into the rows; attention reads them from there."""
        for part in self.parts:
            for cached, new in zip(part.shape.block.layers[layer_idx], (key_states, value_states), strict=True):
                fresh = new[0, :, part.start : part.stop].transpose(0, 1)
                cached[part.row_at, :, part.slots] = fresh.reshape(*part.slots.shape, *fresh.shape[1:])
        return key_states, value_states

    def attend(
        self, kernel: Kernel, module: Any, query: torch.Tensor, marker: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Attention output (1, T, H, D) of one layer."""
        kind, found = self._plan.kinds[marker.shape[-1] - 1], []
        for part in self.parts:
            keys, values = (t[: part.shape.rows] for t in part.shape.block.layers[module.layer_idx])
            own = query[0, :, part.start : part.stop]
            own = own.reshape(len(own), *part.slots.shape, own.shape[-1]).transpose(0, 1)
            found.append(kernel(module, own, keys, values, part.masks[kind], **kwargs)[0].flatten(0, 1))
        return (torch.cat(found) if len(found) > 1 else found[0])[None]


def shapes_of(wanted: Sequence[tuple[CacheRow, int]], tree: bool) -> list[Shape]:
    """Blocks that cover these rows, with room for the longest of their feeds."""
    longest = max(count for _, count in wanted)
    queries = next((n for n in _QUERIES if n >= longest), longest) if tree else 1
    return [Shape(block, rows, queries) for block, rows in wanted[0][0].pool.covering([row for row, _ in wanted])]
