"""Many answers at once: admission, the members' next stages, and listeners.

The worker passes stage results to answers, and the answers' next stages to the lanes
(`specfuse_shared.members.stages.Lane`). Each lane gets all of them in one submission, so that stages of many answers
share forward passes. Lanes have their own threads, except one (`Assembly.own`). The worker runs that one's steps, one
forward pass at a time, so that answers join, leave and are cancelled between two passes.

A call first takes a queue slot, then encodes its conversation, grammar and prompts. So a request that is refused for
want of a slot costs nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Self

from specfuse_shared.config import EnsembleConfig, SamplingParams
from specfuse_shared.errors import (
    EngineBusyError,
    EngineClosedError,
    GenerationError,
    RequestError,
    RequestTimeoutError,
    SpecFuseError,
    UnfinishedValueError,
)
from specfuse_shared.events import EnsembleResult, Event, FinishEvent
from specfuse_shared.fusion.participants import Deadline, LaneStats, Results, Wanted
from specfuse_shared.fusion.session import AnswerSession, ScoringSession
from specfuse_shared.members.assembly import Assembly
from specfuse_shared.members.stages import Close, Closed, Member, Open, StageRequest, StageResult
from specfuse_shared.members.work import Work
from specfuse_shared.serving.admission import Budget, IdleTrim, Need
from specfuse_shared.serving.calls import (
    CallOptions,
    Conversation,
    check_options,
    choice_of,
    conversation_of,
    params_of,
    tools_of,
)
from specfuse_shared.serving.telemetry import AnswerSpan, Metrics
from specfuse_shared.text.tool_calls import ToolUse


class QueueSlots:
    """Slots for all requests that run, wait, or are being encoded: `max_concurrent` + `max_queue` of them.

    Every method may be called from any thread.
    """

    def __init__(self, config: EnsembleConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._free = config.max_concurrent + config.max_queue
        self._asking = deque[Future[None]]()
        self._closed: Exception | None = None

    def take(self, seconds: float | None = None) -> None:
        """Take a slot; `release` returns it. If all are taken, wait for one, or raise `EngineBusyError` (`when_busy`).

        Raises `RequestTimeoutError` after this number of seconds.
        """
        place = self._ask()
        try:
            place.result(seconds)
        except TimeoutError:
            self._give_up(place)
            raise _timed_out() from None
        except BaseException:  # Ctrl-C while waiting
            self._give_up(place)
            raise

    async def atake(self, seconds: float | None = None) -> None:
        """`take` on an event loop."""
        place = self._ask()
        try:
            await asyncio.wait_for(asyncio.wrap_future(place), seconds)
        except TimeoutError:
            self._give_up(place)
            raise _timed_out() from None
        except BaseException:
            self._give_up(place)
            raise

    def release(self) -> None:
        """Return a slot: its request is over, or was never submitted."""
        with self._lock:
            while self._asking:
                try:
                    self._asking.popleft().set_result(None)
                    return
                except InvalidStateError:  # this caller has given up
                    continue
            self._free += 1

    def close(self, error: Exception) -> None:
        """Refuse all requests, including waiting ones."""
        with self._lock:
            self._closed = error
            asking, self._asking = list(self._asking), deque()
        for place in asking:
            if place.set_running_or_notify_cancel():
                place.set_exception(error)

    def check(self) -> None:
        """Raises `EngineBusyError` if `take` would raise it now."""
        if self._free <= 0 and self._config.when_busy == "raise":
            raise EngineBusyError(
                f"all slots for requests are taken (max_concurrent={self._config.max_concurrent}, "
                f"max_queue={self._config.max_queue}): try again later, or set when_busy='wait'"
            )

    def _ask(self) -> Future[None]:
        place = Future[None]()
        with self._lock:
            if self._closed is not None:
                raise self._closed
            self.check()
            if self._free > 0:
                self._free -= 1
                place.set_result(None)
            else:
                self._asking.append(place)
        return place

    def _give_up(self, place: Future[None]) -> None:
        if not place.cancel() and place.exception() is None:
            self.release()


def _timed_out() -> RequestTimeoutError:
    return RequestTimeoutError("the timeout passed while the request waited for a queue slot", text="")


Deliver = Callable[[Event | Exception], None]


@dataclass(eq=False)
class Request:
    """One answer in the scheduler.

    The worker calls `deliver` with its events. The last one is a `FinishEvent` or an exception.
    """

    session: AnswerSession | ScoringSession
    deliver: Deliver
    deadline: float | None = None
    number: int = 0
    needs: Need = field(default_factory=Need)
    submitted: float = field(default_factory=time.monotonic)
    work: Work[Wanted, Results, None] | None = None
    asked: set[str] = field(default_factory=set)
    """Members that run a stage for it, and for which it waits."""
    late: set[str] = field(default_factory=set)
    """Members that still run a stage for it, and for which it no longer waits."""
    round_deadline: Deadline | None = None
    """When the members in `asked` are late."""
    answered: dict[str, float] = field(default_factory=dict)
    """When each other member of the same stage answered."""
    results: dict[str, StageResult] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    """Members that hold a cache for it."""
    faulty: set[str] = field(default_factory=set)
    """Members that failed in a stage. Their caches are not remembered."""
    closing: set[str] = field(default_factory=set)
    """Members that got a `Close` for it."""
    cancelled: bool = False
    over: bool = False
    """It has ended. It is removed once no member holds a cache for it."""

    def next_late(self) -> tuple[frozenset[str], float]:
        """The members that will be late next, and when."""
        if self.over or self.round_deadline is None:
            return frozenset(), math.inf
        clocks = self.round_deadline.clocks  # members that only close the answer have none
        answered = {name: at for name, at in self.answered.items() if name in clocks}
        late, at = self.round_deadline.late(self.asked & clocks.keys(), answered)
        return late, at if late else math.inf


_SECONDS_OF_A_WAIT = 0.2 if sys.platform == "win32" and sys.version_info < (3, 14) else None
"""On Windows, Python notices Ctrl-C between two waits, but not within one (cpython #74157)."""


class EventStream(Iterator[Event]):
    """The events of one answer. The answer stops when the stream is closed or no longer referenced.

    `engine`: kept alive by this reference until the answer is over.
    """

    def __init__(self, items: SimpleQueue[Event | Exception], cancel: Callable[[], None], engine: object) -> None:
        self._items = items
        self._cancel = cancel
        self._engine: object | None = engine
        self._over = False

    def __next__(self) -> Event:
        if self._over:
            raise StopIteration
        try:
            item = self._next_item()
        except BaseException:  # Ctrl-C while waiting
            self.close()
            raise
        if isinstance(item, Exception):
            self._over, self._engine = True, None
            raise item
        if isinstance(item, FinishEvent):
            self._over, self._engine = True, None
        return item

    def _next_item(self) -> Event | Exception:
        while _SECONDS_OF_A_WAIT is not None:
            with suppress(Empty):
                return self._items.get(timeout=_SECONDS_OF_A_WAIT)
        return self._items.get()

    def close(self) -> None:
        """Stop the answer and free its caches."""
        if not self._over:
            self._over, self._engine = True, None
            self._cancel()

    def __del__(self) -> None:
        self.close()


def result_of(events: Iterator[Event]) -> EnsembleResult:
    """The result of an answer, from its last event."""
    for event in events:
        if isinstance(event, FinishEvent):
            return event.result
    raise AssertionError("a stream ends with a FinishEvent")


def results_of(starts: Sequence[Callable[[], Iterator[Event]]], return_exceptions: bool) -> list[Any]:
    """Start all streams, then take the result of each.

    Once all have ended, the first failure is raised. With `return_exceptions`, a failure takes its answer's place.
    """

    def outcome(step: Callable[[], Any]) -> Any:
        try:
            return step()
        except Exception as error:
            return error

    begun = [outcome(start) for start in starts]
    ended = [e if isinstance(e, Exception) else outcome(partial(result_of, e)) for e in begun]
    failures = [e for e in ended if isinstance(e, Exception)]
    if failures and not return_exceptions:
        raise failures[0]
    return ended


def lane_stats_of(assembly: Assembly, metrics: Metrics, answers: Callable[[], int]) -> LaneStats:
    """Statistics about the engine's lanes, for answers that choose a leader."""
    lane_of = {info.name: n for n, lane in enumerate(assembly.lanes) for info in lane.members}
    devices = [[d for info in lane.members for d in info.devices] for lane in assembly.lanes]
    # a device in another process has its lane's name before it: "name/cuda:0"
    slow = ("cpu", "disk")
    fast = [
        n
        for n, of_member in enumerate(devices)
        if of_member and not any(d.rpartition("/")[2] in slow for d in of_member)
    ]
    elsewhere = frozenset(info.name for lane in assembly.lanes for info in lane.members if not info.devices)
    return LaneStats(lane_of, answers, metrics.step_seconds, frozenset(fast), elsewhere)


logger = logging.getLogger(__name__)


class LaneDiedError(RuntimeError):
    """A lane of this process failed; the state of its work is unknown."""


class Scheduler:
    """Owns the worker thread of an engine. Every method may be called from any thread."""

    def __init__(self, assembly: Assembly, budget: Budget, slots: QueueSlots, metrics: Metrics) -> None:
        self._assembly = assembly
        self._own = assembly.own
        self._budget = budget
        self._metrics = metrics
        self.slots = slots
        self.lane_stats = lane_stats_of(assembly, metrics, lambda: len(self._running))
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
        """Queue a request. It holds a queue slot (`slots`), which the scheduler returns when the answer is over."""
        request.needs = self._budget.needs(request.session)
        with self._changed:
            self._check_open()
            request.number = next(self._numbers)
            self._queue.append(request)
            self._changed.notify_all()

    def cancel(self, request: Request) -> None:
        """Stop a request before its next forward pass, and free its caches. Safe to call twice and after its end."""
        with self._changed:
            request.cancelled = True
            self._changed.notify_all()

    def close(self) -> None:
        """End every request with `EngineClosedError`, stop the worker and close the lanes."""
        if self._process != os.getpid():
            return  # a forked process has no worker, and its copy of the lock may never be released
        with self._changed:
            if self._closed is None:
                self._closed = EngineClosedError()
            self._changed.notify_all()
        self.slots.close(self._closed)
        if threading.current_thread() is not self._worker:
            self._worker.join()
            self._trim.busy()
            # so that a reference to a request, a stream or a metric does not keep weights alive
            self._assembly, self._own = Assembly(()), None

    @property
    def failure(self) -> EngineClosedError | None:
        """The reason why the engine stopped without being closed: the worker or a lane failed."""
        if self._failure is None:
            faults = [fault for lane in self._assembly.lanes if (fault := lane.fault) and fault.is_fatal]
            return _broken(faults[0].kind, faults[0].message) if faults else None
        return self._failure

    @property
    def lost_members(self) -> tuple[str, ...]:
        """Members whose lane has failed; answers continue without them."""
        lost = [lane for lane in self._assembly.lanes if lane.fault is not None]
        return tuple(info.name for lane in lost for info in lane.members)

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of requests that run, and that wait."""
        with self._changed:
            return len(self._running), len(self._queue)

    # ── the worker ───────────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        try:
            while self._await_work():
                self._pass_on()
                if self._own is not None and self._own.wait_seconds == 0:
                    self._own.step()
        except BaseException as error:
            logger.exception("the engine's worker stopped")
            with self._changed:
                self._closed = self._failure = _broken(type(error).__name__, str(error))
                self._changed.notify_all()
            self.slots.close(self._closed)
        why = self._closed or EngineClosedError()
        for request in [*self._running.values(), *self._queue]:
            if not request.over:
                self._end(request, EngineClosedError(str(why), text=request.session.text, public=why.public))
        self._running.clear()
        self._queue.clear()
        for lane in self._assembly.lanes:
            lane.close()

    def _await_work(self) -> bool:
        """End and admit requests, and wait while there is nothing to do; False once the scheduler is closed."""
        with self._changed:
            while self._closed is None:
                self._remove_stopped()
                admitted = self._admit()
                wait_seconds = None if self._own is None else self._own.wait_seconds
                if admitted or self._arrived or self._wanted or wait_seconds == 0 or self._next_lateness() <= 0:
                    break
                self._changed.wait(min(self._next_deadline(), wait_seconds or threading.TIMEOUT_MAX))
            else:
                return False
        for request in admitted:
            request.work = Work(request.session.run())
            self._advance(request)
        return True

    def _remove_stopped(self) -> None:
        """End requests that were cancelled or whose timeout passed."""
        now = time.monotonic()
        for request in [*self._running.values(), *self._queue]:
            if request.over or not (request.cancelled or (request.deadline or now) < now):
                continue
            self._end(request, None if request.cancelled else RequestTimeoutError.of(request.session.text))

    def _admit(self) -> list[Request]:
        """Admit queued requests, in order, within the budget of memory and answers."""
        admitted: list[Request] = []
        while self._queue and self._budget.take(self._queue[0].needs, len(self._running)):
            request = self._queue.popleft()
            self._running[request.number] = request
            admitted.append(request)
            self._metrics.started(time.monotonic() - request.submitted)
            self._trim.busy()
        return admitted

    def _next_deadline(self) -> float:
        """Seconds to the first deadline of an answer or of a round; `threading.TIMEOUT_MAX` if there is none."""
        ends = [r.deadline for r in (*self._queue, *self._running.values()) if r.deadline is not None and not r.over]
        seconds = min(ends) - time.monotonic() if ends else threading.TIMEOUT_MAX
        return max(0.0, min(seconds, self._next_lateness()))

    def _next_lateness(self) -> float:
        """Seconds until the next member is late; at most `threading.TIMEOUT_MAX`."""
        first = min((request.next_late()[1] for request in self._running.values()), default=math.inf)
        return min(first - time.monotonic(), threading.TIMEOUT_MAX)

    # ── between answers and lanes ────────────────────────────────────────────────────────────────

    def _take(self, results: Sequence[StageResult]) -> None:
        """Queue stage results; lanes call it from any thread."""
        with self._changed:
            self._arrived.extend(results)
            self._changed.notify_all()

    def _pass_on(self) -> None:
        """Give answers their results, then every lane the stages that answers request next."""
        while self._arrived:
            self._receive(self._arrived.popleft())
        self._continue_without_late()
        waiting, self._wanted = self._wanted, []
        by_lane: dict[int, list[StageRequest]] = defaultdict(list)
        for request in waiting:
            by_lane[self.lane_stats.lane_of[request.member]].append(request)
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
            return  # it was late, and its result is no longer needed
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

    def _continue_without_late(self) -> None:
        """Answers with late members continue with the other members' results."""
        for request in list(self._running.values()):
            late, at = request.next_late()
            if at > time.monotonic():
                continue
            request.late |= late
            request.asked -= late
            if not request.asked:
                self._advance(request)

    def _advance(self, request: Request) -> None:
        """Give an answer its members' results, and note the stages that it requests next."""
        work = request.work
        assert work is not None
        results, request.results = request.results, {}
        work.resume(results)
        if work.pending is not None:
            self._want(request, work.pending)
            self._deliver(request)
            if not request.asked and not request.late:
                self._advance(request)
        elif work.error is None:
            self._finish(request)
        elif isinstance(work.error, SpecFuseError):
            self._fail(request, work.error)
        else:
            error, text = work.error, request.session.text
            what = f"the answer failed: {type(error).__name__}"
            cause = GenerationError(f"{what}: {error}", member=None, text=text, public=what)
            cause.__cause__ = error
            self._fail(request, cause)

    def _want(self, request: Request, requested: Wanted) -> None:
        ops = requested.ops
        request.asked, request.answered = set(ops) - requested.unwaited, {}
        request.late -= ops.keys()
        request.round_deadline = requested.deadline
        opening = {name for name, op in ops.items() if isinstance(op, Open)}
        request.held |= opening
        request.closing = (request.closing - opening) | {n for n, op in ops.items() if isinstance(op, Close)}
        self._wanted += [StageRequest(request.number, name, op) for name, op in ops.items()]

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, request: Request) -> None:
        """End a request whose session has finished, and has closed its caches already."""
        request.over = True
        self._metrics.ended("finished")
        self._remove_if_free(request)
        self._deliver(request)

    def _fail(self, request: Request, error: Exception) -> None:
        self._deliver(request)
        self._end(request, error)

    def _end(self, request: Request, error: Exception | None) -> None:
        """End a request early and free its caches; `error` None: it was cancelled."""
        request.over = True
        if request.work is not None:
            request.work.close()
        self._wanted = [w for w in self._wanted if w.answer != request.number or isinstance(w.op, Close)]
        keeps_prefix = error is None or isinstance(error, (RequestTimeoutError, UnfinishedValueError))
        still = request.held - request.closing
        self._want(
            request, Wanted({name: Close(remember=keeps_prefix and name not in request.faulty) for name in still})
        )
        with self._changed:
            if request in self._queue:
                self._queue.remove(request)
                self.slots.release()
        self._metrics.ended("cancelled" if error is None else "failed")
        self._remove_if_free(request)
        self._send(request, error or EngineClosedError("the request was cancelled"))

    def _remove_if_free(self, request: Request) -> None:
        with self._changed:
            if not request.held and self._running.pop(request.number, None) is not None:
                self._budget.free(request.needs)
                self.slots.release()
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
        except Exception as error:  # a listener without its event loop must not stop the others
            logger.debug("an abandoned request ended: %s", error)
            request.cancelled = True

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed


def _broken(kind: str, message: str) -> EngineClosedError:
    what = "the engine's worker stopped"
    return EngineClosedError(f"{what} ({kind}: {message})", public=what)


OPENING_THREADS = 4
"""Threads that encode the prompts of asynchronous calls. Encoding hardly runs in parallel, so more gain nothing."""


class PendingCall:
    """A call before it enters the queue. Raises `RequestError` or `ConfigError` if its arguments are invalid.

    `deadline`: the end of its timeout, by the monotonic clock. `texts`: texts that members score instead of answering.
    """

    def __init__(
        self,
        config: EnsembleConfig,
        messages: Conversation,
        params: SamplingParams | None,
        options: CallOptions,
        texts: Sequence[str] = (),
    ) -> None:
        check_options(options)
        self.config = config.only(options.get("members"))
        self.params = params_of(params)
        self.messages = conversation_of(messages)
        self.texts = tuple(texts)
        choice, parallel = choice_of(options.get("tool_choice")), options.get("parallel_tool_calls", False)
        self.tools = ToolUse(tools_of(options.get("tools", ())), choice, parallel)
        self._timeout = options.get("timeout")
        if self._timeout is not None and not (isinstance(self._timeout, (int, float)) and self._timeout > 0):
            raise RequestError(f"timeout must be a positive number of seconds, not {self._timeout!r}")
        self.deadline: float | None = None
        self.cancelled = False

    def start(self) -> Self:
        """Start the timeout; returns itself."""
        self.deadline = None if self._timeout is None else time.monotonic() + self._timeout
        return self

    @property
    def seconds_left(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def check(self) -> None:
        """Raises if the answer is no longer needed. Called between costly steps."""
        if self.cancelled:
            raise EngineClosedError("the request was cancelled")
        if self.seconds_left == 0.0:
            raise RequestTimeoutError("the timeout passed while the prompt was encoded", text="")


class Submitter:
    """Queues calls to the loaded `members`. Every method may be called from any thread or event loop."""

    def __init__(self, members: Sequence[Member], scheduler: Scheduler) -> None:
        self._members = tuple(members)
        self._scheduler = scheduler
        self._pool = ThreadPoolExecutor(OPENING_THREADS, thread_name_prefix="specfuse-opening")

    def open(self, call: PendingCall, deliver: Deliver) -> Request:
        """Queue a call; returns its request. Raises `RequestError` before any model runs if it cannot be served."""
        self._scheduler.slots.take(call.seconds_left)
        return self._submit(call, deliver)

    async def aopen(self, call: PendingCall, deliver: Deliver) -> Request:
        """`open` without blocking the event loop.

        If the call is cancelled, its thread stops at the next check, or its queued request is cancelled.
        """
        await self._scheduler.slots.atake(call.seconds_left)
        submit = partial(copy_context().run, self._submit, call, deliver)
        try:
            submitting = asyncio.get_running_loop().run_in_executor(self._pool, submit)
        except RuntimeError as error:  # the engine was closed meanwhile
            self._scheduler.slots.release()
            raise EngineClosedError() from error
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            call.cancelled = True
            submitting.add_done_callback(self._cancel_submitted)
            raise

    def check(self) -> None:
        """Raises `EngineBusyError` if no queue slot is free and `when_busy="raise"`."""
        self._scheduler.slots.check()

    def cancel(self, request: Request) -> None:
        self._scheduler.cancel(request)

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    def _submit(self, call: PendingCall, deliver: Deliver) -> Request:
        try:
            span = AnswerSpan(call.config.names, call.params)
        except Exception:
            self._scheduler.slots.release()
            raise

        def observed(item: Event | Exception) -> None:
            span.observe(item)
            deliver(item)

        try:
            call.check()
            request = Request(self._session(call), observed, call.deadline)
            self._scheduler.submit(request)
        except Exception as error:
            self._scheduler.slots.release()
            span.observe(error)
            raise
        return request

    def _session(self, call: PendingCall) -> AnswerSession | ScoringSession:
        members = [member for member in self._members if member.name in call.config.names]
        lane_stats, check = self._scheduler.lane_stats, call.check
        if call.texts:
            return ScoringSession(call.config, members, call.messages, call.texts, call.tools, check)
        return AnswerSession(call.config, members, call.messages, call.params, call.tools, lane_stats, check)

    def _cancel_submitted(self, submitting: asyncio.Future[Request]) -> None:
        if not submitting.cancelled() and submitting.exception() is None:
            self.cancel(submitting.result())
