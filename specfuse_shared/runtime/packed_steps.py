"""Packed steps: the tokens of all answers in one row, over pages. A step's shape is its number of tokens.

So CUDA graphs have one of a dozen sizes, and the usual ones are captured at load. Neither the length of a prompt nor
the number of answers requires another one. Only steps of more than 64 tokens have separate graphs for contexts beyond
4,096 slots.

The tail of an answer begins at the first slot that some of its new tokens do not see. A mask says what they see there.

Symbols: T tokens of a step, A answers, P pages of an answer, W slots of its tail, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache

from specfuse_shared.runtime.attention import ForwardInput, Kernel, MaskPlan
from specfuse_shared.runtime.packed_layout import PAGE, Layout, Sight, tokens_of_a_worker
from specfuse_shared.runtime.paged_attention import paged_attention, parts_for
from specfuse_shared.runtime.pages import PageArena, PagedRow
from specfuse_shared.runtime.sampler import upload
from specfuse_shared.runtime.static_runner import DraftInput, Forward, Graphs, StaticRunner, Step

SIZES = tuple(1 << n for n in range(12))
"""Possible numbers of tokens of a step: 1 to 2,048. Larger inputs take several steps."""
MOST_ANSWERS = 512
"""Maximum answers of a step. More answers take several steps."""
_FEW_LOGITS = 64
"""A large step has two forms if the model can skip logits: one computes at most this number, the other one all."""
_WARMED = 256
"""Tokens of the largest step that is captured at load."""
_TAIL = 512
"""Slots of a tail for which the buffers are made at first: several times a round's token tree."""
_MOST_PAGES = 8192
"""Maximum pages of an answer for which the buffers are made at first."""


class Buffers:
    """The inputs of steps, on the device, at fixed addresses that captured steps read.

    All steps share them: they are large enough for the largest one.
    """

    def __init__(self, device: torch.device, pages: int, tail: int = _TAIL) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        largest = SIZES[-1]
        self.inputs = zeros(3, largest, dtype=torch.long)
        self.moving = zeros(largest, dtype=torch.long)
        self.tokens = zeros(largest, 3)
        self.answers = zeros(MOST_ANSWERS, 2)
        self.pages = zeros(MOST_ANSWERS, pages)
        self.tail = zeros(largest, tail, dtype=torch.uint8)
        self.tail_positions = zeros(MOST_ANSWERS, tail)
        self.blocks = zeros(largest, 2)
        self.logit_tokens = zeros(_FEW_LOGITS, dtype=torch.long)


class PackedStep(Cache):
    """One forward pass over `size` packed tokens; acts as the model's cache. `few`: not all logits are computed."""

    def __init__(
        self, size: int, few: bool, parts: int, longest: int, buffers: Buffers, arena: PageArena, plan: MaskPlan
    ) -> None:
        super().__init__(layers=[])
        self.tokens = size
        self._arena = arena
        self._plan = plan
        self._buffers = buffers
        self.inputs = buffers.inputs[:, :size]
        self.ids, self.positions, self._slots = self.inputs
        self.moving = buffers.moving[:size]
        self.logit_tokens = buffers.logit_tokens if few else None
        self._layout = Layout(
            buffers.tokens[:size],
            buffers.answers,
            buffers.pages,
            buffers.tail[:size],
            buffers.tail_positions,
            buffers.blocks[:size],
            longest,
        )
        self._parts = parts
        self.logits: torch.Tensor | None = None
        self.replay: Callable[[], None] | None = None
        self.uses = self.replays = 0
        self.capture_at = 1

    @property
    def is_valid(self) -> bool:
        """Always: buffers and arena never move."""
        return True

    def fill(
        self, segments: Sequence[ForwardInput], prefixes: Sequence[NDArray[np.int64]], bases: Sequence[int]
    ) -> torch.Tensor:
        """Write the tokens of answers into the buffers. `prefixes`, `bases`: of each segment (`_prefixes`, `_base`).

        Returns the rows of the logits that the answers want, on the device.
        """
        inputs, tokens, blocks = self._padding()
        answers = np.zeros((len(segments), 2), dtype=np.int32)
        width = max(s.slots - base for s, base in zip(segments, bases, strict=True))
        tail = np.zeros((self.tokens, width), dtype=np.uint8)
        tail_positions = np.zeros((len(segments), width), dtype=np.int32)
        each, first, block = self._layout.longest, 0, 0
        last: list[int] = []
        for number, segment in enumerate(segments):
            row, count = segment.row, len(segment.ids)
            assert isinstance(row, PagedRow)
            at, stop = segment.slot_positions(), first + count
            inputs[:, first:stop] = segment.ids, at[-count:], row.places(row.used, segment.slots)
            base = bases[number]
            tokens[first:stop, 0], tokens[first:stop, 1], tokens[first:stop, 2] = number, prefixes[number], at[-count:]
            answers[number] = base, segment.slots
            if segment.visible is not None:
                tail[first:stop, : segment.slots - base] = segment.visible[:, base:]
                tail_positions[number, : segment.slots - base] = at[base:]
            for start in range(first, stop, each):
                blocks[block] = start, min(each, stop - start)
                block += 1
            last += range(stop - segment.logit_count, stop)
            first = stop
        self._send(inputs, tokens, blocks, answers, [s.row for s in segments])
        if width:
            device = self.inputs.device
            self._buffers.tail[: self.tokens, :width].copy_(upload(tail, device))
            self._buffers.tail_positions[: len(segments), :width].copy_(upload(tail_positions, device))
        return self._logit_rows(last)

    def begin(self, rows: Sequence[Any]) -> torch.Tensor:
        """Start a draft after the cached tokens of each row; returns each draft's index in the step, on the device."""
        inputs, tokens, blocks = self._padding()
        answers = np.zeros((len(rows), 2), dtype=np.int32)
        moving = np.zeros(self.tokens, dtype=np.int64)
        for number, row in enumerate(rows):
            inputs[1:, number] = row.used, row.place(row.used)
            tokens[number] = number, row.used + 1, row.used
            answers[number] = row.used + 1, row.used + 1
            blocks[number] = number, 1
            moving[number] = 1
        self._send(inputs, tokens, blocks, answers, rows)
        self.moving.copy_(upload(moving, self.inputs.device))
        return upload(list(range(len(rows))), self.inputs.device)

    def advance(self) -> None:
        """Advance every draft to its next token: one position and one slot further, maybe on the next page."""
        moving = self.moving
        self.positions.add_(moving)
        self._layout.tokens[:, 1:].add_(moving[:, None])
        count = min(self.tokens, MOST_ANSWERS)
        self._layout.answers[:count].add_(moving[:count, None])
        at = self.positions[:count]
        page = self._layout.pages[:count].gather(1, (at // PAGE)[:, None])[:, 0]
        places = page.long() * PAGE + at % PAGE
        self._slots[:count].copy_(torch.where(moving[:count] > 0, places, self._slots[:count]))

    def make_masks(self) -> None:
        """None are needed: `paged_attention` gets the slots that each token sees from the layout."""

    def drop_masks(self) -> None:
        """None were made."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values (1, J, T, D) into the pages; attention reads them from there."""
        for cached, new in zip(self._arena.layers[layer_idx], (key_states, value_states), strict=True):
            cached.index_copy_(0, self._slots, new[0].transpose(0, 1))
        return key_states, value_states

    def attend(
        self, kernel: Kernel, module: Any, query: torch.Tensor, marker: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Attention output (1, T, H, D) of one layer."""
        kind = self._plan.kinds[marker.shape[-1] - 1]
        keys, values = self._arena.layers[module.layer_idx]
        scale = kwargs.get("scaling")
        sight = Sight(
            query.shape[-1] ** -0.5 if scale is None else float(scale),
            float(kwargs.get("softcap") or 0.0),
            self._plan.window or 0 if kind == "sliding_attention" else 0,
            self._plan.chunk or 0 if kind == "chunked_attention" else 0,
        )
        packed = query[0].transpose(0, 1)
        return paged_attention(packed, keys, values, self._layout, sight, kwargs.get("s_aux"), self._parts)[None]

    def _padding(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
        """Inputs, tokens and blocks with nothing but padding, which writes to page 0 and sees nothing."""
        tokens = np.zeros((self.tokens, 3), dtype=np.int32)
        tokens[:, 0] = -1
        return np.zeros((3, self.tokens), dtype=np.int64), tokens, np.zeros((self.tokens, 2), dtype=np.int32)

    def _send(
        self,
        inputs: NDArray[np.int64],
        tokens: NDArray[np.int32],
        blocks: NDArray[np.int32],
        answers: NDArray[np.int32],
        rows: Sequence[Any],
    ) -> None:
        device, width = self.inputs.device, max(len(row.pages) for row in rows)
        pages = np.zeros((len(rows), width), dtype=np.int32)
        for number, row in enumerate(rows):
            pages[number, : len(row.pages)] = row.pages
        self.inputs.copy_(upload(inputs, device))
        self._layout.tokens.copy_(upload(tokens, device))
        self._layout.blocks.copy_(upload(blocks, device))
        self._layout.answers[: len(rows)].copy_(upload(answers, device))
        self._layout.pages[: len(rows), :width].copy_(upload(pages, device))

    def _logit_rows(self, last: Sequence[int]) -> torch.Tensor:
        """The rows in which the logits of tokens `last` will be: their own, or the first ones if few are computed."""
        if self.logit_tokens is None:
            return upload(last, self.inputs.device)
        padded = [*last, *[0] * (_FEW_LOGITS - len(last))]
        self.logit_tokens.copy_(upload(padded, self.inputs.device))
        return upload(list(range(len(last))), self.inputs.device)


def _prefixes(segment: ForwardInput) -> NDArray[np.int64]:
    """How many slots each token of a segment sees from the first on without a gap."""
    visible = segment.visible
    if visible is None:
        return np.arange(segment.row.used + 1, segment.slots + 1)
    return np.asarray(np.where(visible.all(axis=1), visible.shape[1], visible.argmin(axis=1)))


def _base(segment: ForwardInput, prefixes: NDArray[np.int64]) -> int:
    """The first slot of the tail of a segment's answer. Every token sees all slots before it."""
    return segment.slots if segment.visible is None else int(prefixes.min())


def grouped(segments: Sequence[ForwardInput]) -> list[list[int]]:
    """The numbers of the segments of each step, within the limits of tokens and answers.

    A segment that is larger than a step is alone in its group.
    """
    groups: list[list[int]] = [[]]
    tokens = 0
    for number, segment in enumerate(segments):
        if groups[-1] and (tokens + len(segment.ids) > SIZES[-1] or len(groups[-1]) == MOST_ANSWERS):
            groups.append([])
            tokens = 0
        groups[-1].append(number)
        tokens += len(segment.ids)
    return groups


def pieces_of(segment: ForwardInput) -> Iterator[ForwardInput]:
    """A segment in pieces that fit a step, in order. Before each piece, the row's `used` counts the previous ones."""
    row, count, most = segment.row, len(segment.ids), SIZES[-1]
    start = row.used
    if count <= most:
        yield segment
        return
    for first in range(0, count, most):
        stop = min(first + most, count)
        row.used, slots = start + first, start + stop
        yield ForwardInput(
            row,
            segment.ids[first:stop],
            None if segment.visible is None else segment.visible[first:stop, :slots],
            None if segment.positions is None else segment.positions[:slots],
            max(0, stop - max(first, count - segment.logit_count)),
        )


def size_of(tokens: int) -> int:
    """Size of the smallest step that holds a number of tokens."""
    return next(size for size in SIZES if size >= tokens)


class PackedRunner(StaticRunner):
    """Runs the packed steps of one model over `arena`.

    Args:
        groups: Query heads per key head.
        most_pages: Pages of the longest answer, if known. A longer one causes larger buffers and new captures.
    """

    def __init__(
        self,
        forward: Forward,
        plan: MaskPlan,
        device: torch.device,
        dtype: torch.dtype,
        graphs: Graphs,
        arena: PageArena,
        groups: int,
        can_skip_logits: bool,
        most_pages: int,
    ) -> None:
        super().__init__(forward, plan, device, dtype, graphs)
        self._most = SIZES[-1]
        self._arena = arena
        self._run_length = tokens_of_a_worker(groups)
        self._can_skip_logits = can_skip_logits
        self._buffers = Buffers(device, min(most_pages, arena.pages, _MOST_PAGES))

    def fits(self, segments: Sequence[ForwardInput]) -> bool:
        """Always: packed steps take every segment, prompts included."""
        return True

    def step(self, segments: Sequence[ForwardInput]) -> list[torch.Tensor]:
        """Feed every segment, several in a step; logits (last tokens, V) of each."""
        outputs: list[torch.Tensor] = []
        for numbers in grouped(segments):
            group = [segments[n] for n in numbers]
            if len(group) > 1:
                outputs += self._fed(group)
                continue
            [segment], used = group, group[0].row.used
            try:
                outputs.append(torch.cat([self._fed([piece])[0] for piece in pieces_of(segment)]))
            finally:
                segment.row.used = used
        return outputs

    def _fed(self, group: Sequence[ForwardInput]) -> Sequence[torch.Tensor]:
        """Logits of the segments of one step."""
        prefixes = [_prefixes(segment) for segment in group]
        bases = [_base(segment, own) for segment, own in zip(group, prefixes, strict=True)]
        width = max(s.slots - base for s, base in zip(group, bases, strict=True))
        step = self._packed([(s.row, len(s.ids)) for s in group], sum(s.logit_count for s in group), width)
        logit_rows = step.fill(group, prefixes, bases)
        return torch.split(self._run(step).index_select(0, logit_rows), [s.logit_count for s in group])

    def warm_up(self, row: Any) -> None:
        """Capture the steps of every usual size, both with all logits and with few of them."""
        for size in SIZES:
            if size > _WARMED:
                return
            for logits_needed in {size, min(size, _FEW_LOGITS)}:
                step = self._packed([(row, size)], logits_needed)
                step.begin([row])
                step.uses = step.capture_at
                self._run(step)

    def _chosen(self, drafts: Sequence[DraftInput], count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        parts = [drafts[first : first + MOST_ANSWERS] for first in range(0, len(drafts), MOST_ANSWERS)]
        each = [super(PackedRunner, self)._chosen(part, count) for part in parts]
        if len(each) == 1:
            return each[0]
        chosen, logits_after = (zip(*lists, strict=True) for lists in zip(*each, strict=True))
        return [torch.cat(tensors) for tensors in chosen], [torch.cat(tensors) for tensors in logits_after]

    def _step(self, requests: Sequence[tuple[Any, int]], tree: bool) -> Step:
        return self._packed(requests, sum(count for _, count in requests))

    def _packed(self, requests: Sequence[tuple[Any, int]], logits_needed: int, width: int = 0) -> PackedStep:
        """The step for rows and numbers of their tokens. `width`: slots of the longest tail."""
        size = size_of(sum(count for _, count in requests))
        few = self._can_skip_logits and size > _FEW_LOGITS >= logits_needed
        parts = parts_for(size, max(row.capacity for row, _ in requests))
        self._widen(max(len(row.pages) for row, _ in requests), width)
        key = (size, few, parts)
        step = self._steps.get(key)
        if not isinstance(step, PackedStep):
            step = PackedStep(size, few, parts, self._run_length, self._buffers, self._arena, self._plan)
            self._steps[key] = step
        step.uses += 1
        return step

    def _widen(self, pages: int, tail: int) -> None:
        """Make larger buffers if answers outgrow them, and drop the steps that were captured over the old buffers."""
        held_pages, held_tail = self._buffers.pages.shape[1], self._buffers.tail.shape[1]
        if pages <= held_pages and tail <= held_tail:
            return
        self.drop()
        grown = [1 << (max(n, held) - 1).bit_length() for n, held in ((pages, held_pages), (tail, held_tail))]
        self._buffers = Buffers(self._device, *grown)
