"""Static execution: verifications and drafts as steps of fixed shape, which CUDA graphs replay.

A verification is one step. A draft is many, and what is chosen after one is copied into the next on the device: the
host waits once, for all tokens of all answers. Tokens behind an end of turn are computed and dropped there.

Symbols: B answers, T tokens of a step, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specfuse_shared.runtime.attention import ForwardInput, running
from specfuse_shared.runtime.cache.blocks import CacheRow
from specfuse_shared.runtime.logprobs import NotFiniteError
from specfuse_shared.runtime.masks import MaskPlan
from specfuse_shared.runtime.sampler import NOT_FINITE, BatchSampling, Sampler
from specfuse_shared.runtime.static.batch import WARMED_QUERIES, StaticStep, most_tokens, shapes_of
from specfuse_shared.runtime.static.cuda_graphs import Graphs
from specfuse_shared.runtime.transfer import Download

_MOST_STEPS, _MOST_GRAPHS = 128, 64
_USUAL_TOKENS = 256
_USUAL_STEPS = 24
_GRAPH_BYTES = 8 << 20
_MASKED_SLOTS = 4096
_FIRST_CHECK, _NEXT_CHECK = 64, 8
"""A replay is held against a run when it is the 64th of its step, and then each time there were eight times as many."""
_ACTIVATIONS = 64
"""Numbers of a token that are there at once, in hidden sizes: inner layers are four times as wide, heads as wide."""

Forward = Callable[..., torch.Tensor]
"""(ids (T), cache, positions (T), masks) → logits (T, V)."""


@dataclass(frozen=True, slots=True)
class DraftInput:
    """`count` tokens to choose and feed behind what `row` holds, whose last logits (V) are given.

    `history`: the ids before the draft, if the sampler asks for them; `blocked` (N): ids that it must not choose.
    """

    row: CacheRow
    logits: torch.Tensor
    history: Sequence[int]
    sampler: Sampler
    blocked: torch.Tensor | None
    count: int


class DraftRun:
    """Tokens of many drafts (those `chosen` at a time: B) and the logits `behind` them (B, V), on the device."""

    def __init__(self, chosen: Sequence[torch.Tensor], behind: Sequence[torch.Tensor]) -> None:
        self._behind = behind
        self._sent = Download(torch.stack(list(chosen)))
        self._rows: list[list[int]] | None = None

    def tokens(self, column: int, count: int, stop_ids: Sequence[int]) -> tuple[list[int], bool]:
        """The first `count` tokens of a draft up to the end of its turn, and whether that came.

        The first to ask waits for the device. Raises `NotFiniteError` if a token before the end is none.
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
        """Logits (V) behind the token in one place of a draft."""
        return self._behind[place][column]


class StaticRunner:
    """Runs the steps of one model: `forward` is its own call, `graphs` captures what it can."""

    def __init__(
        self, forward: Forward, plan: MaskPlan, device: torch.device, dtype: torch.dtype, graphs: Graphs
    ) -> None:
        self._forward = forward
        self._plan = plan
        self._device = device
        self._dtype = dtype
        self.graphs = graphs
        self._markers = plan.markers(device, dtype)
        self._steps: OrderedDict[tuple[object, ...], StaticStep] = OrderedDict()
        self._most = most_tokens(device)
        self._logits: dict[int, torch.Tensor] = {}
        self.replayed = self.ran = 0
        """Forwards of fixed shape that were replayed, and that ran as they are."""

    def fits(self, segments: Sequence[ForwardInput]) -> bool:
        """Whether segments, for which room is reserved, are worth a step of fixed shape: no prompts, not many."""
        if any(s.visible is None for s in segments):
            return False
        shapes = shapes_of([(s.row, len(s.ids)) for s in segments], tree=True)
        return sum(shape.tokens for shape in shapes) <= self._most

    def step(self, segments: Sequence[ForwardInput]) -> list[torch.Tensor]:
        """Feed every segment in one step; logits (wanted, V) of each."""
        step = self._step([(s.row, len(s.ids)) for s in segments], tree=True)
        wanted = step.fill(segments)
        return list(torch.split(self._run(step).index_select(0, wanted), [s.wanted for s in segments]))

    def draft(self, drafts: Sequence[DraftInput]) -> DraftRun:
        """Choose and feed the tokens of many drafts, as often as the longest one wants; waits for nothing.

        Rows then hold at most what was wanted: the caller knows better once it has read the tokens.
        """
        longest = max(draft.count for draft in drafts)
        rows, logits = [draft.row for draft in drafts], torch.stack([draft.logits for draft in drafts])
        choose = BatchSampling([d.sampler for d in drafts], [d.blocked for d in drafts], [d.history for d in drafts])
        chosen, behind = [choose(logits, 0)], list[torch.Tensor]()
        if longest > 1:
            for row in rows:
                row.reserve(row.used + longest)
            step = self._step([(row, 1) for row in rows], tree=False)
            at = step.begin(rows)
            for ahead in range(1, longest):
                step.ids.index_copy_(0, at, chosen[-1].clamp(min=0))
                behind.append(self._run(step).index_select(0, at))
                chosen.append(choose(behind[-1], ahead))
                step.advance()
        for draft in drafts:
            draft.row.used += draft.count - 1
        return DraftRun(chosen, behind)

    def warm_up(self, row: CacheRow) -> None:
        """Run the steps that draft behind this row and that verify a few or some dozens of tokens, and capture them."""
        for count, tree in ((1, False), *((count, True) for count in WARMED_QUERIES)):
            step = self._step([(row, count)], tree)
            step.begin([row])
            step.uses = step.capture_at
            self._run(step)

    def reserve_bytes(self, width: int, vocabulary: int) -> int:
        """Memory that captured steps may come to take, for a model of hidden size `width`: rather too much.

        Logits of the largest step and of its comparison, what its layers pass on, its masks, what each step sees, and
        the graphs themselves.
        """
        if self.graphs.reason is not None:
            return 0
        size = torch.empty((), dtype=self._dtype).element_size()
        masks = _MASKED_SLOTS * (size * len(self._plan.kinds) + _USUAL_STEPS)
        return self._most * ((2 * vocabulary + _ACTIVATIONS * width) * size + masks) + _USUAL_STEPS * _GRAPH_BYTES

    def drop(self) -> bool:
        """Give the memory of steps back; whether any was captured. Nothing of them may still run."""
        had = self.graphs.count > 0
        self._steps.clear()
        self._logits.clear()
        self.graphs.drop()
        return had

    def _run(self, step: StaticStep) -> torch.Tensor:
        """Logits (T, V) of the step, until the next one runs."""
        if step.replay is not None and self.graphs.reason is None:
            self._replay(step, step.replay)
        else:
            self._feed(step)
            self.ran += 1
        assert step.logits is not None
        if step.replay is None and step.uses >= step.capture_at:
            self._capture(step, step.logits)
        return step.logits

    def _replay(self, step: StaticStep, replay: Callable[[], None]) -> None:
        replay()
        self.replayed += 1
        step.replays += 1
        assert step.logits is not None
        if _is_checked(step.replays):
            self.graphs.holds(lambda: self._feed(step), step.logits)

    def _capture(self, step: StaticStep, logits: torch.Tensor) -> None:
        step.replay = self.graphs.capture(lambda: self._feed(step), logits, step.ids)
        if step.replay is None:  # memory may have been short: once more, later
            step.capture_at = 4 * step.uses

    def _feed(self, step: StaticStep) -> None:
        """The step itself, from its buffers to its logits."""
        step.make_masks()
        with running(step):
            logits = self._forward(step.ids, step, step.positions, self._markers)
        step.drop_masks()
        if step.logits is None:
            step.logits = self._output(step.tokens, logits)
        step.logits.copy_(logits)

    def _output(self, tokens: int, like: torch.Tensor) -> torch.Tensor:
        """Room for logits (T, V), the same for all steps of one size: usual ones, and the longest."""
        if tokens > self._most:
            return torch.empty_like(like)
        size = _USUAL_TOKENS if tokens <= _USUAL_TOKENS else self._most
        if size not in self._logits:
            self._logits[size] = like.new_empty(size, like.shape[-1])
        return self._logits[size][:tokens]

    def _step(self, wanted: Sequence[tuple[CacheRow, int]], tree: bool) -> StaticStep:
        """The step of the smallest shape that holds so many tokens of these rows."""
        shapes = shapes_of(wanted, tree)
        key = (tree, *((id(shape.block), shape.rows, shape.queries) for shape in shapes))
        step = self._steps.get(key)
        if step is None or not step.is_valid:
            self._make_place()
            step = self._steps[key] = StaticStep(shapes, self._plan, self._device, self._dtype, tree)
        self._steps.move_to_end(key)
        step.uses += 1
        return step

    def _make_place(self) -> None:
        """For one step more: without those that are of no use, else those that are not captured; else without any."""
        if self.graphs.count >= _MOST_GRAPHS:
            self.drop()
        if len(self._steps) < _MOST_STEPS:
            return
        self._steps = OrderedDict((key, step) for key, step in self._steps.items() if step.is_valid)
        if len(self._steps) >= _MOST_STEPS:
            spare = [key for key, step in self._steps.items() if step.replay is None]
            for key in spare[: len(self._steps) - _MOST_STEPS + 1]:
                del self._steps[key]


def _is_checked(replays: int) -> bool:
    at = _FIRST_CHECK
    while at < replays:
        at *= _NEXT_CHECK
    return at == replays
