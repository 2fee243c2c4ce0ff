"""Many answers at once: one worker runs every member's stages of all running answers in shared forwards.

Answers join and leave between two forwards. A stage asks for feeds (`specfuse_shared.members.sequence.ForwardRequest`);
a step of a member runs the feeds of all its answers together: some draft, some verify, some still read their prompt. A
feed that fails in company is run alone, so that one poisoned request fails alone. Members step at the same time where
they can (`specfuse_shared.members.lanes`); the answers themselves go on in the worker alone.

Members of static execution draft a whole segment in one feed, so their answers join and leave between two segments.
Such drafts wait within a turn until those who verify have committed, so that all draft together.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from specfuse_shared.errors import (
    EngineBusyError,
    EngineClosedError,
    GenerationError,
    RequestTimeoutError,
    SpecFuseError,
)
from specfuse_shared.events import Event
from specfuse_shared.fusion.session import AnswerSession, Work
from specfuse_shared.members.base import Member
from specfuse_shared.members.jobs import Job, feed_all, run_stage, within
from specfuse_shared.members.lanes import Lanes
from specfuse_shared.members.sequence import PREFILL_CHUNK, ForwardRequest
from specfuse_shared.serving.admission import Budget
from specfuse_shared.serving.metrics import Metrics

logger = logging.getLogger(__name__)

SHARED_PREFILL_CHUNK = 256
"""Prompt tokens a step while other answers run, so that they keep streaming; a step that drafts ahead takes more."""

Deliver = Callable[[Event | Exception], None]
Wanted = Callable[[ForwardRequest], bool]


@dataclass(eq=False)
class Request:
    """One answer in the scheduler; `deliver` is called from the worker with its events, last with its end."""

    session: AnswerSession
    deliver: Deliver
    deadline: float | None = None
    needs: dict[str, int] = field(default_factory=dict)
    submitted: float = field(default_factory=time.monotonic)
    work: Work | None = None
    jobs: dict[str, Job] = field(default_factory=dict)
    cancelled: bool = False
    over: bool = False


class Scheduler:
    """Owns the worker thread of an engine. Every method may be called from any thread."""

    def __init__(self, members: Sequence[Member], budget: Budget, metrics: Metrics) -> None:
        self._lanes, self._budget, self._metrics = Lanes[list[Request]](members), budget, metrics
        self._changed = threading.Condition()
        self._queue: deque[Request] = deque()
        self._running: list[Request] = []
        self._closed: Exception | None = None
        self._process = os.getpid()
        self._worker = threading.Thread(target=self._work, name="specfuse", daemon=True)
        self._worker.start()

    def submit(self, request: Request, wait: bool) -> None:
        """Queue a request. A full queue is waited for, or raises `EngineBusyError`."""
        request.needs = self._budget.needs(request.session)
        with self._changed:
            self._check_open()
            limit = self._budget.max_queue
            while len(self._queue) >= limit:
                if not wait:
                    raise EngineBusyError(
                        f"{len(self._queue)} requests wait already (max_queue={limit}) and {len(self._running)} run: "
                        f"try again later, or set when_busy='wait'"
                    )
                left = None if request.deadline is None else request.deadline - time.monotonic()
                if not self._changed.wait(left):
                    raise RequestTimeoutError("the timeout passed while the request waited for a place", text="")
                self._check_open()
            self._queue.append(request)
            self._changed.notify_all()

    def cancel(self, request: Request) -> None:
        """Stop a request before its next forward and free its caches. Safe to call twice and after its end."""
        with self._changed:
            request.cancelled = True
            self._changed.notify_all()

    def close(self) -> None:
        """End every request with `EngineClosedError` and stop the worker."""
        if self._process != os.getpid():
            return  # a fork has no worker, and its copy of the lock may never be free
        with self._changed:
            if self._closed is None:
                self._closed = EngineClosedError()
            self._changed.notify_all()
        if threading.current_thread() is not self._worker:
            self._worker.join()

    @property
    def load(self) -> tuple[int, int]:
        """Requests that run and that wait."""
        with self._changed:
            return len(self._running), len(self._queue)

    # ── the worker ───────────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        try:
            with torch.inference_mode():
                while self._await_work():
                    self._turn()
        except BaseException as error:
            logger.exception("the engine's worker stopped")
            with self._changed:
                self._closed = EngineClosedError(f"the engine's worker stopped ({type(error).__name__}: {error})")
                self._changed.notify_all()
        for request in [*self._running, *self._queue]:
            self._end(request, EngineClosedError(str(self._closed), text=request.session.text))
        self._running.clear()
        self._queue.clear()
        self._lanes.close()

    def _await_work(self) -> bool:
        """Sort out who runs; wait while nobody does; False once the scheduler is closed."""
        with self._changed:
            while self._closed is None:
                self._remove_stopped()
                admitted = self._admit()
                if self._running:
                    break
                self._changed.wait(self._next_deadline())
            else:
                return False
        for request in admitted:
            self._start(request)
        return True

    def _remove_stopped(self) -> None:
        now = time.monotonic()
        for request in [*self._running, *self._queue]:
            if not (request.over or request.cancelled or (request.deadline or now) < now):
                continue
            if request in self._running:
                self._running.remove(request)
                self._budget.free(request.needs)
            else:
                self._queue.remove(request)
            if not request.over:
                self._end(request, None if request.cancelled else RequestTimeoutError.of(request.session.text))
            self._changed.notify_all()

    def _admit(self) -> list[Request]:
        """Let queued requests in, in order, as far as memory and `max_concurrent` allow."""
        admitted: list[Request] = []
        while self._queue and self._budget.take(self._queue[0].needs, len(self._running)):
            request = self._queue.popleft()
            self._running.append(request)
            admitted.append(request)
            self._metrics.started(time.monotonic() - request.submitted)
            self._changed.notify_all()
        return admitted

    def _next_deadline(self) -> float | None:
        deadlines = [r.deadline for r in self._queue if r.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _start(self, request: Request) -> None:
        request.work = request.session.run()
        self._advance(request, None)

    def _turn(self) -> None:
        """One forward of every member for all that is known; then, if some draft ahead, for them."""
        self._run(lambda feed: feed.draft is None)
        jobs = [job for request in self._running for job in request.jobs.values() if not job.done]
        if any(job.feed is not None and job.feed.draft for job in jobs):
            self._run(lambda feed: bool(feed.branches))
            self._run(lambda feed: feed.draft is not None)

    def _run(self, wanted: Wanted) -> None:
        """A forward of every member; then the answers that have all they waited for go on."""
        step = partial(self._step, wanted=wanted, chunk=self._prefill_chunk())
        for request in itertools.chain(*self._lanes.turn(step)):
            self._advance_if_ready(request)

    def _prefill_chunk(self) -> int:
        """Prompt tokens of the next step: few where an answer that has begun would wait for them."""
        feeds = [job.feed for request in self._running for job in request.jobs.values() if job.feed is not None]
        begun = any(request.session.rounds for request in self._running)
        if begun and len(self._running) > 1 and not any(feed.context.drafts_ahead for feed in feeds):
            return SHARED_PREFILL_CHUNK
        return PREFILL_CHUNK

    def _step(self, members: Sequence[Member], wanted: Wanted, chunk: int) -> list[Request]:
        """A forward of members in turn, then what each gave: a device goes on computing while the host reads.

        Changes their own jobs and nothing else, because other members may step meanwhile; returns whose they are.
        """
        fed = [pair for member in members for pair in self._feed(member, wanted, chunk)]
        for _, job in fed:
            if not job.done:
                job.advance()
        return [request for request, _ in fed]

    def _feed(self, member: Member, wanted: Wanted, chunk: int) -> list[tuple[Request, Job]]:
        """One forward of a member for what its answers wait for and is wanted now; those answers and their jobs."""
        waiting = [(r, job) for r in self._running if (job := r.jobs.get(member.name)) and not job.done]
        waiting = [(r, job) for r, job in waiting if not (r.over or r.cancelled) and job.feed and wanted(job.feed)]
        jobs = within(chunk, [job for _, job in waiting])
        if not jobs:
            return []
        began = time.monotonic()
        feed_all(jobs)
        self._metrics.forward(member.name, len(jobs), time.monotonic() - began)
        return [(request, job) for request, job in waiting if job in jobs]

    def _advance_if_ready(self, request: Request) -> None:
        while not request.over and request.jobs and all(job.done for job in request.jobs.values()):
            self._advance(request, {name: job.outcome for name, job in request.jobs.items()})

    def _advance(self, request: Request, outcomes: Any) -> None:
        """Give an answer what its members found; start what it wants next."""
        session, work = request.session, request.work
        assert work is not None
        request.jobs = {}
        try:
            stages = work.send(outcomes)
            request.jobs = {name: Job(stage) for name, stage in stages.items()}
            for job in request.jobs.values():
                job.advance()
        except StopIteration:
            self._deliver(request)
            self._finish(request)
            return
        except SpecFuseError as error:
            self._fail(request, error)
            return
        except Exception as error:
            cause = GenerationError(
                f"the answer failed: {type(error).__name__}: {error}", member=None, text=session.text
            )
            cause.__cause__ = error
            self._fail(request, cause)
            return
        self._deliver(request)
        if outcomes is None:
            self._advance_if_ready(request)

    def _deliver(self, request: Request) -> None:
        for event in _taken(request.session):
            self._metrics.observe(event)
            self._send(request, event)

    def _finish(self, request: Request) -> None:
        request.over = True
        request.session.release()
        self._metrics.ended("finished")

    def _fail(self, request: Request, error: Exception) -> None:
        self._deliver(request)
        self._end(request, error)

    def _end(self, request: Request, error: Exception | None) -> None:
        """Close a request early and free its caches; `error` None: it was cancelled, nobody listens."""
        request.over = True
        if request.work is not None:
            request.work.close()
        for job in request.jobs.values():
            job.stage.close()
        request.session.release()
        self._metrics.ended("cancelled" if error is None else "failed")
        self._send(request, error or EngineClosedError("the request was cancelled"))

    def _send(self, request: Request, item: Event | Exception) -> None:
        try:
            request.deliver(item)
        except Exception as error:  # a listener whose event loop is gone must not harm the others
            logger.debug("nobody listens to a request any more: %s", error)
            request.cancelled = True

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed


def run_alone(session: AnswerSession) -> Iterator[Event]:
    """Run one answer in this thread, without a scheduler; its events as they come."""
    work, outcomes = session.run(), None
    while True:
        try:
            stages = work.send(outcomes)
        except StopIteration:
            yield from _taken(session)
            return
        yield from _taken(session)
        outcomes = {name: run_stage(stage) for name, stage in stages.items()}


def _taken(session: AnswerSession) -> list[Event]:
    events = list(session.events)
    session.events.clear()
    return events
