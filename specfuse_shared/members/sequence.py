"""A member's cached context of one answer: a committed trunk, and the tree of tokens tried in this round.

`SequenceState` is what a member needs of a model: read the prompt, make the next-token logits known along branches,
keep the winner. `TreeSequence` does it with one forward for any number of branches and of answers (`feed_together`).
It knows ids, not text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch

from specfuse_shared.members.requests import (
    PREFILL_CHUNK,
    ChosenTokens,
    DraftRequest,
    ForwardRequest,
    ForwardResult,
    LogprobRequest,
)
from specfuse_shared.members.token_tree import ROOT, Branch, TokenTree
from specfuse_shared.runtime.attention import ForwardInput
from specfuse_shared.runtime.kv_cache import CacheRow
from specfuse_shared.runtime.logprobs import Judgement, Line
from specfuse_shared.runtime.model_runner import ModelRunner
from specfuse_shared.runtime.static_runner import DraftInput

_TREE_ROOM = 64


class SequenceState(ABC):
    """The state of one answer in one model.

    `prompt` is frozen, and `prompt_remaining` counts its tokens that are not in the cache yet; `answer` are the
    committed answer ids; the cache always holds exactly `prompt + answer` between rounds. `computed_tokens`
    counts those that went through the model after the prompt.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.prompt: tuple[int, ...] = ()
        self.prompt_remaining = 0
        self.answer: tuple[int, ...] = ()
        self.computed_tokens = 0
        self._end: torch.Tensor | None = None
        self._forget_tree()

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.prompt) + len(self.answer)

    def prefill(self, prompt: Sequence[int]) -> None:
        """Feed a whole prompt, once."""
        self.begin(prompt)
        while self.prompt_remaining:
            feed_together([ForwardRequest(self, prompt=min(self.prompt_remaining, PREFILL_CHUNK))])

    def extend(self, branches: Sequence[Branch]) -> None:
        """Make the next-token logits known after every token of each branch, feeding only what is new."""
        feed_together([ForwardRequest(self, tuple(branches))])

    def needs(self, request: ForwardRequest) -> bool:
        """Whether the request holds anything that the model has not seen."""
        if request.prompt or request.draft is not None:
            return request.draft is not None or self.prompt_remaining > 0
        return any(node not in self._rows for branch in request.branches for node in self._path(branch))

    def logits(self, branch: Branch) -> torch.Tensor:
        """Next-token logits (V) after the branch, which must have been extended."""
        path = self._path(branch)
        return self._logits_row(path[-1] if path else ROOT)

    def logprobs(self, branch: Branch, stop_ids: Sequence[int] = ()) -> list[float]:
        """Natural log p of each token of a branch given all before it; waits for the device.

        With stop ids, one more entry: log p that any of them comes next (the member's end of turn).
        """
        return self.judge(LogprobRequest([(branch, stop_ids)])).read()[0]

    def judge(self, request: LogprobRequest) -> Judgement:
        """Let the device find the log p of branches that were extended, without waiting for it."""
        lines = [Line(self._line(branch, bool(stops)), branch.tokens, stops) for branch, stops in request.questions]
        return Judgement(lines, self._logits_row)

    @property
    def drafts_ahead(self) -> bool:
        """Whether it takes feeds that draft; else tokens are chosen one by one."""
        return False

    def drafted(self, draft: DraftRequest, chosen: ChosenTokens, stop_ids: Sequence[int]) -> tuple[list[int], bool]:
        """Tokens of a draft that was fed, up to the end of the turn, and whether that came; waits for the device."""
        raise NotImplementedError

    def commit(self, branch: Branch) -> None:
        """The branch becomes the trunk; every other branch is dropped."""
        self.extend([branch])  # feeds nothing where the caller saw to it
        path = self._path(branch)
        end = self._logits_row(path[-1] if path else ROOT).clone()
        self._keep(branch, path[len(path) - len(branch.tokens) :])
        self.answer, self._end = self.answer[: branch.base] + branch.tokens, end
        self._forget_tree()

    def begin_answer(self) -> None:
        """What is committed so far is part of the prompt: thoughts, behind which the answer begins."""
        self.prompt, self.answer = self.prompt + self.answer, ()

    @abstractmethod
    def begin(self, prompt: Sequence[int]) -> None:
        """Take a prompt; what is known of it from earlier answers needs no reading."""

    @abstractmethod
    def release(self, remember: bool = False) -> None:
        """Free the cache; `remember` it for later prompts that begin the same way. Safe to call twice."""

    def feed_alone(self, request: ForwardRequest) -> None:
        """Run a request of a sequence that cannot share a forward."""
        raise NotImplementedError

    @abstractmethod
    def _keep(self, branch: Branch, nodes: Sequence[int]) -> None:
        """Make the cache hold the trunk up to `branch.base` and then `nodes`."""

    def _path(self, branch: Branch) -> list[int]:
        """The branch's nodes; behind an inner point of the trunk, led by a copy of the trunk token before it."""
        trunk = len(self.prompt) + branch.base
        if branch.base == len(self.answer):
            return self._tree.path(trunk, branch.tokens)
        last = (self.answer[branch.base - 1] if branch.base else self.prompt[-1],)
        return self._tree.path(trunk - 1, last + branch.tokens)

    def _logits_row(self, node: int) -> torch.Tensor:
        if node == ROOT:
            assert self._end is not None, "prefill comes first"
            return self._end
        return self._rows[node]

    def _line(self, branch: Branch, ends: bool) -> list[int]:
        """The nodes whose logits judge the branch's tokens, and what follows them if it `ends`."""
        if not branch.tokens and not ends:
            return []
        path = self._path(branch)
        line = path if branch.base < len(self.answer) else [ROOT, *path]
        return line[: len(branch.tokens) + ends]

    def _forget_tree(self) -> None:
        self._tree = TokenTree()
        self._rows: dict[int, torch.Tensor] = {}


class TreeSequence(SequenceState):
    """All branches behind one cached trunk, in one forward, each token seeing the trunk and its own ancestors."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self._row: CacheRow | None = None
        self._is_open = False

    def begin(self, prompt: Sequence[int]) -> None:
        self.prompt, self.prompt_remaining, self._is_open = tuple(prompt), len(prompt), True

    def release(self, remember: bool = False) -> None:
        if self._row is not None:
            if remember and not self.prompt_remaining and not self._row.reach:
                self.runner.prefixes.store(self._row, self.prompt + self.answer)
            self._row.free()
        self._row, self._end, self._is_open = None, None, False
        self._forget_tree()

    def forward_input(self, request: ForwardRequest) -> tuple[ForwardInput, list[int]] | None:
        """The tokens to feed and their nodes (none for a piece of the prompt); None if all is known already."""
        row = self._row if self._row and self._row.used else self._started()
        if request.prompt:
            start = len(self.prompt) - self.prompt_remaining
            ids = self.prompt[start : start + request.prompt]
            return ForwardInput(row, ids, wanted=int(len(ids) == self.prompt_remaining)), []
        self._read_again_if_long(row)
        branches = request.branches if request.draft is None else (request.draft.branch,)
        paths = [self._path(branch) for branch in branches]
        nodes = sorted({node for path in paths for node in path if node not in self._rows})
        if not nodes:
            return None
        for slot, node in enumerate(nodes, start=row.used):
            self._tree.nodes[node].slot = slot
        visible, positions = self._visible(nodes)
        tokens = [self._tree.nodes[n].token for n in nodes]
        return ForwardInput(row, tokens, visible, positions, wanted=len(nodes)), nodes

    def _started(self) -> CacheRow:
        """A row, with what is known of the prompt (read with the short set); here lack of memory is dealt with."""
        assert self._is_open, "the sequence was released"
        self._row = self._row or self.runner.pool.row(len(self.prompt) + _TREE_ROOM)
        if not self.runner.longrope.outgrown(self._row, len(self.prompt) + _TREE_ROOM) and not self._row.reach:
            self.prompt_remaining = len(self.prompt) - self.runner.prefixes.fill(self._row, self.prompt)
        return self._row

    def _read_again_if_long(self, row: CacheRow) -> None:
        """All of a text that is about to outgrow the short set of a model's rotary frequencies, with the long one."""
        if self._fed_nodes or not self.runner.longrope.outgrown(row, self.length + _TREE_ROOM):
            return
        row.used, ids = 0, self.prompt + self.answer
        for start in range(0, len(ids), PREFILL_CHUNK):
            [rows] = self.runner.step([ForwardInput(row, ids[start : start + PREFILL_CHUNK], wanted=1)])
            self._end = rows[-1]

    def take(self, nodes: Sequence[int], rows: torch.Tensor) -> None:
        """Logits (nodes, V) of what was fed; those of a prompt's last token become the trunk's end."""
        if nodes:
            self._take(nodes, list(rows))
            return
        assert self._row is not None
        self.prompt_remaining = len(self.prompt) - self._row.used
        if not self.prompt_remaining:
            self._end = rows[-1]

    @property
    def drafts_ahead(self) -> bool:
        return self.runner.static is not None

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
            self._tree.nodes[node].slot = start + n
        self._row.used = start + len(nodes)
        self._take(nodes, chosen.run.logits(chosen.column, len(nodes)))
        return ids, ended

    def _take(self, nodes: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        self._rows.update(zip(nodes, rows, strict=True))
        self.computed_tokens += len(nodes)
        self._fed_nodes += nodes

    def _visible(self, nodes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Which slots (K) each new node (Q) sees, and the position of every slot; the queries are the last Q slots."""
        tree, fed = self._tree.nodes, [*self._fed_nodes, *nodes]
        visible = torch.zeros(len(nodes), self.length + len(fed), dtype=torch.bool)
        for row, node in enumerate(nodes):
            visible[row, : tree[node].trunk] = True
            visible[row, [tree[a].slot for a in self._tree.lineage(node)]] = True
        positions = torch.arange(self.length + len(fed))
        positions[self.length :] = torch.tensor([tree[n].position for n in fed])
        return visible, positions

    def _keep(self, branch: Branch, nodes: Sequence[int]) -> None:
        assert self._row is not None
        slots = [slot for n in nodes if (slot := self._tree.nodes[n].slot) is not None]
        self._row.keep(len(self.prompt) + branch.base, slots)

    def _forget_tree(self) -> None:
        super()._forget_tree()
        self._fed_nodes: list[int] = []


def feed_together(requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
    """Run what sequences of one model ask for: packed ones in one forward, drafts in one run of forwards, others one
    after another. What each wanted to know, in their order, as far as the device has got."""
    inputs: list[tuple[TreeSequence, ForwardInput, list[int]]] = []
    drafts: list[tuple[TreeSequence, DraftRequest]] = []
    for request in requests:
        if not isinstance(request.context, TreeSequence):
            request.context.feed_alone(request)
            continue
        if request.draft is not None:
            drafts.append((request.context, request.draft))
        if (found := request.context.forward_input(request)) is not None:
            inputs.append((request.context, *found))
    if inputs:
        logits = inputs[0][0].runner.step([segment for _, segment, _ in inputs])
        for (context, _, nodes), rows in zip(inputs, logits, strict=True):
            context.take(nodes, rows)
    columns = _run_drafts(drafts) if drafts else iter(())
    return [next(columns) if request.draft is not None else _result(request) for request in requests]


def _run_drafts(drafts: Sequence[tuple[TreeSequence, DraftRequest]]) -> Iterator[ChosenTokens]:
    static = drafts[0][0].runner.static
    assert static is not None, "only sequences of fixed-shape runners draft ahead"
    run = static.draft([context.draft_input(draft) for context, draft in drafts])
    return (ChosenTokens(run, column) for column in range(len(drafts)))


def _result(request: ForwardRequest) -> ForwardResult:
    if request.logprobs is not None:
        return request.context.judge(request.logprobs)
    return request.context.logits(request.branches[-1]) if request.branches else None
