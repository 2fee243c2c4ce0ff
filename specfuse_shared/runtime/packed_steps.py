"""Packed steps: the new tokens of all answers in one sequence, over pages. A step's shape is its number of tokens.

So CUDA graphs have one of 14 sizes, and the usual ones are captured at load. Neither the length of a prompt nor
the number of answers requires another one. Only steps of more than 64 tokens have separate graphs for contexts beyond
4,096 slots.

A verification is one step. A draft takes one step per token, except that its first token comes from logits of an
earlier forward pass. Each chosen token goes into the next step on the device, so that the host waits once, for all
tokens of all answers. Tokens after EOS are computed, then discarded. If all drafts are greedy, the choice is part of
the graph (`GreedyDraft`).

The tail of an answer begins at the first slot that some of its new tokens do not see. A mask says what they see there.

Symbols: T tokens of a step, B drafts, H query and J key heads of size D, N ids, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache

from specfuse_shared.runtime.attention import ForwardInput, Kernel, MaskPlan, running
from specfuse_shared.runtime.cuda_graphs import Graphs
from specfuse_shared.runtime.packed_layout import PAGE, Layout, Run, Sight, tokens_of_a_worker
from specfuse_shared.runtime.paged_attention import paged_attention, parts_for
from specfuse_shared.runtime.pages import PageArena, PagedRow
from specfuse_shared.runtime.sampler import NOT_FINITE, BatchSampling, Download, NotFiniteError, Sampler, upload

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1280, 1536, 2048)
"""Possible numbers of tokens of a step. Larger inputs take several steps."""
MOST_ANSWERS = 512
"""Maximum answers of a step. More answers take several steps."""
_LOGIT_COUNTS = (64, 256, 1024)
"""A larger step computes the first of these counts of logits that suffices, or all if the model cannot."""
_WARMED = 256
"""Tokens of the largest step that is captured at load."""
_TAIL = 512
"""Slots of a tail for which the buffers are made at first: several times a round's token tree."""
_MOST_PAGES = 8192
"""Maximum pages of an answer for which the buffers are made at first."""
_GREEDY_TOKENS = ((8, 4), (32, 1))
"""Tokens that each draft chooses in one graph, for steps of up to 8 and 32 drafts: for small steps, launching costs
more than computing. More drafts choose outside the graph."""
_GRAPH_BYTES = 8 << 20
_USUAL_STEPS = 24
_ACTIVATIONS = 32
"""Activations of one token that are alive at once, in multiples of the hidden size; rather too many."""
_RESERVED_TOKENS = 1024
"""Tokens of a step for which memory is reserved: a piece of a prompt, or verifications of some answers at once."""
_LATER = 4
"""After a capture failed, or after steps were dropped, a step waits for this many times more uses."""
_FIRST_CHECK, _NEXT_CHECK = 64, 8
"""A replay is compared with a run at the 64th replay of its step, and then each time the count has grown eightfold."""

Forward = Callable[..., torch.Tensor]
"""(ids (T), cache, positions (T), masks) → logits (T, V)."""


@dataclass(frozen=True, slots=True)
class DraftInput:
    """A draft of `count` tokens after the contents of `row`. `logits` (V) are those for the first one.

    `history`: the ids before the draft, if the sampler asks for them. `blocked` (N): ids that it must not choose.
    """

    row: PagedRow
    logits: torch.Tensor
    history: Sequence[int]
    sampler: Sampler
    blocked: torch.Tensor | None
    count: int


class DraftRun:
    """Tokens of B drafts (`chosen`: (B) for each step) and logits after all but the last (B, V), on the device."""

    def __init__(self, chosen: Sequence[torch.Tensor], logits_after: Sequence[torch.Tensor]) -> None:
        self._logits_after = logits_after
        self._sent = Download(torch.stack(list(chosen)))
        self._rows: list[list[int]] | None = None

    def tokens(self, column: int, count: int, stop_ids: Sequence[int]) -> tuple[list[int], bool]:
        """The first `count` tokens of a draft, up to the end of its turn, and whether the turn ended.

        The first call waits for the device. Raises `NotFiniteError` if logits before the end were not finite.
        """
        if self._rows is None:
            self._rows = self._sent.read()
        ids: list[int] = []
        for row in self._rows[:count]:
            if row[column] == NOT_FINITE:
                raise NotFiniteError
            if row[column] in stop_ids:
                return ids, True
            ids.append(row[column])
        return ids, False

    def logits(self, column: int, place: int) -> torch.Tensor:
        """Logits (V) after the token at position `place` of a draft."""
        return self._logits_after[place][column]


class Buffers:
    """The inputs of steps, on the device, at fixed addresses that captured steps read.

    All steps share them: they are large enough for the largest one. `drafts` (3, 32): each greedy draft's next
    token, the slot of that token, and the number of tokens that it still has to feed.
    """

    @torch.inference_mode()  # always: torch.compile would recompile for others
    def __init__(self, device: torch.device, pages: int, tail: int = _TAIL) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        largest = SIZES[-1]
        self.inputs = zeros(3, largest, dtype=torch.long)
        self.tokens = zeros(largest, 3)
        self.answers = zeros(MOST_ANSWERS, 2)
        self.pages = zeros(MOST_ANSWERS, pages)
        self.tail = zeros(largest, tail, dtype=torch.uint8)
        self.tail_positions = zeros(MOST_ANSWERS, tail)
        self.blocks = zeros(largest, 2)
        self.logit_tokens = zeros(_LOGIT_COUNTS[-1], dtype=torch.long)
        self.drafts = zeros(3, _GREEDY_TOKENS[-1][0], dtype=torch.long)
        self.drafts_after = torch.zeros_like(self.drafts)


class Step:
    """A forward pass, or several, that can be captured."""

    ids: torch.Tensor
    logits: torch.Tensor | None = None
    replay: Callable[[], None] | None = None
    uses = 0
    replays = 0
    capture_at = 1

    @property
    def compared(self) -> torch.Tensor:
        """The logits that a replay must have in common with a run."""
        assert self.logits is not None
        return self.logits

    def feed(self, runner: PackedRunner) -> None:
        """Run the step kernel by kernel, from its buffers to its logits."""
        raise NotImplementedError


S = TypeVar("S", bound=Step)


class PackedStep(Step, Cache):
    """One forward pass over `size` packed tokens; acts as the model's cache. `logit_count`: logits that it computes."""

    is_packed = True

    def __init__(
        self, size: int, logit_count: int, parts: int, longest: int, buffers: Buffers, arena: PageArena, plan: MaskPlan
    ) -> None:
        Cache.__init__(self, layers=[])
        self.tokens = size
        self._arena = arena
        self._plan = plan
        self._buffers = buffers
        self.inputs = buffers.inputs[:, :size]
        self.ids, self.positions, self._slots = self.inputs
        self.logit_tokens = buffers.logit_tokens[:logit_count] if logit_count < size else None
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

    def feed(self, runner: PackedRunner) -> None:
        logits = runner.call(self)
        if self.logits is None:
            self.logits = runner.output(len(logits), logits)
        self.logits.copy_(logits)

    def fill(
        self,
        segments: Sequence[ForwardInput],
        prefixes: Sequence[NDArray[np.int64]],
        bases: Sequence[int],
        is_eager: bool,
    ) -> torch.Tensor:
        """Write the tokens of answers into the buffers. `prefixes`, `bases`: of each segment (`_prefixes`, `_base`).

        `is_eager`: the step will not be captured. Returns the rows of the logits that the answers want, on the device.
        """
        inputs, tokens, blocks = self._padding()
        answers = np.zeros((len(segments), 2), dtype=np.int32)
        width = max(s.slots - base for s, base in zip(segments, bases, strict=True))
        tail = np.zeros((self.tokens, width), dtype=np.uint8)
        tail_positions = np.zeros((len(segments), width), dtype=np.int32)
        each, first, block = self._layout.longest, 0, 0
        last: list[int] = []
        runs: list[Run] = []
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
            runs.append(Run(first, count, number, segment.slots))
            first = stop
        self._layout.runs = runs if is_eager else None
        self._send(inputs, tokens, blocks, answers, [s.row for s in segments])
        if width:
            device = self.inputs.device
            self._buffers.tail[: self.tokens, :width].copy_(upload(tail, device))
            self._buffers.tail_positions[: len(segments), :width].copy_(upload(tail_positions, device))
        return self._logit_rows(last)

    def begin(self, rows: Sequence[PagedRow], is_eager: bool) -> None:
        """Start drafts after the cached tokens of each row, one token a step; `advance` comes before each step.

        `is_eager`: the step will not be captured.
        """
        inputs, tokens, blocks = self._padding()
        answers = np.zeros((len(rows), 2), dtype=np.int32)
        tokens[: len(rows), 0] = blocks[: len(rows), 0] = np.arange(len(rows))
        blocks[: len(rows), 1] = 1
        self._layout.runs = [Run(n, 1, n, row.used) for n, row in enumerate(rows)] if is_eager else None
        self._send(inputs, tokens, blocks, answers, rows)

    def advance(self, slots: torch.Tensor, active: torch.Tensor) -> None:
        """Place the next token of each draft in slot `slots` (T) of its answer, but on page 0 unless it is `active`."""
        layout = self._layout
        page = layout.pages[: self.tokens].gather(1, (slots // PAGE)[:, None])[:, 0]
        self.positions.copy_(slots)
        self._slots.copy_(torch.where(active, page.long() * PAGE + slots % PAGE, slots % PAGE))
        layout.tokens[:, 1:].copy_(torch.stack([slots + 1, slots], dim=1))
        layout.answers[: self.tokens].copy_((slots + 1)[:, None].expand(-1, 2))
        if layout.runs is not None:
            limit = layout.pages.shape[1] * PAGE
            layout.runs = [run._replace(slots=min(run.slots + 1, limit)) for run in layout.runs]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values (1, J, T, D) into the pages; attention reads them from there."""
        for cached, new in zip(self._arena.layers[layer_idx], (key_states, value_states), strict=True):
            cached.index_copy_(0, self._slots, new[0].transpose(0, 1))
        return key_states, value_states

    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
        """The rows of the logits of tokens `last`: their own, or the first ones if only these are computed."""
        if self.logit_tokens is None:
            return upload(last, self.inputs.device)
        padded = [*last, *[0] * (len(self.logit_tokens) - len(last))]
        self.logit_tokens.copy_(upload(padded, self.inputs.device))
        return upload(list(range(len(last))), self.inputs.device)


class GreedyDraft(Step):
    """Several steps of greedy drafts as one captured step: forward pass, choice and the next step's inputs.

    Reads `Buffers.drafts` and writes `Buffers.drafts_after`, so that it may run any number of times.

    Args:
        step: One forward pass.
        tokens: Tokens that each draft feeds and chooses.
        blocked_mask: (V): the ids that no draft may choose.
    """

    def __init__(self, step: PackedStep, tokens: int, buffers: Buffers, blocked_mask: torch.Tensor) -> None:
        self._step = step
        self.tokens = tokens
        self._blocked_mask = blocked_mask
        self._drafts = buffers.drafts[:, : step.tokens]
        self._drafts_after = buffers.drafts_after[:, : step.tokens]
        self.ids = self._drafts[0]
        self.chosen = torch.zeros(tokens, step.tokens, dtype=torch.long, device=blocked_mask.device)

    @property
    def compared(self) -> torch.Tensor:
        """Logits of the first forward pass: later ones may have other tokens after rounding."""
        return super().compared[: self._step.tokens]

    def begin(self, rows: Sequence[PagedRow], ids: torch.Tensor, counts: Sequence[int], is_eager: bool) -> None:
        """Start drafts of `counts` tokens, whose first ones are given (`ids`)."""
        self._step.begin(rows, is_eager)
        drafts = np.zeros(self._drafts.shape, dtype=np.int64)
        drafts[1, : len(rows)] = [row.used for row in rows]
        drafts[2, : len(rows)] = [count - 1 for count in counts]
        self._drafts.copy_(upload(drafts, self._drafts.device))
        self.ids[: len(rows)].copy_(ids.clamp(min=0))

    def go_on(self) -> None:
        """Let the next run begin where the last one ended."""
        self._drafts.copy_(self._drafts_after)

    def feed(self, runner: PackedRunner) -> None:
        ids, slots, remaining = self._drafts
        for number in range(self.tokens):
            self._step.ids.copy_(ids)
            self._step.advance(slots, remaining > 0)
            logits = runner.call(self._step)
            if self.logits is None:
                self.logits = runner.output(self.tokens * len(logits), logits)
            self.logits.view(self.tokens, len(logits), -1)[number].copy_(logits)
            best = logits.masked_fill(self._blocked_mask, float("-inf")).max(-1)
            chosen = best.indices.masked_fill(~best.values.isfinite(), NOT_FINITE)
            self.chosen[number].copy_(chosen)
            ids, slots, remaining = chosen.clamp(min=0), slots + (remaining > 0), remaining - 1
        self._drafts_after.copy_(torch.stack([ids, slots, remaining]))


def _prefixes(segment: ForwardInput) -> NDArray[np.int64]:
    """For each token of a segment: how many slots it sees before its first gap."""
    visible = segment.visible
    if visible is None:
        return np.arange(segment.row.used + 1, segment.slots + 1)
    return np.asarray(np.where(visible.all(axis=1), visible.shape[1], visible.argmin(axis=1)))


def _base(segment: ForwardInput, prefixes: NDArray[np.int64]) -> int:
    """The first slot of the tail of a segment's answer. Every token sees all slots before it."""
    return segment.slots if segment.visible is None else int(prefixes.min())


def grouped(segments: Sequence[ForwardInput]) -> list[list[int]]:
    """The indices of the segments of each step, within the limits of tokens and answers.

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
    row, count, limit = segment.row, len(segment.ids), SIZES[-1]
    start = row.used
    if count <= limit:
        yield segment
        return
    for first in range(0, count, limit):
        stop = min(first + limit, count)
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


class PackedRunner:
    """Runs the packed steps of one model over `arena`.

    Args:
        forward: Calls the model.
        graphs: Captures steps, where possible.
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
        self._forward = forward
        self._plan = plan
        self._device = device
        self._dtype = dtype
        self.graphs = graphs
        self._markers = plan.markers(device, dtype)
        self._steps: dict[tuple[int, ...], Step] = {}
        self._logits: dict[int, torch.Tensor] = {}
        self._blocked_mask: torch.Tensor | None = None
        self._capture_at = 1
        """Number of uses after which a step is captured; `drop` raises it, because memory ran out."""
        self._arena = arena
        self._run_length = tokens_of_a_worker(groups)
        self._can_skip_logits = can_skip_logits
        self._buffers = Buffers(device, min(most_pages, arena.pages, _MOST_PAGES))
        self.replayed = self.ran = 0
        """Numbers of steps that were replayed, and that ran eagerly; a `GreedyDraft` of four passes counts once."""

    # ── prompts and token trees ──────────────────────────────────────────────────────────────────

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
        bases = [_base(segment, prefix) for segment, prefix in zip(group, prefixes, strict=True)]
        width = max(s.slots - base for s, base in zip(group, bases, strict=True))
        tokens = sum(len(s.ids) for s in group)
        step = self._packed([s.row for s in group], tokens, sum(s.logit_count for s in group), width)
        logit_rows = step.fill(group, prefixes, bases, self._is_eager)
        return torch.split(self._run(step).index_select(0, logit_rows), [s.logit_count for s in group])

    # ── drafts ───────────────────────────────────────────────────────────────────────────────────

    def draft(self, drafts: Sequence[DraftInput]) -> DraftRun:
        """Choose and feed the tokens of many drafts, up to the longest `count`, without waiting for the device.

        `row.used` then counts all tokens of a draft but the last, also those after the end of its turn. The caller
        corrects it once it has read the tokens.
        """
        parts = [drafts[first : first + MOST_ANSWERS] for first in range(0, len(drafts), MOST_ANSWERS)]
        count = max(draft.count for draft in drafts)
        each = [self._chosen(part, count) for part in parts]
        for draft in drafts:
            draft.row.used += draft.count - 1
        chosen, logits_after = (zip(*lists, strict=True) for lists in zip(*each, strict=True))
        return DraftRun([_joined(tensors) for tensors in chosen], [_joined(tensors) for tensors in logits_after])

    def _chosen(self, drafts: Sequence[DraftInput], count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """`count` tokens of every draft, a tensor (B) each, and the logits (B, V) after all but the last."""
        logits = torch.stack([draft.logits for draft in drafts])
        choose = BatchSampling([d.sampler for d in drafts], [d.blocked for d in drafts], [d.history for d in drafts])
        first = choose(logits, 0)
        if count == 1:
            return [first], []
        for draft in drafts:
            draft.row.reserve(draft.row.used + draft.count)
        if _are_greedy(drafts) and len(drafts) <= _GREEDY_TOKENS[-1][0]:
            self._block(drafts[0].blocked, logits.shape[-1])
            return self._greedy(drafts, first, count)
        return self._sampled(drafts, choose, first, count)

    def _sampled(
        self, drafts: Sequence[DraftInput], choose: BatchSampling, first: torch.Tensor, count: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """`_chosen` with a choice outside the graph."""
        rows, size = [draft.row for draft in drafts], len(drafts)
        step = self._packed(rows, size, size)
        step.begin(rows, self._is_eager)
        places = np.zeros((2, step.tokens), dtype=np.int64)
        places[:, :size] = [row.used for row in rows], [draft.count - 1 for draft in drafts]
        slots, remaining = upload(places, self._device)
        chosen, logits_after = [first], list[torch.Tensor]()
        for offset in range(1, count):
            step.ids[:size].copy_(chosen[-1].clamp(min=0))
            step.advance(slots, remaining > 0)
            logits_after.append(self._run(step)[:size].clone())
            chosen.append(choose(logits_after[-1], offset))
            slots, remaining = slots + (remaining > 0), remaining - 1
        return chosen, logits_after

    def _greedy(
        self, drafts: Sequence[DraftInput], first: torch.Tensor, count: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """`_chosen` with the choice in the graph, several tokens at a time."""
        rows, size = [draft.row for draft in drafts], len(drafts)
        chosen, logits_after = [first], list[torch.Tensor]()
        begun: GreedyDraft | None = None
        assert self._blocked_mask is not None
        while (remaining := count - len(chosen)) > 0:
            draft = self._greedy_step(rows, remaining)
            if begun is None:
                draft.begin(rows, first, [d.count for d in drafts], self._is_eager)
            else:
                begun.go_on()
            logits = self._run(draft).view(draft.tokens, -1, len(self._blocked_mask))
            logits_after += logits[:, :size].clone()
            chosen += draft.chosen[:, :size].clone()
            begun = draft
        return chosen, logits_after

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def call(self, step: PackedStep) -> torch.Tensor:
        """Logits (T, V) of a forward pass over a step's inputs."""
        keep = {} if step.logit_tokens is None else {"logits_to_keep": step.logit_tokens}
        with running(step):
            return self._forward(step.ids, step, step.positions, self._markers, **keep)

    def output(self, tokens: int, like: torch.Tensor) -> torch.Tensor:
        """A buffer for logits (T, V), which steps of about the same size share."""
        size = max(_WARMED, size_of(tokens))
        if size not in self._logits:
            self._logits[size] = like.new_empty(size, like.shape[-1])
        return self._logits[size][:tokens]

    @property
    def _is_eager(self) -> bool:
        return self.graphs.reason is not None

    def _run(self, step: Step) -> torch.Tensor:
        """Logits (T, V), valid until the next step runs."""
        if step.replay is not None and not self._is_eager:
            self._replay(step, step.replay)
        else:
            step.feed(self)
            self.ran += 1
        if step.replay is None and step.uses >= step.capture_at:
            self._capture(step)
        assert step.logits is not None
        return step.logits

    def _replay(self, step: Step, replay: Callable[[], None]) -> None:
        replay()
        self.replayed += 1
        step.replays += 1
        if _is_checked(step.replays):
            self.graphs.holds(lambda: step.feed(self), step.compared)

    def _capture(self, step: Step) -> None:
        step.replay = self.graphs.capture(lambda: step.feed(self), step.compared, step.ids)
        if step.replay is None:  # memory may have been short: try again later
            step.capture_at = _LATER * step.uses

    def _packed(self, rows: Sequence[PagedRow], tokens: int, logits_needed: int, width: int = 0) -> PackedStep:
        """The step for a number of tokens of these rows. `width`: slots of the longest tail."""
        size = size_of(tokens)
        counts = [count for count in _LOGIT_COUNTS if logits_needed <= count < size] if self._can_skip_logits else []
        logit_count = counts[0] if counts else size
        parts = parts_for(size, max(row.capacity for row in rows))
        self._widen(max(len(row.pages) for row in rows), width)
        return self._used(
            (size, logit_count, parts),
            lambda: PackedStep(size, logit_count, parts, self._run_length, self._buffers, self._arena, self._plan),
        )

    def _greedy_step(self, rows: Sequence[PagedRow], remaining: int) -> GreedyDraft:
        """The step for greedy drafts of these rows that have at most `remaining` tokens to choose."""
        one = self._packed(rows, len(rows), len(rows))
        size = one.tokens
        tokens = next(tokens for limit, tokens in _GREEDY_TOKENS if size <= limit)
        tokens = tokens if remaining >= tokens else 1
        assert self._blocked_mask is not None
        mask = self._blocked_mask
        return self._used((size, tokens), lambda: GreedyDraft(one, tokens, self._buffers, mask))

    def _used(self, key: tuple[int, ...], make: Callable[[], S]) -> S:
        """The step with this key, made if there is none. Counts the use."""
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = make()
            step.capture_at = self._capture_at
        step.uses += 1
        return cast("S", step)

    def _block(self, blocked: torch.Tensor | None, vocabulary: int) -> None:
        """Let greedy drafts choose none of the ids `blocked`."""
        if self._blocked_mask is None:
            self._blocked_mask = torch.zeros(vocabulary, dtype=torch.bool, device=self._device)
        self._blocked_mask.zero_()
        if blocked is not None:
            self._blocked_mask.index_fill_(0, blocked, True)

    def _widen(self, pages: int, tail: int) -> None:
        """Make larger buffers if answers outgrow them, and drop the steps that were captured over the old buffers."""
        held_pages, held_tail = self._buffers.pages.shape[1], self._buffers.tail.shape[1]
        if pages <= held_pages and tail <= held_tail:
            return
        self._clear()
        grown = [1 << (max(n, held) - 1).bit_length() for n, held in ((pages, held_pages), (tail, held_tail))]
        self._buffers = Buffers(self._device, *grown)

    def warm_up(self, row: PagedRow) -> None:
        """Capture the steps of every usual size, both with all logits and with few of them, and the greedy drafts."""
        for size in (size for size in SIZES if size <= _WARMED):
            for logits_needed in {size, min(size, _LOGIT_COUNTS[0])}:
                step = self._packed([row], size, logits_needed)
                step.begin([row], self._is_eager)
                step.uses = step.capture_at
                vocabulary = self._run(step).shape[-1]
        self._block(None, vocabulary)
        for size in (size for size in SIZES if size <= min(MOST_ANSWERS, _GREEDY_TOKENS[-1][0])):
            for remaining in (_GREEDY_TOKENS[0][1], 1):
                draft = self._greedy_step([row] * size, remaining)
                draft.begin([row], draft.ids[:1], [1], self._is_eager)
                draft.uses = draft.capture_at
                self._run(draft)

    def reserve_bytes(self, width: int, vocabulary: int) -> int:
        """Bytes that captured steps may take, for a model of hidden size `width`; an estimate for steps of up to 1,024
        tokens: their logits and activations, and the graphs.
        """
        if self._is_eager:
            return 0
        size = torch.empty((), dtype=self._dtype).element_size()
        return _RESERVED_TOKENS * (vocabulary + _ACTIVATIONS * width) * size + _USUAL_STEPS * _GRAPH_BYTES

    def drop(self) -> bool:
        """Free the memory of all steps, none of which may still run. Returns whether any was captured.

        Steps are captured again at a later use, so that they do not take the memory back at once.
        """
        self._capture_at *= _LATER
        return self._clear()

    def _clear(self) -> bool:
        had = self.graphs.count > 0
        self._steps.clear()
        self._logits.clear()
        self.graphs.drop()
        return had


def _are_greedy(drafts: Sequence[DraftInput]) -> bool:
    """Whether all drafts are greedy and block the same ids."""
    blocked = {id(draft.blocked) for draft in drafts}
    return len(blocked) == 1 and all(draft.sampler.is_plain for draft in drafts)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _is_checked(replays: int) -> bool:
    at = _FIRST_CHECK
    while at < replays:
        at *= _NEXT_CHECK
    return at == replays
