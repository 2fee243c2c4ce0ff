"""A member's cached context of one answer: a committed trunk, and the tree of tokens tried in this round.

`Context` is what a member needs of a model: prefill once, make the next-token logits known along branches, keep
the winner. `PackedContext` does it with one forward for any number of branches. It knows ids, not text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specfuse_shared.cache import GrowingCache
from specfuse_shared.tree import ROOT, Branch, TokenTree

if TYPE_CHECKING:
    from specfuse_shared.runner import ModelRunner


class Context(ABC):
    """The state of one answer in one model.

    `prompt` is frozen; `answer` are the committed answer ids; the cache always holds exactly `prompt + answer`
    between rounds. `fed` counts the tokens that went through the model after the prompt.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.prompt: tuple[int, ...] = ()
        self.answer: tuple[int, ...] = ()
        self.fed = 0
        self._end: torch.Tensor | None = None
        self._forget_tree()

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.prompt) + len(self.answer)

    def prefill(self, prompt: Sequence[int]) -> None:
        """Feed the prompt, once."""
        self.prompt = tuple(prompt)
        self._end = self._prefill(self.prompt)

    def extend(self, branches: Sequence[Branch]) -> None:
        """Make the next-token logits known after every token of each branch, feeding only what is new."""
        paths = [self._path(b) for b in branches]
        if any(node not in self._rows for path in paths for node in path):
            self._feed(paths)

    def logits(self, branch: Branch) -> torch.Tensor:
        """Next-token logits (V) after the branch, which must have been extended."""
        path = self._path(branch)
        return self._row(path[-1] if path else ROOT)

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
        picks = [self._row(n)[t].float() - m for n, t, m in zip(chain, branch.tokens, masses, strict=False)]
        if stop_ids:
            picks.append(self._row(chain[-1])[list(stop_ids)].float().logsumexp(0) - masses[-1])
        return [float(v) for v in torch.stack(picks).tolist()]

    def commit(self, branch: Branch) -> None:
        """The branch becomes the trunk; every other branch is dropped."""
        self.extend([branch])
        path = self._path(branch)
        end = self._row(path[-1] if path else ROOT).clone()
        self._keep(branch, path[len(path) - len(branch.tokens) :])
        self.answer = self.answer[: branch.base] + branch.tokens
        self._end = end
        self._forget_tree()

    @abstractmethod
    def release(self) -> None:
        """Free the cache."""

    @abstractmethod
    def _prefill(self, prompt: Sequence[int]) -> torch.Tensor:
        """Feed the prompt; return the logits (V) after it."""

    @abstractmethod
    def _feed(self, paths: Sequence[Sequence[int]]) -> None:
        """Feed every node without a row on these paths and store its row."""

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

    def _row(self, node: int) -> torch.Tensor:
        if node == ROOT:
            assert self._end is not None, "prefill comes first"
            return self._end
        return self._rows[node]

    def _masses(self, nodes: Sequence[int]) -> list[torch.Tensor]:
        """log Σ exp of each node's logits in float32, computed once a round."""
        missing = [n for n in nodes if n not in self._mass]
        if missing:
            block = torch.stack([self._row(n) for n in missing]).float()
            self._mass.update(zip(missing, block.logsumexp(-1), strict=True))
        return [self._mass[n] for n in nodes]

    def _forget_tree(self) -> None:
        self._tree = TokenTree()
        self._rows: dict[int, torch.Tensor] = {}
        self._mass: dict[int, torch.Tensor] = {}


class PackedContext(Context):
    """All branches behind one cached trunk, in one forward, each token seeing the trunk and its own ancestors."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self._cache = GrowingCache()
        self._fed_nodes: list[int] = []

    def release(self) -> None:
        self._cache, self._end = GrowingCache(), None
        self._forget_tree()

    def _prefill(self, prompt: Sequence[int]) -> torch.Tensor:
        return self._runner.prefill(prompt, self._cache)

    def _feed(self, paths: Sequence[Sequence[int]]) -> None:
        nodes = sorted({node for path in paths for node in path if self._tree.nodes[node].slot is None})
        for slot, node in enumerate(nodes, start=self.length + len(self._fed_nodes)):
            self._tree.nodes[node].slot = slot
        self._fed_nodes += nodes
        visible, positions = self._visible(nodes)
        rows = self._runner.step([self._tree.nodes[n].token for n in nodes], visible, positions, self._cache)
        self._rows.update(zip(nodes, rows, strict=True))
        self.fed += len(nodes)

    def _visible(self, nodes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Which slots (K) each new node (Q) sees, and the position of every slot; the queries are the last Q slots."""
        tree, total = self._tree.nodes, self.length + len(self._fed_nodes)
        visible = torch.zeros(len(nodes), total, dtype=torch.bool)
        for row, node in enumerate(nodes):
            visible[row, : tree[node].trunk] = True
            visible[row, [tree[a].slot for a in self._tree.lineage(node)]] = True
        positions = torch.arange(total)
        positions[self.length :] = torch.tensor([tree[n].position for n in self._fed_nodes])
        return visible, positions

    def _keep(self, branch: Branch, nodes: Sequence[int]) -> None:
        slots = [slot for n in nodes if (slot := self._tree.nodes[n].slot) is not None]
        self._cache.keep(len(self.prompt) + branch.base, slots)

    def _forget_tree(self) -> None:
        super()._forget_tree()
        self._fed_nodes = []
