"""A member's cached sequence of one answer: committed tokens (the trunk), and the tree of tokens tried in a round.

`SequenceState` is a member's view of a model: read the prompt, compute next-token logits along branches,
keep the winner. It knows token ids, not text.

Stages await forward requests; `feed_together` computes them.

`TreeSequence` holds branches after one cached trunk; the branches of many answers share a forward pass.

`RowSequence` is the fallback for models whose cache cannot hold a tree (recurrent and hybrid ones). Each branch runs on
a separate copy of a snapshot of the model's cache, so the model sees plain continuations only. This costs copies of the
cache and a forward pass per branch, and is exact for every model that can `generate`.
"""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specfuse_shared.members.token_tree import ROOT, Branch, TokenTree
from specfuse_shared.runtime.attention import ForwardInput
from specfuse_shared.runtime.kv_cache import SHORTEST_PREFIX, TREE_CAPACITY, Row, common_length
from specfuse_shared.runtime.model_runner import ModelRunner, Reclaimable
from specfuse_shared.runtime.packed_steps import DraftInput, DraftRun
from specfuse_shared.runtime.pages import PagedRow
from specfuse_shared.runtime.sampler import ArgmaxTokens as TopTokens
from specfuse_shared.runtime.sampler import PendingLogprobs, PendingToken, Sampler, TokenChoice, TokenRow

Place = tuple[TopTokens, int]
"""Where the argmax token after a node is: the argmax tokens of a forward pass, and the row there."""
PREFILL_CHUNK = 1024
"""Maximum prompt tokens of one forward pass."""
_ROW_BITS = 24


class NodeLogits:
    """The logits after the fed nodes of a tree, and the places of their argmax tokens.

    Logits stay in the batch of their forward pass, and a node is a number. Thousands of objects in each round would
    keep the garbage collector busy.
    """

    def __init__(self) -> None:
        self.places: dict[int, int] = {}
        """For every fed node, in one number: its feed (a call of `add`), and its row there."""
        self._feeds: dict[int, tuple[Callable[[int], torch.Tensor], TopTokens | None, int]] = {}
        self._count = 0

    def add(
        self,
        nodes: Sequence[int],
        row: Callable[[int], torch.Tensor],
        most_likely: TopTokens | None = None,
        first: int = 0,
    ) -> None:
        """Add a feed of nodes: `row(n)` gives the logits (V) after the n-th of them. `most_likely` has their argmax
        tokens from row `first` on."""
        start = self._count << _ROW_BITS
        self.places.update(zip(nodes, range(start, start + len(nodes)), strict=True))
        self._feeds[self._count] = row, most_likely, first
        self._count += 1

    def row(self, node: int) -> torch.Tensor:
        """Logits (V) after a node."""
        feed, row = divmod(self.places[node], 1 << _ROW_BITS)
        return self._feeds[feed][0](row)

    def most_likely(self, node: int) -> Place | None:
        """Place of the argmax token after a node, if computed."""
        feed, row = divmod(self.places[node], 1 << _ROW_BITS)
        _, argmax, first = self._feeds[feed]
        return None if argmax is None else (argmax, first + row)

    def moved(self, numbers: Mapping[int, int]) -> NodeLogits:
        """The logits of the nodes in `numbers` (old number → new number), by their new numbers."""
        moved = NodeLogits()
        moved.places = {new: self.places[old] for old, new in numbers.items()}
        feeds = {place >> _ROW_BITS for place in moved.places.values()}
        moved._feeds, moved._count = {feed: self._feeds[feed] for feed in feeds}, self._count
        return moved


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """`count` tokens to choose after `branch` in one run. All but the last are fed, without waiting for the host."""

    branch: Branch
    count: int
    sampler: Sampler
    blocked: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The tokens of a draft, still on the device: column `column` of its run."""

    run: DraftRun
    column: int


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """Branches whose log-probabilities are wanted, each with its stop ids if the turn ends after it.

    `top`: number of most probable alternatives for each token.
    """

    questions: Sequence[tuple[Branch, Sequence[int]]]
    top: int = 0


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """Tokens that a sequence wants to feed: the next `prompt` tokens of its prompt, branches, or a draft.

    `guesses` are added if anything else has to be fed. The result is `ChosenTokens` for a draft, `PendingLogprobs` with
    `logprobs`, and `PendingToken` with a `choice` of the token after the last branch. Otherwise it is the logits (V)
    after that branch, or None after a piece of the prompt.
    """

    sequence: SequenceState
    branches: tuple[Branch, ...] = ()
    prompt: int = 0
    draft: DraftRequest | None = None
    logprobs: LogprobRequest | None = None
    guesses: tuple[Branch, ...] = ()
    choice: TokenChoice | None = None

    def __await__(self) -> Generator[ForwardRequest, ForwardResult, ForwardResult]:
        return (yield self)


ForwardResult = torch.Tensor | PendingLogprobs | PendingToken | ChosenTokens | None


class SequenceState(ABC):
    """The state of one answer in one model.

    `prompt`: its ids, later also the reasoning's; `prompt_remaining` counts those that are not in the cache yet.
    `answer`: the committed answer ids. Between rounds the cache holds `prompt + answer`, and after it tokens that may
    come next. `computed_tokens` counts tokens that went through the model after the
    prompt, in `forwards` passes; `read_tokens` counts tokens of the prompt that did.
    """

    copies_prompts = False
    """Whether it copies a prefix of its prompt from other answers of the model that have read it."""

    def __init__(self, runner: Reclaimable, keeps_speculative: bool = False) -> None:
        self.runner = runner
        self.keeps_speculative = keeps_speculative
        self.prompt: tuple[int, ...] = ()
        self.prompt_remaining = 0
        self.answer: tuple[int, ...] = ()
        self.computed_tokens = self.forwards = self.read_tokens = 0
        self.is_sound = True
        """False after a fault. Then its cache is neither copied nor remembered."""
        self._common = weakref.WeakKeyDictionary[SequenceState, int]()
        self._end: torch.Tensor | None = None
        self._end_place: Place | None = None
        self._forget_tree()

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.prompt) + len(self.answer)

    def prefill(self, prompt: Sequence[int]) -> None:
        """Feed a whole prompt, once."""
        self.begin(prompt)
        while self.prompt_remaining:
            self.run(ForwardRequest(self, prompt=min(self.prompt_remaining, PREFILL_CHUNK)))

    def extend(self, branches: Sequence[Branch]) -> None:
        """Compute the next-token logits after every token of each branch; only new tokens are fed."""
        self.run(ForwardRequest(self, tuple(branches)))

    def needs(self, request: ForwardRequest) -> bool:
        """Whether the request needs a forward pass: the model has not seen all of its tokens."""
        if request.draft is not None:
            return True
        if request.prompt:
            return self.prompt_remaining > 0
        if request.logprobs is not None:
            lines = [self._line(branch, bool(stops)) for branch, stops in request.logprobs.questions]
        else:
            lines = [self._path(branch) for branch in request.branches]
        fed = self._logits.places
        for line in lines:
            for node in line:
                if node not in fed and node != ROOT:
                    return True
        return False

    def knows(self, branch: Branch) -> int:
        """Number of the branch's first tokens that went through the model."""
        path = self._paths.get((branch.base, branch.tokens)) or self._tree.find(*self._divided(branch))
        count = next((n for n, node in enumerate(path) if node not in self._logits.places), len(path))
        return max(0, count - (branch.base < len(self.answer)))

    @property
    def spare_slots(self) -> int:
        """Tokens that fit into the cache without more memory; 0 if no guesses should be fed."""
        return 0

    def logits(self, branch: Branch) -> torch.Tensor:
        """Next-token logits (V) after the branch, which must have been extended."""
        path = self._path(branch)
        return self._logits_row(path[-1] if path else ROOT)

    def most_likely(self, branch: Branch) -> int | None:
        """The argmax token after the branch, if its forward pass computed it; all such tokens share one device sync."""
        path = self._path(branch)
        place = self._logits.most_likely(path[-1]) if path else self._end_place
        return None if place is None else place[0].token(place[1])

    def logprobs(self, branch: Branch, stop_ids: Sequence[int] = ()) -> list[float]:
        """Natural log p of each token of a branch given all before it; waits for the device.

        With stop ids, one more entry: log p that any of them comes next (the member's end of turn).
        """
        return self.judge(LogprobRequest([(branch, stop_ids)])).read()[0]

    def judge(self, request: LogprobRequest) -> PendingLogprobs:
        """Start the computation of the log p of branches that were extended, without waiting for the device."""
        pending = self.judgement(request)
        PendingLogprobs.together([pending])
        return pending

    def judgement(self, request: LogprobRequest) -> PendingLogprobs:
        """Like `judge`, but not started: `PendingLogprobs.together` starts many at once."""
        lines = [TokenRow(self._line(branch, bool(stops)), branch.tokens, stops) for branch, stops in request.questions]
        return PendingLogprobs(lines, self._logits_row, request.top)

    @property
    def drafts_ahead(self) -> bool:
        """Whether the device can draft several tokens in one run; otherwise the host chooses one token at a time."""
        return False

    def may_draft_ahead(self, branch: Branch) -> bool:
        """Whether such a run can continue this branch now."""
        return False

    def draft_after(self, branch: Branch) -> None:  # noqa: B027 only drafts in one run need this
        """Drop nodes that would prevent a draft after this branch."""

    def drafted(self, draft: DraftRequest, chosen: ChosenTokens, stop_ids: Sequence[int]) -> tuple[list[int], bool]:
        """Tokens of a draft that has run, up to the end of the turn, and whether it ended; waits for the device."""
        raise NotImplementedError

    def commit(self, branch: Branch) -> None:
        """The branch becomes the trunk; every other branch is dropped."""
        self.extend([branch])  # usually feeds nothing: the caller has done it
        path = self._path(branch)
        end = self._logits_row(path[-1] if path else ROOT).clone()
        self._end_place = self._logits.most_likely(path[-1]) if path else self._end_place
        self._keep(branch, path[len(path) - len(branch.tokens) :])
        self.answer, self._end = self.answer[: branch.base] + branch.tokens, end
        self._forget_tree()

    def begin_answer(self) -> None:
        """Make the committed ids part of the prompt: they are reasoning, which precedes the answer."""
        self.prompt, self.answer = self.prompt + self.answer, ()
        self._paths.clear()  # their keys count from the beginning of the answer

    @abstractmethod
    def begin(self, prompt: Sequence[int]) -> None:
        """Set the prompt. A prefix in the cache of another answer will not be read again."""

    @abstractmethod
    def release(self, remember: bool = False) -> None:
        """Free the cache; `remember` it for later prompts that begin the same way. Safe to call twice."""

    def waits_for(self, other: SequenceState, own_left: int, other_left: int) -> bool:
        """Whether to wait until `other` has read the prefix that both prompts share.

        Arguments: the number of tokens that each still has to read (`prompt_to_read`).
        """
        if not (self.copies_prompts and other.copies_prompts):
            return False
        common = self._common.get(other)
        if common is None:
            common = self._common[other] = common_length(self.prompt[:-1], other.prompt)
        own_read, read = len(self.prompt) - own_left, len(other.prompt) - other_left
        return own_read <= read < common and common >= own_read + SHORTEST_PREFIX

    @property
    def prompt_to_read(self) -> int:
        """Tokens of the prompt that still have to go through the model, because no other answer has read them."""
        own_read = read = len(self.prompt) - self.prompt_remaining
        for reader, common in self._common.items():
            read = max(read, min(common, len(reader.prompt) - reader.prompt_remaining))
        return self.prompt_remaining - (read - own_read if read >= own_read + SHORTEST_PREFIX else 0)

    @abstractmethod
    def run(self, request: ForwardRequest) -> None:
        """Feed the new tokens of a request, in separate forward passes."""

    def run_together(self, requests: Sequence[ForwardRequest]) -> None:
        """`run` for requests of many sequences of this kind and of one model."""
        for request in requests:
            request.sequence.run(request)

    @abstractmethod
    def _keep(self, branch: Branch, nodes: Sequence[int]) -> None:
        """Keep the trunk up to `branch.base` and then `nodes` in the cache, and drop the rest."""

    def _path(self, branch: Branch) -> Sequence[int]:
        """The branch's nodes."""
        base, tokens = key = branch.base, branch.tokens
        nodes = self._paths.get(key)
        if nodes is None:
            trunk, tail = self._divided(branch)
            before = self._paths.get((base, tokens[:-1])) if len(tail) > 1 else None
            if before is None:
                nodes = self._tree.path(trunk, tail)
            else:  # drafts and guesses grow by one token at a time
                nodes = [*before, self._tree.child(before[-1], trunk, tokens[-1])]
            self._paths[key] = nodes
        return nodes

    def _divided(self, branch: Branch) -> tuple[int, tuple[int, ...]]:
        """The branch as (committed tokens that it sees, tokens to feed after them).

        If it begins within the answer, the committed token before it is fed again as its first token.
        """
        trunk = len(self.prompt) + branch.base
        if branch.base == len(self.answer):
            return trunk, branch.tokens
        last = (self.answer[branch.base - 1] if branch.base else self.prompt[-1],)
        return trunk - 1, last + branch.tokens

    def _logits_row(self, node: int) -> torch.Tensor:
        if node == ROOT:
            assert self._end is not None, "prefill comes first"
            return self._end
        return self._logits.row(node)

    def _line(self, branch: Branch, ends: bool) -> Sequence[int]:
        """The nodes whose logits predict the branch's tokens, and the token after them if it `ends`."""
        if not branch.tokens and not ends:
            return []
        path = self._path(branch)
        line = path if branch.base < len(self.answer) else [ROOT, *path]
        return line[: len(branch.tokens) + ends]

    def _forget_tree(self) -> None:
        self._tree = TokenTree()
        self._paths: dict[tuple[int, tuple[int, ...]], Sequence[int]] = {}
        self._logits = NodeLogits()


class TreeSequence(SequenceState):
    """All branches after one cached trunk, in one forward pass; each token sees the trunk and its own ancestors.

    `keeps_speculative`: keep fed tokens after a committed branch.
    """

    runner: ModelRunner
    copies_prompts = True

    def __init__(self, runner: ModelRunner, keeps_speculative: bool = False) -> None:
        super().__init__(runner, keeps_speculative)
        self._row: Row | None = None
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
    def cached(self) -> tuple[Row, tuple[int, ...]] | None:
        """Its row and the committed ids in it. None if there are none, or if they cannot be copied: after a fault, or
        with the long set of a longrope model."""
        row = self._row
        if row is None or not row.used or row.reach or not self.is_sound:
            return None
        return row, self.prompt[: row.used] if self.prompt_remaining else self.prompt + self.answer

    def run(self, request: ForwardRequest) -> None:
        feed_together([request])

    def forward_input(self, request: ForwardRequest) -> tuple[ForwardInput, list[int]] | None:
        """The tokens to feed and their nodes (no nodes for a piece of the prompt); None if nothing has to be fed."""
        row = self._row if self._row and self._row.used else self._started()
        if request.prompt:
            self._catch_up(row)
            start = len(self.prompt) - self.prompt_remaining
            ids = self.prompt[start : start + self.runner.piece(request.prompt, start)]
            return ForwardInput(row, ids, logit_count=int(len(ids) == self.prompt_remaining)), []
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
        return ForwardInput(row, tokens, visible, positions, logit_count=len(nodes)), nodes

    def _started(self) -> Row:
        """The row of the answer, marked if its text needs the long set of a longrope model.

        It is made for the first forward pass, not in `begin`, because that is where out-of-memory errors are handled.
        """
        assert self._is_open, "the sequence was released"
        if self._row is None:
            self._row = self.runner.pool.row(len(self.prompt) + TREE_CAPACITY)
            self.runner.prefixes.holders.add(self)
        self.runner.longrope.outgrown(self._row, len(self.prompt) + TREE_CAPACITY)
        return self._row

    def _catch_up(self, row: Row) -> None:
        """Copy a longer prefix of the prompt from ended or running answers, if any has one."""
        if not row.reach:
            self.prompt_remaining = len(self.prompt) - self.runner.prefixes.fill(row, self.prompt)

    def _read_again_if_long(self, row: Row) -> None:
        """Read a text again if it is about to outgrow the short set of a longrope model's frequencies.

        The long set then applies to all its tokens.
        """
        if self._fed_nodes or not self.runner.longrope.outgrown(row, self.length + TREE_CAPACITY):
            return
        row.used, ids = 0, self.prompt + self.answer
        for start in range(0, len(ids), PREFILL_CHUNK):
            [rows] = self.runner.step([ForwardInput(row, ids[start : start + PREFILL_CHUNK], logit_count=1)])
            self._end, self._end_place = rows[-1], None

    def take(self, nodes: Sequence[int], rows: torch.Tensor, most_likely: TopTokens | None, first: int) -> None:
        """Store the logits (nodes, V) of the fed tokens. After the last prompt token they are the trunk's.

        `most_likely`: the argmax tokens of the batch, in which this sequence begins at row `first`.
        """
        if nodes:
            self._logits.add(nodes, rows.__getitem__, most_likely, first)
            self._count(nodes)
            return
        assert self._row is not None
        unread = len(self.prompt) - self._row.used
        self.read_tokens += self.prompt_remaining - unread
        self.prompt_remaining = unread
        if not self.prompt_remaining:
            self._end = rows[-1]
            self._end_place = None if most_likely is None else (most_likely, first + len(rows) - 1)

    @property
    def drafts_ahead(self) -> bool:
        return self.runner.packed is not None

    def may_draft_ahead(self, branch: Branch) -> bool:
        return self.drafts_ahead and set(self._fed_nodes) <= set(self._path(branch))  # it writes after all fed tokens

    @property
    def spare_slots(self) -> int:
        return self._row.spare_slots if self._row is not None else 0

    def commit(self, branch: Branch) -> None:
        if not self.keeps_speculative:
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
        """Move the nodes `below` the `root` of an earlier tree to the new tree, right after the trunk."""
        assert self._row is not None
        slots = [slot for n in below if (slot := tree.slots[n]) is not None]
        self._row.keep(self.length, slots)
        numbers = self._tree.take_over(tree, root, below, self.length)
        for slot, old in enumerate(below, start=self.length):
            self._tree.slots[numbers[old]] = slot
            self._fed_nodes.append(numbers[old])
        self._logits = logits.moved({old: numbers[old] for old in below})

    def draft_after(self, branch: Branch) -> None:
        if not self.drafts_ahead:
            return
        path = list(self._path(branch))[: self.knows(branch)]
        tree, logits = self._tree, self._logits
        self._forget_tree()
        self._plant(tree, logits, ROOT, path)

    def draft_input(self, draft: DraftRequest) -> DraftInput:
        """The runner's input to continue from the draft's branch."""
        assert isinstance(self._row, PagedRow), "the sequence was released"
        assert self._row.used == self.length + len(draft.branch.tokens), "a draft continues the only branch"
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
        """The slots (K) that each new node (Q) sees, and the position of each slot. New nodes have the last Q slots."""
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
    """Run the requests of sequences of one model, and return their results in order.

    Tree sequences share a forward pass, their drafts share a run, and row sequences run one by one. The device may
    still be computing the results.
    """
    inputs: list[tuple[TreeSequence, ForwardInput, list[int]]] = []
    drafts: list[tuple[TreeSequence, DraftRequest]] = []
    by_rows = [request for request in requests if not isinstance(request.sequence, TreeSequence)]
    if by_rows:
        by_rows[0].sequence.run_together(by_rows)
    for request in requests:
        if not isinstance(request.sequence, TreeSequence):
            continue
        if request.draft is not None:
            drafts.append((request.sequence, request.draft))
        if (forward := request.sequence.forward_input(request)) is not None:
            inputs.append((request.sequence, *forward))
    if inputs:
        runner, first = inputs[0][0].runner, 0
        logits = runner.step([segment for _, segment, _ in inputs])
        argmax = TopTokens(logits) if runner.reports_argmax and any(map(len, logits)) else None
        for (sequence, _, nodes), rows in zip(inputs, logits, strict=True):
            sequence.take(nodes, rows, argmax, first)
            first += len(rows)
    columns = _run_drafts(drafts) if drafts else iter(())
    results = [next(columns) if request.draft is not None else _result(request) for request in requests]
    PendingLogprobs.together([result for result in results if isinstance(result, PendingLogprobs)])
    PendingToken.together([result for result in results if isinstance(result, PendingToken)])
    return results


def _run_drafts(drafts: Sequence[tuple[TreeSequence, DraftRequest]]) -> Iterator[ChosenTokens]:
    packed = drafts[0][0].runner.packed
    assert packed is not None, "only sequences of paged execution draft ahead"
    run = packed.draft([sequence.draft_input(draft) for sequence, draft in drafts])
    return (ChosenTokens(run, column) for column in range(len(drafts)))


def _result(request: ForwardRequest) -> ForwardResult:
    if request.logprobs is not None:
        return request.sequence.judgement(request.logprobs)
    if request.choice is not None:
        return PendingToken(request.sequence.logits(request.branches[-1]), request.choice)
    return request.sequence.logits(request.branches[-1]) if request.branches else None


def new_sequence(runner: ModelRunner, keeps_speculative: bool = False) -> SequenceState:
    """A sequence for one answer, of the kind that the model supports; only a tree can be `keeps_speculative`."""
    return TreeSequence(runner, keeps_speculative) if runner.plan else RowSequence(runner)


@dataclass(slots=True)
class _Snapshot:
    """A cache that holds the first `length` committed tokens, then `nodes` of the tree."""

    cache: Any
    length: int
    nodes: tuple[int, ...] = ()

    def copy(self) -> _Snapshot:
        return _Snapshot(copy.deepcopy(self.cache), self.length, self.nodes)


class RowSequence(SequenceState):
    """Snapshots of the cache: of the prompt but its last token, of the previous trunk and of the trunk.

    Branches run on copies of them.
    """

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
        """Logits (V) after the prompt. Its last token is fed separately, after a snapshot.

        A branch that replaces the whole answer feeds that token again, and starts from this snapshot.
        """
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
            if ids:
                self._logits.add(missing, self._append(run, ids)[len(lead) :].__getitem__)
                self.computed_tokens += len(ids)
                self.forwards += 1
            run.nodes = tuple(path)
            run.length += len(lead)
            self._runs[run.nodes] = run

    def _start(self, path: Sequence[int]) -> tuple[_Snapshot, list[int]]:
        """The state to continue (the run of the path so far, or a copy of the nearest snapshot), and nodes to feed."""
        before = self._runs.pop(tuple(path[:-1]), None) if len(path) > 1 else None
        if before is not None:
            return before, [path[-1]]
        trunk = self._tree.trunks[path[0]]
        before_trunk = [s for s in self._snapshots if s.length <= trunk]
        if not before_trunk:
            return self._start_again(path)
        return max(before_trunk, key=lambda s: s.length).copy(), list(path)

    def _start_again(self, path: Sequence[int]) -> tuple[_Snapshot, list[int]]:
        """A new state of a prompt of one token, which is the path's first node."""
        logits, cache = self.runner.new_cache([self._tree.tokens[path[0]]])
        self._logits.add(path[:1], lambda _: logits)
        self.computed_tokens += 1
        self.forwards += 1
        return _Snapshot(cache, 0, tuple(path[:1])), list(path[1:])

    def _keep(self, branch: Branch, nodes: Sequence[int]) -> None:
        run = self._runs.get(tuple(self._path(branch)))
        if run is not None:
            trunk = _Snapshot(run.cache, len(self.prompt) + branch.base + len(branch.tokens))
            fits = [s for s in self._snapshots if s.length <= len(self.prompt) + branch.base]
            self._snapshots = [self._snapshots[0], *fits[1:][-1:], trunk]
        elif nodes:
            self._rerun(branch)

    def _rerun(self, branch: Branch) -> None:
        """Feed a branch again whose state was continued by a longer draft."""
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
