"""Sequences whose branches stand behind one cached trunk, and what goes through a model together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from specfuse_shared.members.local.forwards import (
    PREFILL_CHUNK,
    ChosenTokens,
    DraftRequest,
    ForwardRequest,
    ForwardResult,
    NodeLogits,
)
from specfuse_shared.members.local.sequence import SequenceState
from specfuse_shared.members.token_tree import ROOT, Branch, TokenTree
from specfuse_shared.runtime.attention import ForwardInput
from specfuse_shared.runtime.cache.blocks import CacheRow
from specfuse_shared.runtime.cache.sizes import TREE_ROOM
from specfuse_shared.runtime.logprobs import PendingLogprobs
from specfuse_shared.runtime.model_runner import ModelRunner
from specfuse_shared.runtime.static.runner import DraftInput
from specfuse_shared.runtime.top_tokens import TopTokens


class TreeSequence(SequenceState):
    """All branches behind one cached trunk, in one forward, each token seeing the trunk and its own ancestors.

    `keeps_spare`: what went through the model behind a committed branch stays known.
    """

    runner: ModelRunner
    copies_prompts = True

    def __init__(self, runner: ModelRunner, keeps_spare: bool = False) -> None:
        super().__init__(runner, keeps_spare)
        self._row: CacheRow | None = None
        self._is_open = False

    def begin(self, prompt: Sequence[int]) -> None:
        self.prompt, self.prompt_remaining, self._is_open = tuple(prompt), len(prompt), True

    def release(self, remember: bool = False) -> None:
        if self._row is not None:
            if remember and (cached := self.cached) is not None:
                self.runner.prefixes.store(*cached)
            self._row.free()
        self._row, self._end, self._is_open = None, None, False
        self._forget_tree()

    @property
    def cached(self) -> tuple[CacheRow, tuple[int, ...]] | None:
        """Its row and the committed ids in it; None where there are none, or only those of a longer text."""
        row = self._row
        if row is None or not row.used or row.reach or not self.is_sound:
            return None
        return row, self.prompt[: row.used] if self.prompt_remaining else self.prompt + self.answer

    def run(self, request: ForwardRequest) -> None:
        feed_together([request])

    def forward_input(self, request: ForwardRequest) -> tuple[ForwardInput, list[int]] | None:
        """The tokens to feed and their nodes (none for a piece of the prompt); None if all is known already."""
        row = self._row if self._row and self._row.used else self._started()
        if request.prompt:
            self._catch_up(row)
            start = len(self.prompt) - self.prompt_remaining
            ids = self.prompt[start : start + self.runner.piece(request.prompt, start)]
            return ForwardInput(row, ids, wanted=int(len(ids) == self.prompt_remaining)), []
        if not self.needs(request):
            return None
        self._read_again_if_long(row)
        branches = request.branches if request.draft is None else (request.draft.branch,)
        paths = [self._path(branch) for branch in (*branches, *request.guesses)]
        nodes = sorted({node for path in paths for node in path if node not in self._logits.places})
        if not nodes:
            return None
        for slot, node in enumerate(nodes, start=row.used):
            self._tree.slots[node] = slot
        visible, positions = self._visible(nodes)
        tokens = [self._tree.tokens[n] for n in nodes]
        return ForwardInput(row, tokens, visible, positions, wanted=len(nodes)), nodes

    def _started(self) -> CacheRow:
        """A row, with what is known of the prompt (read with the short set); here lack of memory is dealt with."""
        assert self._is_open, "the sequence was released"
        if self._row is None:
            self._row = self.runner.pool.row(len(self.prompt) + TREE_ROOM)
            self.runner.prefixes.holders.add(self)
        self.runner.longrope.outgrown(self._row, len(self.prompt) + TREE_ROOM)
        return self._row

    def _catch_up(self, row: CacheRow) -> None:
        """Copy what is known of the prompt beyond what was read, from ended answers and from those that run."""
        if not row.reach:
            self.prompt_remaining = len(self.prompt) - self.runner.prefixes.fill(row, self.prompt)

    def _read_again_if_long(self, row: CacheRow) -> None:
        """All of a text that is about to outgrow the short set of a model's rotary frequencies, with the long one."""
        if self._fed_nodes or not self.runner.longrope.outgrown(row, self.length + TREE_ROOM):
            return
        row.used, ids = 0, self.prompt + self.answer
        for start in range(0, len(ids), PREFILL_CHUNK):
            [rows] = self.runner.step([ForwardInput(row, ids[start : start + PREFILL_CHUNK], wanted=1)])
            self._end, self._end_place = rows[-1], None

    def take(self, nodes: Sequence[int], rows: torch.Tensor, likeliest: TopTokens | None, first: int) -> None:
        """Logits (nodes, V) of what was fed; those of a prompt's last token become the trunk's end.

        `likeliest`: where the likeliest tokens behind all that was fed with them are, those of these from `first` on.
        """
        if nodes:
            self._logits.add(nodes, rows.__getitem__, likeliest, first)
            self._count(nodes)
            return
        assert self._row is not None
        left = len(self.prompt) - self._row.used
        self.read_tokens += self.prompt_remaining - left
        self.prompt_remaining = left
        if not self.prompt_remaining:
            self._end = rows[-1]
            self._end_place = None if likeliest is None else (likeliest, first + len(rows) - 1)

    @property
    def drafts_ahead(self) -> bool:
        return self.runner.static is not None

    def may_draft_ahead(self, branch: Branch) -> bool:
        return self.drafts_ahead and set(self._fed_nodes) <= set(self._path(branch))  # it writes behind all that is fed

    @property
    def room(self) -> int:
        return max(0, self._row.block.capacity - self._row.used - 1) if self._row is not None else 0

    @property
    def spare(self) -> int:
        """Tokens in the cache behind the committed ones."""
        return self._row.used - self.length if self._row is not None else 0

    def commit(self, branch: Branch) -> None:
        if not self.keeps_spare:
            super().commit(branch)
            return
        self.extend([branch])
        path = self._path(branch)
        last = path[-1] if path else ROOT
        trunk = len(self.prompt) + branch.base + len(branch.tokens)
        tree, logits, below = self._tree, self._logits, self._tree.below(last, trunk, self._fed_nodes)
        super().commit(branch)
        self._plant(tree, logits, last, below)

    def _plant(self, tree: TokenTree, logits: NodeLogits, root: int, below: Sequence[int]) -> None:
        """Take the nodes `below` the `root` of an earlier tree over, behind the trunk."""
        assert self._row is not None
        slots = [slot for n in below if (slot := tree.slots[n]) is not None]
        self._row.keep(self.length, slots)
        numbers = self._tree.take_over(tree, root, below, self.length)
        for slot, old in enumerate(below, start=self.length):
            self._tree.slots[numbers[old]] = slot
            self._fed_nodes.append(numbers[old])
        self._logits = logits.moved({old: numbers[old] for old in below})

    def draft_behind(self, branch: Branch) -> None:
        if not self.drafts_ahead:
            return
        path = list(self._path(branch))[: self.knows(branch)]
        tree, logits = self._tree, self._logits
        self._forget_tree()
        self._plant(tree, logits, ROOT, path)

    def draft_input(self, draft: DraftRequest) -> DraftInput:
        """What the runner needs to go on from the draft's branch."""
        assert self._row is not None, "the sequence was released"
        assert self._row.used == self.length + len(draft.branch.tokens), "a draft goes on from the only branch"
        history = (*self.prompt, *self.answer, *draft.branch.tokens) if draft.sampler.needs_history else ()
        return DraftInput(self._row, self.logits(draft.branch), history, draft.sampler, draft.blocked, draft.count)

    def drafted(self, draft: DraftRequest, chosen: ChosenTokens, stop_ids: Sequence[int]) -> tuple[list[int], bool]:
        assert self._row is not None, "the sequence was released"
        ids, ended = chosen.run.tokens(chosen.column, draft.count, stop_ids)
        draft.sampler.drawn += len(ids)
        start = self.length + len(draft.branch.tokens)
        fed = ids[: draft.count - 1]
        path = self._path(Branch(draft.branch.base, draft.branch.tokens + tuple(fed)))
        nodes = path[len(path) - len(fed) :]
        for n, node in enumerate(nodes):
            self._tree.slots[node] = start + n
        self._row.used = start + len(nodes)
        self._logits.add(nodes, partial(chosen.run.logits, chosen.column))
        self._count(nodes, draft.count - 1)
        return ids, ended

    def _count(self, nodes: Sequence[int], forwards: int = 1) -> None:
        self.computed_tokens += len(nodes)
        self.forwards += forwards
        self._fed_nodes += nodes

    def _visible(self, nodes: Sequence[int]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Which slots (K) each new node (Q) sees, and the position of every slot; the queries are the last Q slots."""
        tree, fed = self._tree, [*self._fed_nodes, *nodes]
        slots = self.length + len(fed)
        visible = np.zeros((len(nodes), slots), dtype=bool)
        row_of = dict(zip(nodes, range(len(nodes)), strict=True))
        for row, node in enumerate(nodes):
            parent = tree.parents[node]
            if (above := row_of.get(parent)) is not None:  # parents come first
                visible[row] = visible[above]
            else:
                visible[row, : tree.trunks[node]] = True
                visible[row, [slot for a in tree.lineage(parent) if (slot := tree.slots[a]) is not None]] = True
            visible[row, tree.slots[node]] = True
        positions = np.arange(slots)
        positions[self.length :] = [tree.positions[n] for n in fed]
        return visible, positions

    def _keep(self, branch: Branch, nodes: Sequence[int]) -> None:
        assert self._row is not None
        slots = [slot for n in nodes if (slot := self._tree.slots[n]) is not None]
        self._row.keep(len(self.prompt) + branch.base, slots)

    def _forget_tree(self) -> None:
        super()._forget_tree()
        self._fed_nodes: list[int] = []


def feed_together(requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
    """Run what sequences of one model ask for: packed ones in one forward, drafts in one run of forwards, others as
    they do it themselves. What each wanted to know, in their order, as far as the device has got."""
    inputs: list[tuple[TreeSequence, ForwardInput, list[int]]] = []
    drafts: list[tuple[TreeSequence, DraftRequest]] = []
    others = [request for request in requests if not isinstance(request.sequence, TreeSequence)]
    if others:
        others[0].sequence.run_together(others)
    for request in requests:
        if not isinstance(request.sequence, TreeSequence):
            continue
        if request.draft is not None:
            drafts.append((request.sequence, request.draft))
        if (found := request.sequence.forward_input(request)) is not None:
            inputs.append((request.sequence, *found))
    if inputs:
        runner, first = inputs[0][0].runner, 0
        logits = runner.step([segment for _, segment, _ in inputs])
        told = TopTokens(logits) if runner.tells_likeliest and any(map(len, logits)) else None
        for (sequence, _, nodes), rows in zip(inputs, logits, strict=True):
            sequence.take(nodes, rows, told, first)
            first += len(rows)
    columns = _run_drafts(drafts) if drafts else iter(())
    results = [next(columns) if request.draft is not None else _result(request) for request in requests]
    PendingLogprobs.together([result for result in results if isinstance(result, PendingLogprobs)])
    return results


def _run_drafts(drafts: Sequence[tuple[TreeSequence, DraftRequest]]) -> Iterator[ChosenTokens]:
    static = drafts[0][0].runner.static
    assert static is not None, "only sequences of fixed-shape runners draft ahead"
    run = static.draft([sequence.draft_input(draft) for sequence, draft in drafts])
    return (ChosenTokens(run, column) for column in range(len(drafts)))


def _result(request: ForwardRequest) -> ForwardResult:
    if request.logprobs is not None:
        return request.sequence.judgement(request.logprobs)
    return request.sequence.logits(request.branches[-1]) if request.branches else None
