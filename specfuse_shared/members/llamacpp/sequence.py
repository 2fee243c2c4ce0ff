"""One answer in a context of llama.cpp: branches are sequences that share the cells of one prefix, the trunk.

All requests of a step, from all answers of a member, go through the model in one batch (`feed`). The winner's
sequence becomes the trunk, so a commit copies nothing.

One answer of a recurrent or hybrid model on llama.cpp, whose state cannot be cut: branch by branch.

As in `specfuse_shared.members.local.sequence`, every branch continues from a copy of a stored state. A copy is
a sequence that gets its own state with its first token. Branches of all answers still share a batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from specfuse_shared.members.llamacpp.context import FedToken, LlamaContext, LlamaRunner
from specfuse_shared.members.local.sequence import ForwardRequest, NodeLogits, SequenceState
from specfuse_shared.members.token_tree import ROOT, Branch, TokenTree
from specfuse_shared.runtime.kv_cache import TREE_CAPACITY


@dataclass(slots=True, eq=False)
class CellRun:
    """A sequence of the library: the first `trunk` committed tokens, then `nodes` of the tree, one below the other."""

    sequence: int
    trunk: int
    nodes: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.trunk + len(self.nodes)


@dataclass(slots=True)
class Feed:
    """One answer's part of a batch: tokens, `nodes` that need logits, and the changes made for them.

    `made` runs are new, `grown` ones will get the new nodes; `prompt` counts its prompt tokens.
    """

    tokens: list[FedToken] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    made: list[CellRun] = field(default_factory=list)
    grown: dict[int, tuple[CellRun, list[int]]] = field(default_factory=dict)
    prompt: int = 0


class LlamaSequence(SequenceState):
    """The state of one answer. `_runs` hold what is in the cache; one of them has the whole trunk."""

    runner: LlamaRunner

    def __init__(self, runner: LlamaRunner, keeps_speculative: bool = False) -> None:
        super().__init__(runner, keeps_speculative)
        self._runs: list[CellRun] = []
        self._anchors: tuple[int, ...] = ()
        self._is_open = False

    @property
    def context(self) -> LlamaContext:
        return self.runner.context

    def begin(self, prompt: Sequence[int]) -> None:
        self.prompt, self.prompt_remaining, self._is_open = tuple(prompt), len(prompt), True

    def run(self, request: ForwardRequest) -> None:
        feed([request])

    def run_together(self, requests: Sequence[ForwardRequest]) -> None:
        feed(requests)

    @property
    def cached(self) -> tuple[int, tuple[int, ...]] | None:
        """A sequence and the committed ids in it; None where they cannot be copied."""
        return None

    def release(self, remember: bool = False) -> None:
        cached_ids = self.cached if remember else None
        for run in self._runs:
            if cached_ids is None or run.sequence != cached_ids[0]:
                self.context.free(run.sequence)
        if cached_ids is not None:
            sequence, ids = cached_ids
            self.context.cut(sequence, len(ids))
            self.runner.remember(ids, (sequence, *self._anchors))
        else:
            self.context.free(*self._anchors)
        self._anchors = ()
        self._runs, self._end, self._is_open = [], None, False
        self._forget_tree()
        self.runner.held.pop(id(self), None)

    # ── into a batch ─────────────────────────────────────────────────────────────────────────────

    def plan(self, request: ForwardRequest, planned: Feed) -> None:
        """Add what the request needs of the model to `planned`."""
        assert self._is_open, "the sequence was released"
        if not self._runs:
            self._runs = [CellRun(self.context.new_sequence(), 0)]
        if request.prompt:
            self._catch_up()
            self._plan_prompt(request.prompt, planned)
        elif self.needs(request):
            paths = [self._path(branch) for branch in (*request.branches, *request.guesses)]
            self._plan_paths([path for path in paths if path], planned)

    def _catch_up(self) -> None:
        """Take over what is known of the prompt beyond what was read, from ended answers and from those that run."""

    @abstractmethod
    def _plan_prompt(self, count: int, planned: Feed) -> None:
        """The next `count` tokens of the prompt, or fewer where fewer are left."""

    @abstractmethod
    def _plan_paths(self, paths: Sequence[Sequence[int]], planned: Feed) -> None:
        """The unknown ones among these nodes."""

    def _made(self, run: CellRun, planned: Feed) -> CellRun:
        """A run that is new with this feed."""
        self._runs.append(run)
        planned.made.append(run)
        return run

    def take(self, planned: Feed, rows: Sequence[torch.Tensor]) -> None:
        """Logits (V) of the nodes that were fed, or of the end of the prompt."""
        for run, nodes in planned.grown.values():
            run.nodes = run.nodes + nodes
        if planned.prompt:
            self._take_prompt(planned, rows)
        elif planned.tokens:
            self._logits.add(planned.nodes, rows.__getitem__)
            self.computed_tokens += len(planned.tokens)
            self.forwards += 1
        self.runner.held[id(self)] = self.length + len(self._tree)

    def _take_prompt(self, planned: Feed, rows: Sequence[torch.Tensor]) -> None:
        self._runs[-1].trunk += planned.prompt
        self.prompt_remaining -= planned.prompt
        self.read_tokens += planned.prompt
        if rows:
            self._end = rows[-1]

    def undo(self, planned: Feed) -> None:
        """The feed failed: the cache holds what it held before."""
        for run in planned.made:
            self._runs.remove(run)
            self.context.free(run.sequence)
        for run, _ in planned.grown.values():
            self.context.cut(run.sequence, run.length)
        if planned.prompt and self._runs:
            self.context.cut(self._runs[-1].sequence, self._runs[-1].length)

    # ── the trunk ────────────────────────────────────────────────────────────────────────────────

    def _trunk_run(self) -> CellRun | None:
        """A run that holds all that is committed."""
        return next((run for run in self._runs if run.trunk >= self.length), None)


class LlamaTree(LlamaSequence):
    """Any part of a sequence can be shared and any end can be cut: candidates are a tree after one trunk.

    In layers with windows, the library reuses the cells of tokens that left the window of their only sequence, while a
    branch from an earlier position would need them. So the trunk has a second sequence, its anchor.
    """

    copies_prompts = True

    @property
    def cached(self) -> tuple[int, tuple[int, ...]] | None:
        if not self._is_open or not self.is_sound or not self._runs:
            return None
        if self.prompt_remaining:
            return self._runs[0].sequence, self.prompt[: self._runs[0].trunk]
        run = self._trunk_run()
        return None if run is None else (run.sequence, self.prompt + self.answer)

    @property
    def room(self) -> int:
        return max(0, TREE_CAPACITY - len(self._logits.places))

    def _catch_up(self) -> None:
        self.runner.holders.add(self)
        [run] = self._runs
        if (shared := self.runner.known(self.prompt, run.trunk)) is not None:
            start, (sequence, run.trunk) = run.trunk, shared
            self.context.share(sequence, run.sequence, start, run.trunk)
            self.prompt_remaining = len(self.prompt) - run.trunk
            self._anchor(start)

    def _plan_prompt(self, count: int, planned: Feed) -> None:
        start, [run] = len(self.prompt) - self.prompt_remaining, self._runs
        ids = self.prompt[start : start + count]
        last = len(self.prompt) - 1
        planned.tokens += [FedToken(t, n, (run.sequence,), n == last) for n, t in enumerate(ids, start)]
        planned.prompt = len(ids)

    def _plan_paths(self, paths: Sequence[Sequence[int]], planned: Feed) -> None:
        """Every new leaf gets a sequence; a token belongs to the sequences of all leaves below it."""
        new = sorted({node for path in paths for node in path if node not in self._logits.places})
        parents = {self._tree.parents[node] for node in new}
        owners: dict[int, list[int]] = {node: [] for node in new}
        for leaf in (node for node in new if node not in parents):
            line = [node for node in reversed(self._tree.lineage(leaf)) if node in owners]
            run = self._run_behind(self._tree.parents[line[0]], self._tree.trunks[line[0]], planned)
            planned.grown[id(run)] = run, line
            for node in line:
                owners[node].append(run.sequence)
        tokens, positions = self._tree.tokens, self._tree.positions
        planned.tokens += [FedToken(tokens[n], positions[n], owners[n], True) for n in new]
        planned.nodes += new

    def _run_behind(self, parent: int, trunk: int, planned: Feed) -> CellRun:
        """A run that ends with the node `parent`, or with so much of the trunk: one that is there, or a copy."""
        size = trunk if parent == ROOT else self._tree.positions[parent] + 1
        holding = [run for run in self._runs if self._reach(run, parent, trunk) is not None]
        for run in holding:
            if run.length == size and id(run) not in planned.grown:
                return run
        source = holding[0]
        reach = self._reach(source, parent, trunk) or 0
        copied = self.context.copy(source.sequence, size)
        return self._made(CellRun(copied, size - reach, source.nodes[:reach]), planned)

    def _reach(self, run: CellRun, parent: int, trunk: int) -> int | None:
        """Number of the run's nodes before the children of `parent`; None if it does not contain that."""
        if parent == ROOT:
            return 0 if run.trunk >= trunk else None
        return run.nodes.index(parent) + 1 if parent in run.nodes else None

    # ── commit ───────────────────────────────────────────────────────────────────────────────────

    def commit(self, branch: Branch) -> None:
        if not self.keeps_speculative:
            super().commit(branch)
            return
        self.extend([branch])
        last, trunk = self._end_of(branch)
        tree, logits, below = self._tree, self._logits, self._tree.below(last, trunk, sorted(self._logits.places))
        super().commit(branch)
        self._plant(tree, logits, last, below)

    def _end_of(self, branch: Branch) -> tuple[int, int]:
        """The branch's last node, and how many tokens are committed with it."""
        path = self._path(branch)
        return path[-1] if path else ROOT, len(self.prompt) + branch.base + len(branch.tokens)

    def _keep(self, branch: Branch, nodes: Sequence[int]) -> None:
        """The trunk is the sequence that holds the branch, or those that hold more, where that is to be kept."""
        last, trunk = self._end_of(branch)
        lag = {id(run): run.nodes[reach:] for run in self._runs if (reach := self._reach(run, last, trunk)) is not None}
        holding = [run for run in self._runs if id(run) in lag]
        runs = [run for run in holding if self.keeps_speculative and lag[id(run)]] or holding[:1]
        for run in runs:
            run.trunk, run.nodes = trunk, lag[id(run)] if self.keeps_speculative else []
            self.context.cut(run.sequence, run.length)
        for run in self._runs:
            if run not in runs:
                self.context.free(run.sequence)
        self._runs = runs
        if self._anchors:
            self.context.cut(self._anchors[0], len(self.prompt) + branch.base)
            self.context.share(runs[0].sequence, self._anchors[0], len(self.prompt) + branch.base, trunk)

    def _take_prompt(self, planned: Feed, rows: Sequence[torch.Tensor]) -> None:
        start = self._runs[-1].trunk
        super()._take_prompt(planned, rows)
        self._anchor(start)

    def _anchor(self, start: int) -> None:
        """The anchor gets what the trunk has from `start` on."""
        if not self.context.model.window:
            return
        run = self._runs[0]
        if self._anchors:
            self.context.share(run.sequence, self._anchors[0], start, run.trunk)
        else:
            self._anchors = (self.context.copy(run.sequence, run.trunk),)

    def _plant(self, tree: TokenTree, logits: NodeLogits, root: int, below: Sequence[int]) -> None:
        """Take over the nodes `below` the `root` of an earlier tree, after the trunk."""
        numbers = self._tree.take_over(tree, root, below, self.length)
        self._logits = logits.moved({old: numbers[old] for old in below})
        for run in self._runs:
            run.nodes = [numbers[node] for node in run.nodes]


def feed(requests: Sequence[ForwardRequest]) -> None:
    """Put what answers of one member want through its model in one batch, all of it or nothing."""
    planned: list[tuple[LlamaSequence, ForwardRequest, Feed]] = []
    for request in requests:
        assert isinstance(request.sequence, LlamaSequence)
        planned.append((request.sequence, request, Feed()))
    try:
        for sequence, request, fed in planned:
            sequence.plan(request, fed)
        tokens = [token for _, _, fed in planned for token in fed.tokens]
        rows = iter(planned[0][0].context.decode(tokens) if tokens else ())
    except BaseException:
        for sequence, _, fed in planned:
            sequence.undo(fed)
        raise
    for sequence, _, fed in planned:
        sequence.take(fed, list(islice(rows, sum(token.wanted for token in fed.tokens))))


class LlamaRows(LlamaSequence):
    """Runs without nodes are states that stay: in front of the prompt's last token, the previous trunk, the trunk."""

    def release(self, remember: bool = False) -> None:
        super().release()

    def _plan_prompt(self, count: int, planned: Feed) -> None:
        start = len(self.prompt) - self.prompt_remaining
        if start == len(self.prompt) - 1 and start:
            copied = self.context.copy(self._runs[0].sequence, start)
            self._made(CellRun(copied, start), planned)
        run, end = self._runs[-1], min(start + count, max(1, len(self.prompt) - 1))
        end = end if start < end else len(self.prompt)
        last = len(self.prompt) - 1
        planned.tokens += [FedToken(self.prompt[n], n, (run.sequence,), n == last) for n in range(start, end)]
        planned.prompt = end - start

    def _plan_paths(self, paths: Sequence[Sequence[int]], planned: Feed) -> None:
        for path in sorted(paths, key=len, reverse=True):
            if all(node in self._logits.places or node in planned.nodes for node in path):
                continue
            run, first = self._start(path, planned)
            tokens, positions, sequences = self._tree.tokens, self._tree.positions, (run.sequence,)
            planned.tokens += [FedToken(tokens[node], positions[node], sequences, True) for node in path[first:]]
            planned.nodes += path[first:]
            planned.grown[id(run)] = run, list(path[first:])

    def _start(self, path: Sequence[int], planned: Feed) -> tuple[CellRun, int]:
        """The run to continue, and the number of the path's nodes in it."""
        trunk = self._tree.trunks[path[0]]
        for run in self._runs:
            size = len(run.nodes)
            if size and run.trunk == trunk and run.nodes == list(path[:size]) and id(run) not in planned.grown:
                return run, size
        reusable = [run for run in self._runs if not run.nodes and run.trunk <= trunk and run not in planned.made]
        nearest = max(reusable, key=lambda run: run.trunk)
        run = self._made(CellRun(self.context.copy(nearest.sequence, nearest.trunk), trunk), planned)
        committed = (*self.prompt, *self.answer)
        lead = range(nearest.trunk, trunk)
        planned.tokens += [FedToken(committed[n], n, (run.sequence,), False) for n in lead]
        return run, 0

    def undo(self, planned: Feed) -> None:
        """Fed tokens cannot be removed from a state: these states are dropped."""
        for run, _ in planned.grown.values():
            if run not in planned.made:
                planned.made.append(run)
        if planned.prompt and self._runs[-1] not in planned.made:
            planned.made.append(self._runs[-1])
            self.prompt_remaining = len(self.prompt)
        planned.grown, planned.prompt = {}, 0
        super().undo(planned)

    def _keep(self, branch: Branch, nodes: Sequence[int]) -> None:
        path = self._path(branch)
        states = [run for run in self._runs if not run.nodes]
        if path:
            won = self._state_behind(branch)
            fits = [run for run in states if run.trunk <= len(self.prompt) + branch.base]
            won.trunk, won.nodes = len(self.prompt) + branch.base + len(branch.tokens), []
            states = [states[0], *fits[1:][-1:], won]
        for run in self._runs:
            if run not in states:
                self.context.free(run.sequence)
        self._runs = states

    def _state_behind(self, branch: Branch) -> CellRun:
        """The state after the branch's last token; fed again if a longer draft advanced it."""
        path = self._path(branch)
        state = next((state for state in self._runs if state.nodes == path), None)
        if state is None:
            for node in path:
                self._logits.places.pop(node, None)
            self.run(ForwardRequest(self, (branch,)))
            state = next(state for state in self._runs if state.nodes == path)
        return state


def new_sequence(runner: LlamaRunner, keeps_speculative: bool = False) -> LlamaSequence:
    """A sequence for one answer, of the kind that the model supports; `keeps_speculative` where a cache can."""
    return LlamaRows(runner) if runner.is_recurrent else LlamaTree(runner, keeps_speculative)
