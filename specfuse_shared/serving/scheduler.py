"""Many answers at once: who may run, what each one's members shall do next, and who listens.

The worker gives the answers what came of their stages, and the lanes (`specfuse_shared.members.stages.Lane`) what the
answers want next, all of it in one submission to each lane, so that stages of many answers share forwards. Lanes run
stages by themselves; only the one without a thread of its own is stepped here, a forward at a time, so that answers
join, leave and are cancelled between two forwards.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence

from specfuse_shared.errors import (
    EngineClosedError,
    GenerationError,
    RequestTimeoutError,
    SpecFuseError,
    UnfinishedValueError,
)
from specfuse_shared.events import Event
from specfuse_shared.fusion.participants import Wanted
from specfuse_shared.members.assembly import Assembly
from specfuse_shared.members.stages import Close, Closed, Open, StageRequest, StageResult
from specfuse_shared.serving.admission import Budget
from specfuse_shared.serving.memory import IdleTrim
from specfuse_shared.serving.places import Places
from specfuse_shared.serving.request import Request
from specfuse_shared.serving.telemetry.metrics import Metrics
from specfuse_shared.serving.traffic import traffic_of

logger = logging.getLogger(__name__)


class LaneDiedError(RuntimeError):
    """A lane of this process broke; nothing can be said of what it ran."""


class Scheduler:
    """Owns the worker thread of an engine. Every method may be called from any thread."""

    def __init__(self, assembly: Assembly, budget: Budget, places: Places, metrics: Metrics) -> None:
        self._assembly = assembly
        self._own = assembly.own
        self._budget = budget
        self._metrics = metrics
        self.places = places
        self.traffic = traffic_of(assembly, metrics, lambda: len(self._running))
        self._changed = threading.Condition()
        self._running: dict[int, Request] = {}
        self._queue = deque[Request]()
        self._arrived = deque[StageResult]()
        self._wanted: list[StageRequest] = []
        self._closed: EngineClosedError | None = None
        self._failure: EngineClosedError | None = None
        self._trim = IdleTrim()
        self._process = os.getpid()
        self._numbers = itertools.count(1)
        for lane in assembly.lanes:
            lane.reply_to(self._take)
        self._worker = threading.Thread(target=self._work, name="specfuse", daemon=True)
        self._worker.start()

    def submit(self, request: Request) -> None:
        """Queue a request, which has a place (`places`) and gives it back when it is over."""
        request.needs = self._budget.needs(request.session)
        with self._changed:
            self._check_open()
            request.number = next(self._numbers)
            self._queue.append(request)
            self._changed.notify_all()

    def cancel(self, request: Request) -> None:
        """Stop a request before its next forward and free its caches. Safe to call twice and after its end."""
        with self._changed:
            request.cancelled = True
            self._changed.notify_all()

    def close(self) -> None:
        """End every request with `EngineClosedError`, stop the worker and close the lanes."""
        if self._process != os.getpid():
            return  # a fork has no worker, and its copy of the lock may never be free
        with self._changed:
            if self._closed is None:
                self._closed = EngineClosedError()
            self._changed.notify_all()
        self.places.close(self._closed)
        if threading.current_thread() is not self._worker:
            self._worker.join()
            self._trim.busy()
            # whoever holds a request, a stream or a metric of it holds no weights
            self._assembly, self._own = Assembly(()), None

    @property
    def failure(self) -> EngineClosedError | None:
        """Why nothing is answered any more although nobody closed it: the worker or a lane broke."""
        if self._failure is None:
            faults = [fault for lane in self._assembly.lanes if (fault := lane.fault) and fault.is_fatal]
            return _broken(faults[0].kind, faults[0].message) if faults else None
        return self._failure

    @property
    def lost_members(self) -> tuple[str, ...]:
        """Members whose lane is gone; answers go on without them."""
        lost = [lane for lane in self._assembly.lanes if lane.fault is not None]
        return tuple(info.name for lane in lost for info in lane.members)

    @property
    def load(self) -> tuple[int, int]:
        """Requests that run and that wait."""
        with self._changed:
            return len(self._running), len(self._queue)

    # ── the worker ───────────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        try:
            while self._await_work():
                self._pass_on()
                if self._own is not None and self._own.patience == 0:
                    self._own.step()
        except BaseException as error:
            logger.exception("the engine's worker stopped")
            with self._changed:
                self._closed = self._failure = _broken(type(error).__name__, str(error))
                self._changed.notify_all()
            self.places.close(self._closed)
        why = self._closed or EngineClosedError()
        for request in [*self._running.values(), *self._queue]:
            if not request.over:
                self._end(request, EngineClosedError(str(why), text=request.session.text, public=why.public))
        self._running.clear()
        self._queue.clear()
        for lane in self._assembly.lanes:
            lane.close()

    def _await_work(self) -> bool:
        """Sort out who runs; wait while there is nothing to do; False once the scheduler is closed."""
        with self._changed:
            while self._closed is None:
                self._remove_stopped()
                admitted = self._admit()
                patience = None if self._own is None else self._own.patience
                if admitted or self._arrived or self._wanted or patience == 0 or self._next_lateness() <= 0:
                    break
                self._changed.wait(min(self._next_deadline(), patience or threading.TIMEOUT_MAX))
            else:
                return False
        for request in admitted:
            request.work = request.session.run()
            self._advance(request)
        return True

    def _remove_stopped(self) -> None:
        now = time.monotonic()
        for request in [*self._running.values(), *self._queue]:
            if request.over or not (request.cancelled or (request.deadline or now) < now):
                continue
            self._end(request, None if request.cancelled else RequestTimeoutError.of(request.session.text))

    def _admit(self) -> list[Request]:
        """Let queued requests in, in order, as far as memory and `max_concurrent` allow."""
        admitted: list[Request] = []
        while self._queue and self._budget.take(self._queue[0].needs, len(self._running)):
            request = self._queue.popleft()
            self._running[request.number] = request
            admitted.append(request)
            self._metrics.started(time.monotonic() - request.submitted)
            self._trim.busy()
        return admitted

    def _next_deadline(self) -> float:
        """Seconds to the first deadline, of an answer or of a round; without one, as long as a lock may wait."""
        ends = [r.deadline for r in (*self._queue, *self._running.values()) if r.deadline is not None and not r.over]
        left = min(ends) - time.monotonic() if ends else threading.TIMEOUT_MAX
        return max(0.0, min(left, self._next_lateness()))

    def _next_lateness(self) -> float:
        """Seconds to when the next member is late; without one, as long as a lock may wait."""
        first = min((request.next_late()[1] for request in self._running.values()), default=math.inf)
        return min(first - time.monotonic(), threading.TIMEOUT_MAX)

    # ── between answers and lanes ────────────────────────────────────────────────────────────────

    def _take(self, results: Sequence[StageResult]) -> None:
        """What a lane found, from any thread."""
        with self._changed:
            self._arrived.extend(results)
            self._changed.notify_all()

    def _pass_on(self) -> None:
        """Give answers what arrived; then every lane what they want next."""
        while self._arrived:
            self._receive(self._arrived.popleft())
        self._go_on_without_late()
        wanted, self._wanted = self._wanted, []
        by_lane: dict[int, list[StageRequest]] = defaultdict(list)
        for request in wanted:
            by_lane[self.traffic.lane_of[request.member]].append(request)
        for number, requests in by_lane.items():
            self._assembly.lanes[number].submit(requests)

    def _receive(self, result: StageResult) -> None:
        if result.error is not None and result.error.is_fatal:
            raise LaneDiedError(f"{result.error.kind}: {result.error.message}")
        request = self._running.get(result.answer)
        if request is None:
            return
        if isinstance(result.value, Closed):
            request.held.discard(result.member)
        if request.over:
            self._remove_if_free(request)
            return
        if result.error is not None:
            request.faulty.add(result.member)
        if result.member in request.closing and not isinstance(result.value, Closed):
            return  # it was late, and is not wanted any more
        if result.member in request.asked:
            request.asked.remove(result.member)
            if result.error is None:
                request.answered[result.member] = time.monotonic()
        elif result.member in request.late:
            request.late.remove(result.member)
        else:
            return
        request.results[result.member] = result
        if not request.asked:
            self._advance(request)

    def _go_on_without_late(self) -> None:
        """Answers whose members are late go on with what the others came to."""
        for request in list(self._running.values()):
            late, at = request.next_late()
            if at > time.monotonic():
                continue
            request.late |= late
            request.asked -= late
            if not request.asked:
                self._advance(request)

    def _advance(self, request: Request) -> None:
        """Give an answer what its members found; note what it wants next."""
        assert request.work is not None
        results, request.results = request.results, {}
        try:
            # a generator takes nothing before its first stages
            wanted = request.work.send(results) if request.begun else next(request.work)
            request.begun = True
        except StopIteration:
            self._finish(request)
        except SpecFuseError as error:
            self._fail(request, error)
        except Exception as error:
            what, text = f"the answer failed: {type(error).__name__}", request.session.text
            cause = GenerationError(f"{what}: {error}", member=None, text=text, public=what)
            cause.__cause__ = error
            self._fail(request, cause)
        else:
            self._want(request, wanted)
            self._deliver(request)
            if not request.asked and not request.late:
                self._advance(request)

    def _want(self, request: Request, wanted: Wanted) -> None:
        ops = wanted.ops
        request.asked, request.answered = set(ops) - wanted.unwaited, {}
        request.late -= ops.keys()
        request.round_deadline = wanted.deadline
        opening = {name for name, op in ops.items() if isinstance(op, Open)}
        request.held |= opening
        request.closing = (request.closing - opening) | {n for n, op in ops.items() if isinstance(op, Close)}
        self._wanted += [StageRequest(request.number, name, op) for name, op in ops.items()]

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, request: Request) -> None:
        """The session has let its caches go already."""
        request.over = True
        self._metrics.ended("finished")
        self._remove_if_free(request)
        self._deliver(request)

    def _fail(self, request: Request, error: Exception) -> None:
        self._deliver(request)
        self._end(request, error)

    def _end(self, request: Request, error: Exception | None) -> None:
        """End a request early and have its caches freed; `error` None: it was cancelled, nobody listens."""
        request.over = True
        if request.work is not None:
            request.work.close()
        self._wanted = [w for w in self._wanted if w.answer != request.number or isinstance(w.op, Close)]
        kept = error is None or isinstance(error, (RequestTimeoutError, UnfinishedValueError))
        still = request.held - request.closing
        self._want(request, Wanted({name: Close(remember=kept and name not in request.faulty) for name in still}))
        with self._changed:
            if request in self._queue:
                self._queue.remove(request)
                self.places.leave()
        self._metrics.ended("cancelled" if error is None else "failed")
        self._remove_if_free(request)
        self._send(request, error or EngineClosedError("the request was cancelled"))

    def _remove_if_free(self, request: Request) -> None:
        with self._changed:
            if not request.held and self._running.pop(request.number, None) is not None:
                self._budget.free(request.needs)
                self.places.leave()
                if not self._running:
                    self._trim.idle()

    def _deliver(self, request: Request) -> None:
        events = request.session.events
        while events:
            event = events.popleft()
            self._metrics.observe(event)
            self._send(request, event)

    def _send(self, request: Request, item: Event | Exception) -> None:
        try:
            request.deliver(item)
        except Exception as error:  # a listener whose event loop is gone must not harm the others
            logger.debug("nobody listens to a request any more: %s", error)
            request.cancelled = True

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed


def _broken(kind: str, message: str) -> EngineClosedError:
    what = "the engine's worker stopped"
    return EngineClosedError(f"{what} ({kind}: {message})", public=what)
