"""Batched stages: stages of one member share forward passes, and failures are isolated.

A stage is a coroutine that yields a `ForwardRequest`, is sent the `ForwardResult`, and returns its value. A batch that
fails is repeated one by one, so that a faulty request fails alone. If memory runs out, the batch is halved, then
optional buffers are freed.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch

from specfuse_shared.members.local.sequence import ForwardRequest, ForwardResult, SequenceState, feed_together
from specfuse_shared.runtime.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

_MOST_TRIES = 16
"""Number of out-of-memory errors that one forward pass survives: each frees something, in the end every member's
steps."""

T = TypeVar("T")
Stage: TypeAlias = Generator[ForwardRequest, Any, T]
"""A stage of one member of one answer; it is sent the `ForwardResult` of each request that it yields."""


@dataclass(slots=True, eq=False)
class Job:
    """A stage, its pending forward pass and result; in the end its value or its error."""

    stage: Stage[Any]
    request: ForwardRequest | None = None
    result: ForwardResult = None
    value: Any = None
    error: Exception | None = None
    done: bool = False

    def advance(self) -> None:
        """Run the stage up to its next request for a forward pass, or to its end."""
        try:
            request = self.stage.send(self.result)
            while not request.sequence.needs(request):
                [logits] = feed_together([request])
                request = self.stage.send(logits)
            self.request, self.result = request, None
        except StopIteration as stop:
            self.value, self.done = stop.value, True
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        self.error, self.done = error, True


def share_prompt_tokens(jobs: Sequence[Job], budget: int, ride_limit: int, short: int = 0) -> list[Job]:
    """The jobs of a forward pass, with pieces of prompts trimmed to `budget` tokens in total; the rest waits.

    The shortest prompts go first, to their end if that takes at most `short` tokens, independent of the budget. If
    some are read to their end, the others get `beside` tokens at most, because those answers are waiting. The oldest
    prompt gets a quarter of the rest, so that it is not starved. A prompt that shares a prefix with an earlier one
    waits until the prefix has been read.
    """
    reading = [job for job in jobs if job.request is not None and job.request.prompt]
    lefts = {id(job): _sequence(job).prompt_to_read for job in reading}  # once: each looks at all that begin alike
    readers: list[Job] = []
    for job in sorted(reading, key=lambda job: lefts[id(job)]):
        own_left = lefts[id(job)]
        if not any(_sequence(job).waits_for(_sequence(reader), own_left, lefts[id(reader)]) for reader in readers):
            readers.append(job)
    pieces: dict[int, int] = {}
    whole = max(budget, short)
    for job in readers:
        if lefts[id(job)] <= whole:
            pieces[id(job)] = lefts[id(job)]
            whole -= lefts[id(job)]
    budget_left = max(0, budget - sum(pieces.values()))
    if pieces:
        budget_left = min(budget_left, ride_limit)
    rest = [job for job in readers if id(job) not in pieces]
    oldest = next((job for job in reading if job in rest), None)
    if oldest is not None and budget_left:
        pieces[id(oldest)] = max(1, budget_left // 4)
        budget_left -= pieces[id(oldest)]
    for job in rest:
        if more := min(lefts[id(job)] - pieces.get(id(job), 0), budget_left):
            pieces[id(job)] = pieces.get(id(job), 0) + more
            budget_left -= more
    for job in readers:
        assert job.request is not None
        job.request = replace(job.request, prompt=pieces.get(id(job), 0) or job.request.prompt)
    return [job for job in jobs if job not in reading or id(job) in pieces]


def _sequence(job: Job) -> SequenceState:
    assert job.request is not None
    return job.request.sequence


def feed_all(jobs: Sequence[Job], tries: int = _MOST_TRIES) -> None:
    """Feed together; after a failure one by one; if memory runs out, in halves and without optional buffers."""
    try:
        results = feed_together([job.request for job in jobs if job.request is not None])
    except Exception as error:
        if len(jobs) > 1:
            size = (len(jobs) + 1) // 2 if is_out_of_memory(error) else 1
            logger.warning("a forward pass of %d answers failed (%s); feeding %d at a time", len(jobs), error, size)
            for start in range(0, len(jobs), size):
                feed_all(jobs[start : start + size])
        elif is_out_of_memory(error) and tries and (_make_room(jobs[0]) or tries == _MOST_TRIES):
            feed_all(jobs, tries - 1)
        else:
            jobs[0].fail(error)
        return
    for job, result in zip(jobs, results, strict=True):
        job.result = result


def _make_room(job: Job) -> bool:
    """Whether something could be given back for the job's forward."""
    assert job.request is not None
    return job.request.sequence.runner.pool.reclaim_memory()


@torch.inference_mode()
def run_stage(stage: Stage[T]) -> T | Exception:
    """Run one stage by itself; its value, or the exception that it raised."""
    job = Job(stage)
    job.advance()
    while not job.done:
        feed_all([job])
        if not job.done:
            job.advance()
    return job.error or job.value
