"""A member's cached context of one answer: a committed trunk, and the tree of tokens tried in this round.

`Context` is what a member needs of a model: read the prompt, make the next-token logits known along branches, keep
the winner. `PackedContext` does it with one forward for any number of branches and of answers (`feed_together`).
It knows ids, not text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specfuse_shared.attention import Segment
from specfuse_shared.cache import CacheRow
from specfuse_shared.tree import ROOT, Branch, TokenTree

if TYPE_CHECKING:
    from specfuse_shared.runner import ModelRunner

PREFILL_CHUNK = 1024
_TREE_ROOM = 64


class NotFiniteError(ArithmeticError):
    """The model's logits are not numbers."""

    def __init__(self) -> None:
        super().__init__("its logits are not finite numbers (overflow in half precision, or broken weights)")


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens that a context wants to go through the model: the next `prompt` tokens of its prompt, or branches."""

    context: Context
    branches: tuple[Branch, ...] = ()
    prompt: int = 0


class Context(ABC):
    """The state of one answer in one model.

    `prompt` is frozen, and `unread` counts its tokens that are not in the cache yet; `answer` are the committed
    answer ids; the cache always holds exactly `prompt + answer` between rounds. `fed` counts the tokens that went
    through the model after the prompt.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.prompt: tuple[int, ...] = ()
        self.unread = 0
        self.answer: tuple[int, ...] = ()
        self.fed = 0
        self._end: torch.Tensor | None = None
        self._forget_tree()

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.prompt) + len(self.answer)

    def prefill(self, prompt: Sequence[int]) -> None:
        """Feed a whole prompt, once."""
        self.begin(prompt)
        while self.unread:
            feed_together([Feed(self, prompt=min(self.unread, PREFILL_CHUNK))])

    def extend(self, branches: Sequence[Branch]) -> None:
        """Make the next-token logits known after every token of each branch, feeding only what is new."""
        feed_together([Feed(self, tuple(branches))])

    def needs(self, feed: Feed) -> bool:
        """Whether the feed holds anything that the model has not seen."""
        if feed.prompt:
            return self.unread > 0
        return any(node not in self._rows for branch in feed.branches for node in self._path(branch))

    def logits(self, branch: Branch) -> torch.Tensor:
        """Next-token logits (V) after the branch, which must have been extended."""
        path = self._path(branch)
        return self._logits_row(path[-1] if path else ROOT)

    def logprobs(self, branch: Branch, stop_ids: Sequence[int] = ()) -> list[float]:
        """Natural log p of each token of the branch given all before it.

        With `stop_ids`, one more entry: log p that any of them comes next (the member's end of turn).
        """
        if not branch.tokens and not stop_ids:
            return []
        path = self._path(branch)
        chain = path if branch.base < len(self.answer) else [ROOT, *path]
        chain = chain[: len(branch.tokens) + bool(stop_ids)]
        masses = self._masses(chain)
        picks = [self._logits_row(n)[t].float() - m for n, t, m in zip(chain, branch.tokens, masses, strict=False)]
        if stop_ids:
            picks.append(self._logits_row(chain[-1])[list(stop_ids)].float().logsumexp(0) - masses[-1])
        return [float(v) for v in torch.stack(picks).tolist()]

    def commit(self, branch: Branch) -> None:
        """The branch becomes the trunk; every other branch is dropped."""
        self.extend([branch])  # feeds nothing where the caller saw to it
        path = self._path(branch)
        end = self._logits_row(path[-1] if path else ROOT).clone()
        self._keep(branch, path[len(path) - len(branch.tokens) :])
        self.answer = self.answer[: branch.base] + branch.tokens
        self._end = end
        self._forget_tree()

    @abstractmethod
    def begin(self, prompt: Sequence[int]) -> None:
        """Take a prompt; what is known of it from earlier answers needs no reading."""

    @abstractmethod
    def release(self, remember: bool = False) -> None:
        """Free the cache; `remember` it for later prompts that begin the same way. Safe to call twice."""

    def feed_alone(self, feed: Feed) -> None:
        """Run a feed of a context that cannot share a forward."""
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

    def _masses(self, nodes: Sequence[int]) -> list[torch.Tensor]:
        """log Σ exp of each node's logits in float32, computed once a round."""
        missing = [n for n in nodes if n not in self._mass]
        if missing:
            # row by row, because blocks of float32 copies would not fit a processor's cache
            masses = torch.stack([self._logits_row(n).float().logsumexp(-1) for n in missing])
            if not bool(masses.isfinite().all()):
                raise NotFiniteError
            self._mass.update(zip(missing, masses, strict=True))
        return [self._mass[n] for n in nodes]

    def _forget_tree(self) -> None:
        self._tree = TokenTree()
        self._rows: dict[int, torch.Tensor] = {}
        self._mass: dict[int, torch.Tensor] = {}


class PackedContext(Context):
    """All branches behind one cached trunk, in one forward, each token seeing the trunk and its own ancestors."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self._row: CacheRow | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        self.prompt = tuple(prompt)
        self._row = self.runner.pool.row(len(prompt) + _TREE_ROOM)
        self.unread = len(prompt) - self.runner.prefixes.fill(self._row, self.prompt)

    def release(self, remember: bool = False) -> None:
        if self._row is not None:
            if remember and not self.unread:
                self.runner.prefixes.store(self._row, self.prompt + self.answer)
            self._row.free()
        self._row, self._end = None, None
        self._forget_tree()

    def job(self, feed: Feed) -> tuple[Segment, list[int]] | None:
        """The segment to feed and its nodes (none for a piece of the prompt); None if all is known already."""
        assert self._row is not None, "the context was released"
        if feed.prompt:
            start = len(self.prompt) - self.unread
            ids = self.prompt[start : start + feed.prompt]
            return Segment(self._row, ids, wanted=int(len(ids) == self.unread)), []
        paths = [self._path(branch) for branch in feed.branches]
        nodes = sorted({node for path in paths for node in path if node not in self._rows})
        if not nodes:
            return None
        for slot, node in enumerate(nodes, start=self._row.used):
            self._tree.nodes[node].slot = slot
        visible, positions = self._visible(nodes)
        tokens = [self._tree.nodes[n].token for n in nodes]
        return Segment(self._row, tokens, visible, positions, wanted=len(nodes)), nodes

    def take(self, nodes: Sequence[int], rows: torch.Tensor) -> None:
        """Logits (nodes, V) of a fed job; those of a prompt's last token become the trunk's end."""
        if nodes:
            self._rows.update(zip(nodes, rows, strict=True))
            self.fed += len(nodes)
            self._fed_nodes += nodes
            return
        assert self._row is not None
        self.unread = len(self.prompt) - self._row.used
        if not self.unread:
            self._end = rows[-1]

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


def feed_together(feeds: Sequence[Feed]) -> None:
    """Run what contexts of one model ask for: packed ones in one forward, others one after another."""
    jobs: list[tuple[PackedContext, Segment, list[int]]] = []
    for feed in feeds:
        if not isinstance(feed.context, PackedContext):
            feed.context.feed_alone(feed)
        elif (job := feed.context.job(feed)) is not None:
            jobs.append((feed.context, *job))
    if jobs:
        found = jobs[0][0].runner.step([segment for _, segment, _ in jobs])
        for (context, _, nodes), rows in zip(jobs, found, strict=True):
            context.take(nodes, rows)
