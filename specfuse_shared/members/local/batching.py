"""Batched stages: stages of one member share forward passes, and failures are isolated.

A batch that fails is repeated one by one, so that a faulty request fails alone. If memory runs out, the batch is
halved, then optional buffers are freed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from traceback import clear_frames
from typing import Any, TypeVar, cast

import torch

from specfuse_shared.members.local.sequence import ForwardRequest, ForwardResult, SequenceState, feed_together
from specfuse_shared.members.session import Stage
from specfuse_shared.members.work import Work
from specfuse_shared.runtime.out_of_memory import is_out_of_memory
from specfuse_shared.runtime.pages import OutOfPagesError

logger = logging.getLogger(__name__)

_MOST_TRIES = 16
"""Number of out-of-memory errors that one forward pass survives: each frees something, in the end every member's
steps."""

T = TypeVar("T")
W = TypeVar("W", bound="StageWork[Any]")


class StageWork(Work[ForwardRequest, ForwardResult, T]):
    """A stage of one member for one answer, its pending forward pass, and that one's `result`."""

    __slots__ = ("result",)

    def __init__(self, stage: Stage[T]) -> None:
        super().__init__(stage)
        self.result: ForwardResult = None

    def advance(self) -> None:
        """Run the stage up to its next forward pass, or to its end. What needs no forward pass is answered at once."""
        result, self.result = self.result, None
        self.resume(result)
        try:
            while self.pending is not None and not self.pending.sequence.needs(self.pending):
                [result] = feed_together([self.pending])
                self.resume(result)
        except Exception as error:
            self.fail(error)

    @property
    def is_draft(self) -> bool:
        """Whether it waits for a draft of several tokens in one run."""
        return self.pending is not None and self.pending.draft is not None

    @property
    def is_branch(self) -> bool:
        """Whether it waits for the logits of branches."""
        return self.pending is not None and bool(self.pending.branches)

    @property
    def is_reading(self) -> bool:
        """Whether it waits for a piece of its prompt."""
        return self.pending is not None and bool(self.pending.prompt)


def share_prompt_tokens(works: Sequence[W], budget: int, ride_limit: int, short: int = 0) -> list[W]:
    """The stages of a forward pass, with pieces of prompts trimmed to `budget` tokens in total; the rest waits.

    The shortest prompts go first, to their end if that takes at most `short` tokens, independent of the budget. If
    some are read to their end, the others get `ride_limit` tokens at most, because those wait. The oldest
    prompt gets a quarter of the rest, so that it is not starved. A prompt that shares a prefix with an earlier one
    waits until the prefix has been read.
    """
    reading = [work for work in works if work.is_reading]
    lefts = {work: _sequence(work).prompt_to_read for work in reading}  # once: each looks at all that begin alike
    readers: list[W] = []
    for work in sorted(reading, key=lambda work: lefts[work]):
        own_left = lefts[work]
        if not any(_sequence(work).waits_for(_sequence(reader), own_left, lefts[reader]) for reader in readers):
            readers.append(work)
    pieces: dict[W, int] = {}
    whole = max(budget, short)
    for work in readers:
        if lefts[work] <= whole:
            pieces[work] = lefts[work]
            whole -= lefts[work]
    budget_left = max(0, budget - sum(pieces.values()))
    if pieces:
        budget_left = min(budget_left, ride_limit)
    rest = [work for work in readers if work not in pieces]
    oldest = next((work for work in reading if work in rest), None)
    if oldest is not None and budget_left:
        pieces[oldest] = max(1, budget_left // 4)
        budget_left -= pieces[oldest]
    for work in rest:
        if more := min(lefts[work] - pieces.get(work, 0), budget_left):
            pieces[work] = pieces.get(work, 0) + more
            budget_left -= more
    for work in readers:
        assert work.pending is not None
        work.pending = replace(work.pending, prompt=pieces.get(work, 0) or work.pending.prompt)
    return [work for work in works if work not in reading or work in pieces]


def _sequence(work: StageWork[Any]) -> SequenceState:
    assert work.pending is not None
    return work.pending.sequence


def feed_all(works: Sequence[StageWork[Any]], tries: int = _MOST_TRIES) -> None:
    """Feed together; after a failure one by one; if memory runs out, in halves and without optional buffers."""
    try:
        results = feed_together([work.pending for work in works if work.pending is not None])
    except Exception as error:
        if is_out_of_memory(error):
            clear_frames(error.__traceback__)  # they hold tensors and graphs, which must go before the next try
        if len(works) > 1:
            size = (len(works) + 1) // 2 if is_out_of_memory(error) else 1
            logger.warning("a forward pass of %d answers failed (%s); feeding %d at a time", len(works), error, size)
            for start in range(0, len(works), size):
                feed_all(works[start : start + size])
        elif is_out_of_memory(error) and tries and (_make_room(works[0], error) or tries == _MOST_TRIES):
            feed_all(works, tries - 1)
        else:
            works[0].fail(error)
        return
    for work, result in zip(works, results, strict=True):
        work.result = result


def _make_room(work: StageWork[Any], error: Exception) -> bool:
    """Free memory for the work's forward pass; whether there was any. No other memory is of use for a page."""
    assert work.pending is not None
    return not isinstance(error, OutOfPagesError) and work.pending.sequence.runner.pool.reclaim_memory()


@torch.inference_mode()
def run_stage(stage: Stage[T]) -> T | Exception:
    """Run one stage by itself; its value, or the exception that it raised."""
    work = StageWork(stage)
    work.advance()
    while not work.done:
        feed_all([work])
        if not work.done:
            work.advance()
    return work.error or cast(T, work.value)
