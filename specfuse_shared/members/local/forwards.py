"""What a sequence wants to go through its model, and what it is sent for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specfuse_shared.members.token_tree import Branch
from specfuse_shared.runtime.logprobs import PendingLogprobs
from specfuse_shared.runtime.sampler import Sampler
from specfuse_shared.runtime.static.runner import DraftRun

if TYPE_CHECKING:
    from specfuse_shared.members.local.sequence import SequenceState

PREFILL_CHUNK = 1024
"""Tokens of a prompt in one forward."""


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
