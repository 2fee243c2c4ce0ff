"""What a sequence wants to go through its model, and what it is sent for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specfuse_shared.members.token_tree import Branch
from specfuse_shared.runtime.logprobs import PendingLogprobs
from specfuse_shared.runtime.sampler import Sampler
from specfuse_shared.runtime.static.runner import DraftRun
from specfuse_shared.runtime.top_tokens import TopTokens

if TYPE_CHECKING:
    from specfuse_shared.members.local.sequence import SequenceState

Place = tuple[TopTokens, int]
"""Where the likeliest token behind a node is told."""
PREFILL_CHUNK = 1024
"""Tokens of a prompt in one forward."""
_ROW_BITS = 24


class NodeLogits:
    """The logits behind the nodes of a tree that were fed, and where the likeliest token behind each is told.

    They stay together as the forward gave them, and a node is a number here: thousands of nodes a round would otherwise
    be as many objects for the garbage collector to look at.
    """

    def __init__(self) -> None:
        self.places: dict[int, int] = {}
        """Of every node that was fed: the number of its feed, and its row there."""
        self._feeds: dict[int, tuple[Callable[[int], torch.Tensor], TopTokens | None, int]] = {}
        self._count = 0

    def add(
        self,
        nodes: Sequence[int],
        row: Callable[[int], torch.Tensor],
        likeliest: TopTokens | None = None,
        first: int = 0,
    ) -> None:
        """One feed: `row` gives the logits (V) behind each; `likeliest` tells their tokens from its row `first` on."""
        start = self._count << _ROW_BITS
        self.places.update(zip(nodes, range(start, start + len(nodes)), strict=True))
        self._feeds[self._count] = row, likeliest, first
        self._count += 1

    def row(self, node: int) -> torch.Tensor:
        """Logits (V) behind a node."""
        feed, row = divmod(self.places[node], 1 << _ROW_BITS)
        return self._feeds[feed][0](row)

    def likeliest(self, node: int) -> Place | None:
        """Where the likeliest token behind a node is told, if it is."""
        feed, row = divmod(self.places[node], 1 << _ROW_BITS)
        _, told, first = self._feeds[feed]
        return None if told is None else (told, first + row)

    def moved(self, numbers: Mapping[int, int]) -> NodeLogits:
        """What is known of the nodes that have a new number, by that."""
        moved = NodeLogits()
        moved.places = {new: self.places[old] for old, new in numbers.items()}
        feeds = {place >> _ROW_BITS for place in moved.places.values()}
        moved._feeds, moved._count = {feed: self._feeds[feed] for feed in feeds}, self._count
        return moved


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """`count` tokens to choose and feed behind `branch` in one go, without the host in between."""

    branch: Branch
    count: int
    sampler: Sampler
    blocked: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The tokens of a draft, still on the device: column `column` of the run that fed it."""

    run: DraftRun
    column: int


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """Branches to judge once they are fed, and the stop ids of those that end.

    `top`: so many of the most probable tokens in the place of each are found, too.
    """

    questions: Sequence[tuple[Branch, Sequence[int]]]
    top: int = 0


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """What a sequence wants to go through the model: the next `prompt` tokens of its prompt, branches, or a draft.

    `guesses` go along, where anything goes at all.
    What comes back: `ChosenTokens` of a draft; with `logprobs` a `PendingLogprobs`; else the logits (V) behind the last
    branch, or None behind a piece of the prompt.
    """

    sequence: SequenceState
    branches: tuple[Branch, ...] = ()
    prompt: int = 0
    draft: DraftRequest | None = None
    logprobs: LogprobRequest | None = None
    guesses: tuple[Branch, ...] = ()


ForwardResult = torch.Tensor | PendingLogprobs | ChosenTokens | None
