"""Sequences of a runner whose steps are captured."""

from __future__ import annotations

from typing import Any

import torch

from specfuse_shared import SamplingParams
from specfuse_shared.members.local.sequence import (
    ChosenTokens,
    DraftRequest,
    ForwardRequest,
    SequenceState,
    feed_together,
    new_sequence,
)
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.runtime.cuda_graphs import Graphs
from specfuse_shared.runtime.model_runner import ModelRunner
from specfuse_shared.runtime.sampler import Sampler


def paged_runner(model: Any, like: ModelRunner, reason: str | None = None) -> ModelRunner:
    """A runner over 200 pages, with the plan and slots of another one; with a `reason`, it captures nothing."""
    graphs = Graphs(model.device, "tiny", reason)
    return ModelRunner(model, like.plan, slots=like.pool.slots, graphs=graphs, pages=200)


def opened(runner: ModelRunner, seed: int, size: int = 40) -> SequenceState:
    sequence = new_sequence(runner)
    generator = torch.Generator().manual_seed(seed)
    sequence.prefill(torch.randint(10, 250, (size,), generator=generator).tolist())
    return sequence


def drafted(sequences: list[SequenceState], count: int = 5) -> list[list[int]]:
    """Greedy drafts of all, which become their trunks."""
    drafts = []
    for sequence in sequences:
        runner: Any = sequence.runner
        sampler = Sampler(SamplingParams(), 0, "", runner.device)
        drafts.append(DraftRequest(Branch(len(sequence.answer), ()), count, sampler))
    result = feed_together([ForwardRequest(c, draft=draft) for c, draft in zip(sequences, drafts, strict=True)])
    ids = []
    for sequence, draft, chosen in zip(sequences, drafts, result, strict=True):
        assert isinstance(chosen, ChosenTokens)
        ids.append(sequence.drafted(draft, chosen, ())[0])
        sequence.commit(Branch(draft.branch.base, tuple(ids[-1])))
    return ids
