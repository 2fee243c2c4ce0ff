"""Stages on their way: each waits for a feed, and those of one member are fed together, whatever fails.

A feed that fails in company is run alone, so that one poisoned request fails alone; lack of memory halves the batch,
then takes back what only saves time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specfuse_shared.members.base import Stage
from specfuse_shared.members.sequence import ForwardRequest, feed_together

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Job:
    """A stage of one member of one request, and the feed that it waits for."""

    stage: Stage
    feed: ForwardRequest | None = None
    outcome: Any = None
    done: bool = False

    def advance(self) -> None:
        """Run the stage up to its next feed that needs a forward, or to its end."""
        try:
            feed = next(self.stage)
            while not feed.context.needs(feed):
                feed = next(self.stage)
            self.feed = feed
        except StopIteration as stop:
            self.outcome, self.done = stop.value, True
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        self.outcome, self.done = error, True


def within(chunk: int, jobs: Sequence[Job]) -> list[Job]:
    """The jobs of a step, their prompt pieces trimmed to `chunk` tokens; those beyond it wait for the next step."""
    chosen = []
    for job in jobs:
        if job.feed is not None and job.feed.prompt:
            if chunk <= 0:
                continue
            job.feed = replace(job.feed, prompt=min(job.feed.prompt, chunk))
            chunk -= job.feed.prompt
        chosen.append(job)
    return chosen


def feed_all(jobs: Sequence[Job], is_last_try: bool = False) -> None:
    """Feed together; after a failure apart, and on lack of memory in halves and without what only saves time."""
    try:
        feed_together([job.feed for job in jobs if job.feed is not None])
    except Exception as error:
        if len(jobs) > 1:
            size = (len(jobs) + 1) // 2 if is_out_of_memory(error) else 1
            logger.warning("a forward of %d answers failed (%s); feeding %d at a time", len(jobs), error, size)
            for start in range(0, len(jobs), size):
                feed_all(jobs[start : start + size])
        elif is_out_of_memory(error) and not is_last_try:
            assert jobs[0].feed is not None
            jobs[0].feed.context.runner.free_reclaimable()
            feed_all(jobs, is_last_try=True)
        else:
            jobs[0].fail(error)


@torch.inference_mode()
def run_stage(stage: Stage) -> Any:
    """Run one stage by itself; its result, or the exception that it raised."""
    job = Job(stage)
    job.advance()
    while not job.done:
        feed_all([job])
        if not job.done:
            job.advance()
    return job.outcome


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and ("out of memory" in str(error) or "can't allocate memory" in str(error))
