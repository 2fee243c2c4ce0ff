"""Sequences that go row by row: the fallback for models whose cache cannot hold a tree (recurrent and hybrid ones).

Each branch is fed on its own copy of a snapshot of the model's cache, so the model sees plain continuations only.
Costs one forward a branch and copies of the cache; exact for every model that can `generate`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specfuse_shared.members.local.forwards import ForwardRequest
from specfuse_shared.members.local.sequence import SequenceState
from specfuse_shared.members.local.tree_sequence import TreeSequence
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.runtime.model_runner import ModelRunner


def new_sequence(runner: ModelRunner, keeps_spare: bool = False) -> SequenceState:
    """A sequence for one answer, of the kind that the model supports; `keeps_spare` where a cache can."""
    return TreeSequence(runner, keeps_spare) if runner.plan else RowSequence(runner)


@dataclass(slots=True)
class _Snapshot:
    """A cache that holds the first `length` committed tokens, then `nodes` of the tree."""

    cache: Any
    length: int
    nodes: tuple[int, ...] = ()

    def copy(self) -> _Snapshot:
        return _Snapshot(copy.deepcopy(self.cache), self.length, self.nodes)


class RowSequence(SequenceState):
    """One snapshot of the prompt, one of the previous trunk and one of the trunk; branches run on copies."""

    runner: ModelRunner

    def __init__(self, runner: ModelRunner) -> None:
        self._snapshots: list[_Snapshot] = []
        self._runs: dict[tuple[int, ...], _Snapshot] = {}
        super().__init__(runner)

    def begin(self, prompt: Sequence[int]) -> None:
        self.prompt, self.prompt_remaining = tuple(prompt), len(prompt)

    def release(self, remember: bool = False) -> None:
        self._snapshots, self._end = [], None
        self._forget_tree()

    def run(self, request: ForwardRequest) -> None:
        if request.prompt:
            self._end = self._read_prompt()
            self.read_tokens += self.prompt_remaining
            self.prompt_remaining = 0
        else:
            self._feed([self._path(branch) for branch in request.branches])

    def _read_prompt(self) -> torch.Tensor:
        """Logits (V) after the prompt. Its last token is fed apart, so that a snapshot stands before every parent."""
        if len(self.prompt) == 1:
            logits, cache = self.runner.new_cache(self.prompt)
            self._snapshots = [_Snapshot(cache, 1)]
            return logits
        _, cache = self.runner.new_cache(self.prompt[:-1])
        first = _Snapshot(cache, len(self.prompt) - 1)
        trunk = first.copy()
        logits = self._append(trunk, self.prompt[-1:])[-1]
        trunk.length += 1
        self._snapshots = [first, trunk]
        return logits

    def _feed(self, paths: Sequence[Sequence[int]]) -> None:
        for path in paths:
            if all(node in self._logits.places for node in path):
                continue
            run, missing = self._start(path)
            lead = self._committed(run.length, self._tree.trunks[path[0]]) if not run.nodes else []
            ids = lead + [self._tree.tokens[n] for n in missing]
            rows = self._append(run, ids)[len(lead) :]
            run.nodes = tuple(path)
            run.length += len(lead)
            self._logits.add(missing, rows.__getitem__)
            self._runs[run.nodes] = run
            self.computed_tokens += len(ids)
            self.forwards += 1

    def _start(self, path: Sequence[int]) -> tuple[_Snapshot, list[int]]:
        """The state to go on from: the run that drafted this path so far, or a copy of the nearest snapshot."""
        before = self._runs.pop(tuple(path[:-1]), None) if len(path) > 1 else None
        if before is not None:
            return before, [path[-1]]
        trunk = self._tree.trunks[path[0]]
        nearest = max((s for s in self._snapshots if s.length <= trunk), key=lambda s: s.length)
        return nearest.copy(), list(path)

    def _keep(self, branch: Branch, nodes: Sequence[int]) -> None:
        run = self._runs.get(tuple(self._path(branch)))
        if run is not None:
            trunk = _Snapshot(run.cache, len(self.prompt) + branch.base + len(branch.tokens))
            fits = [s for s in self._snapshots if s.length <= len(self.prompt) + branch.base]
            self._snapshots = [self._snapshots[0], *fits[1:][-1:], trunk]
        elif nodes:
            self._rerun(branch)

    def _rerun(self, branch: Branch) -> None:
        """Feed a branch whose own state was carried on by a longer draft."""
        for node in self._path(branch):
            self._logits.places.pop(node, None)
        self._feed([self._path(branch)])
        self._keep(branch, self._path(branch))

    def _committed(self, start: int, end: int) -> list[int]:
        return list((self.prompt + self.answer)[start:end])

    def _append(self, run: _Snapshot, ids: Sequence[int]) -> torch.Tensor:
        return self.runner.append(ids, run.cache, run.length + len(run.nodes))

    def _forget_tree(self) -> None:
        super()._forget_tree()
        self._runs = {}
