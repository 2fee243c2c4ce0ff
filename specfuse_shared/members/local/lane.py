"""Members of this process that share a device or cores: their stages in shared forwards.

A step is one forward of each member for all that waits for one: some answers draft, some verify, some still read
their prompt. Members of static execution draft a whole segment in one run of forwards; such drafts let verifications
and commits go first, so that all answers draft together.

Which members share a lane: those of one accelerator; those on the processor share out its cores.

Small steps gain little from more cores, because waking a thread costs as much as what it takes over; so members on a
processor run beside each other, each lane with its own cores.

A local lane in a thread of its own, which waits for no other lane.

How many tokens of prompts a forward reads, so that answers that have begun go on at half of their speed or more.

A forward takes the seconds to read the weights, and more for each token of a prompt. Pieces of prompts ride on the
forwards of answers that have begun, or take one of their own when these have paid for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from specfuse_shared.members.local.batching import Job, feed_all, share_prompt_tokens
from specfuse_shared.members.local.member import InProcessMember
from specfuse_shared.members.local.sequence import PREFILL_CHUNK
from specfuse_shared.members.local.session import LocalSession
from specfuse_shared.members.stages import (
    CacheUse,
    Close,
    Closed,
    Fault,
    MemberInfo,
    OnForward,
    Open,
    Reply,
    StageRequest,
    StageResult,
    TokenCounts,
    ignore_results,
    ignore_steps,
    unanswered,
)
from specfuse_shared.placement.sizing import free_memory
from specfuse_shared.runtime.cuda_streams import Stopwatch
from specfuse_shared.runtime.model_runner import share_memory
from specfuse_shared.runtime.mps import mps_turn


def lanes_of(members: Sequence[InProcessMember]) -> list[tuple[list[InProcessMember], int | None]]:
    """Members that take turns, and the cores of each such lane where the processor has several; None: no limit.

    A core is never shared, so with more members than cores some take turns, the large ones by themselves.
    """
    lanes: dict[tuple[str, ...], list[InProcessMember]] = defaultdict(list)
    for member in members:
        lanes[devices_of(member)].append(member)
    on_cpu = lanes.pop(("cpu",), [])
    on_devices: list[tuple[list[InProcessMember], int | None]] = [(lane, None) for lane in lanes.values()]
    core_count = cores()
    count = min(len(on_cpu), core_count)
    shared: list[list[InProcessMember]] = [[] for _ in range(count)]
    for member in sorted(on_cpu, key=_size, reverse=True):
        min(shared, key=lambda lane: sum(map(_size, lane))).append(member)
    return on_devices + [(lane, core_count // count if count > 1 else None) for lane in shared]


def cores() -> int:
    """How many cores torch uses in this thread."""
    return torch.get_num_threads()


def use_cores(count: int) -> None:
    """Let torch use so many cores in this thread, which keeps to them from now on; others stay as they are."""
    with _setting_cores:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        # that is also what threads made later would begin with, unless another thread says otherwise
        setter = threading.Thread(target=torch.set_num_threads, args=(before,))
        setter.start()
        setter.join()


_setting_cores = threading.Lock()


def devices_of(member: InProcessMember) -> tuple[str, ...]:
    """The devices on which a member computes."""
    return tuple(member.devices)


def _size(member: InProcessMember) -> int:
    return member.report.memory_bytes


PIECE_SECONDS = 0.3
"""The longest forward for pieces of prompts: a timeout or a cancellation is seen after it."""
_SHARE = 1.0
"""Seconds for pieces of prompts beside a second for answers that have begun: these keep half of the time."""
_WORTH = 4.0
"""Where reading the weights takes long, a piece takes this many times as long: smaller ones would be dear."""
_LEAST, _GRAIN = 64, 16
"""Tokens of a piece that is worth its forward, also before any was timed; kernels are chosen by shape, so sizes are
multiples."""
SHORT_PROMPT = 64
"""Tokens of prompts that need not wait until answers that have begun have saved time for them."""
_NEWS, _SLOWER = 0.3, 0.05
"""Weight of the newest forward in a mean; of one that took longer than the weights, for it did more than read them."""


@dataclass(slots=True)
class Pace:
    """How fast a member is: a forward takes `step` seconds, mostly to read the weights, and `token` more for each token
    of a prompt. `last`: prompt tokens of the last forward with any."""

    step: float = 0.0
    token: float = 0.0
    last: int = _LEAST // 2

    def learn(self, seconds: float, prompt_tokens: int) -> None:
        """A forward took so long, so many tokens of prompts among it."""
        if not prompt_tokens:
            self.step = _mean(self.step, seconds, _SLOWER if seconds > self.step else _NEWS)
        else:
            self.step = min(self.step, seconds)
            self.token = _mean(self.token, (seconds - self.without_prompts(seconds, prompt_tokens)) / prompt_tokens)
            self.last = prompt_tokens

    def without_prompts(self, seconds: float, prompt_tokens: int) -> float:
        """What such a forward would have taken without its tokens of prompts."""
        return min(self.step, 0.9 * seconds) if prompt_tokens else seconds

    @property
    def longest(self) -> float:
        """Seconds of the longest forward for prompts alone."""
        return max(PIECE_SECONDS, _WORTH * self.step)

    @property
    def alone(self) -> int:
        """Tokens of a forward for prompts that no answer waits for."""
        return max(_LEAST, self.tokens(self.longest - self.step))

    def tokens(self, seconds: float) -> int:
        """Tokens of prompts that take so many seconds more than a forward without.

        They grow by a factor of two at most, for what was measured may be off.
        """
        limit = min(PREFILL_CHUNK, 2 * max(self.last, _LEAST))
        if not self.token:
            return limit
        return min(limit, int(max(0.0, seconds) / self.token) // _GRAIN * _GRAIN)


def _mean(before: float, new: float, weight: float = _NEWS) -> float:
    return new if not before else before + weight * (new - before)


@dataclass(slots=True)
class ReadingTime:
    """Seconds that prompts may take from answers that have begun: `_SHARE` for each second of theirs."""

    saved: float = 0.0

    def pieces(self, pace: Pace, rides: bool, prompt_left: int) -> tuple[int, float]:
        """Tokens of prompts in the next forward of a member, and the seconds that they may take.

        `rides`: it is a forward of answers that have begun; another one reads the weights for prompts alone. `left`:
        what the shortest prompt needs. A piece that is too small for its costs waits until it may be larger.
        """
        seconds = self.saved + (_SHARE if rides else -1.0) * pace.step
        tokens = pace.tokens(min(seconds, pace.longest))
        if tokens >= min(prompt_left, _LEAST):
            return tokens, seconds if rides else self.saved
        if self.saved >= pace.longest:
            return _LEAST, self.saved
        return 0, 0.0

    def learn(self, pace: Pace, planned: float, answers: float, prompts: float) -> None:
        """A forward took so many seconds for answers, and so many for prompts, for which it had `planned`."""
        saved = self.saved + planned + _SHARE * answers - prompts
        self.saved = max(-pace.longest, min(saved, pace.longest))


logger = logging.getLogger(__name__)

_MOST_HELD = 2
"""So many forwards may go before the drafts that wait."""
_LINE_UP_SECONDS = 0.002
"""So long drafts wait for those of answers that are between two stages."""
_BETWEEN_SECONDS = 0.02
"""So long a piece of a prompt waits for answers that are between two stages."""
_SHARE_OF_FREE = {"cpu": 0.5, "mps": 0.5}
"""Less of what other programs take from, too: an Apple GPU has no memory of its own."""
_DEFAULT_SHARE = 0.9


@dataclass(slots=True, eq=False)
class _Task:
    """A stage on its way."""

    request: StageRequest
    session: LocalSession
    job: Job

    @property
    def is_draft(self) -> bool:
        return self.job.request is not None and self.job.request.draft is not None

    @property
    def is_branch(self) -> bool:
        return self.job.request is not None and bool(self.job.request.branches)

    @property
    def is_reading(self) -> bool:
        return self.job.request is not None and bool(self.job.request.prompt)


@dataclass(slots=True)
class _Timed:
    """A forward of so many answers, with so many tokens of prompts, and the watch that timed it.

    `planned`: seconds for the prompts that were taken from the answers' time; None: no answer waited.
    """

    member: str
    answers: int
    answering: bool
    prompt_tokens: int
    planned: float | None
    watch: Stopwatch


class LocalLane:
    """Runs the stages of `members` whenever `step` is called, always by the same thread, each in its member's stream.

    `cores`: how many that thread may use from then on, None: as it is. `on_forward` is told of every forward, once its
    device is through with it.
    """

    def __init__(
        self,
        members: Sequence[InProcessMember],
        cores: int | None = None,
        on_forward: OnForward = ignore_steps,
    ) -> None:
        self.local = {member.name: member for member in members}
        share_memory([member.runner for member in members])
        self._cores = cores
        self._turn = mps_turn([device for member in members for device in member.devices])
        self._on_forward = on_forward
        self._reply: Reply = ignore_results
        self._asked: deque[Sequence[StageRequest]] = deque()
        self._sessions: dict[str, dict[int, LocalSession]] = {name: {} for name in self.local}
        self._waiting: dict[str, list[_Task]] = {name: [] for name in self.local}
        self._results: list[StageResult] = []
        self._held = 0
        self._stepped = 0.0
        self._step_seconds = 0.0
        self._timed: list[_Timed] = []
        self._paces = {name: Pace() for name in self.local}
        self._reading = ReadingTime()

    # ── the lane ─────────────────────────────────────────────────────────────────────────────────

    @property
    def members(self) -> Sequence[MemberInfo]:
        return [member.info for member in self.local.values()]

    def memory(self) -> Mapping[str, int]:
        """Free bytes of each device and those of caches that are there already, less a reserve."""
        members = self.local.values()
        by_device: dict[str, float] = {}
        for member in members:
            for device, share in member.devices.items():
                by_device[device] = by_device.get(device, 0.0) + share * member.cache_use().cache_bytes
        reserved = sum(member.runner.reserve_bytes for member in members)
        return {
            device: max(0, int((free_memory(device) + size) * _SHARE_OF_FREE.get(device, _DEFAULT_SHARE)) - reserved)
            for device, size in by_device.items()
        }

    def remember(self, limits: Mapping[str, int]) -> None:
        for name, limit in limits.items():
            self.local[name].remember(limit)

    def reply_to(self, reply: Reply) -> None:
        self._reply = reply

    def submit(self, requests: Sequence[StageRequest]) -> None:
        self._asked.append(requests)

    def cache_use(self) -> CacheUse:
        return sum((member.cache_use() for member in self.local.values()), CacheUse())

    @property
    def fault(self) -> Fault | None:
        """None: what breaks in it breaks the thread that steps it."""
        return None

    def close(self) -> None:
        with self._turn:
            self._close()

    def _close(self) -> None:
        for tasks in self._waiting.values():
            tasks.clear()
        for name, sessions in self._sessions.items():
            for session in sessions.values():
                session.release()
            sessions.clear()
            self.local[name].runner.stream.wait()  # nothing may still run over memory that others get now
            self.local[name].close()
        self._tell_times()

    # ── its turn ─────────────────────────────────────────────────────────────────────────────────

    @property
    def wait_seconds(self) -> float | None:
        """Seconds that the next step had better wait, for a forward of many costs little more than one of few.

        Answers between two stages, which other lanes may still have, are waited for where fewer than half are here, at
        most as long as the last step took; by prompts and by drafts of whole segments a moment. None: there is nothing
        to do.
        """
        tasks = [task for waiting in self._waiting.values() for task in waiting]
        here = {task.request.answer for task in tasks} | {r.answer for queued in self._asked for r in queued}
        if not here:
            return None
        away = {answer for sessions in self._sessions.values() for answer in sessions} - here
        longest = 0.0
        if len(away) > len(here):
            longest = self._step_seconds
        elif away and not self._asked and all(task.is_draft for task in tasks):
            longest = _LINE_UP_SECONDS
        if away and not self._asked and all(task.is_reading for task in tasks):
            longest = max(longest, _BETWEEN_SECONDS)
        return max(0.0, self._stepped + longest - time.monotonic())

    @torch.inference_mode()
    def step(self) -> None:
        """Start what was asked for; if that already has results, give them, else run a forward of every member.

        A device goes on computing while the host reads: what each forward gave is read once all were started.
        """
        with self._turn:
            self._step()
        self._give()

    def _step(self) -> None:
        if self._cores is not None:
            use_cores(self._cores)
            for member in self.local.values():
                member.use_cores(self._cores)
            self._cores = None
        began = time.monotonic()
        while self._asked:
            for request in self._asked.popleft():
                with self._stream(request.member):
                    self._start(request)
        if not self._results:
            drafts = self._is_time_to_draft()
            fed = [task for name in self.local for task in self._feed(name, drafts)]
            for task in fed:
                if not task.job.done:
                    with self._stream(task.request.member):
                        task.job.advance()
                self._settle(task)
            self._step_seconds = time.monotonic() - began
            self._tell_times()
        self._stepped = time.monotonic()

    def _start(self, request: StageRequest) -> None:
        sessions, op = self._sessions[request.member], request.op
        if isinstance(op, Close):
            self._forget(request, op)
            return
        try:
            if isinstance(op, Open):
                member = self.local[request.member]
                sessions[request.answer] = member.open(op.prompt, op.params, op.seed, op.speculates)
            session = sessions[request.answer]
            task = _Task(request, session, Job(session.stage(op)))
        except Exception as error:
            self._results.append(StageResult(request.answer, request.member, error=Fault.of(error)))
            return
        task.job.advance()
        self._waiting[request.member].append(task)
        self._settle(task)

    def _forget(self, request: StageRequest, op: Close) -> None:
        waiting = self._waiting[request.member]
        for task in [task for task in waiting if task.request.answer == request.answer]:
            task.job.stage.close()
            waiting.remove(task)
        session, counts = self._sessions[request.member].pop(request.answer, None), TokenCounts()
        if session is not None:
            counts = session.counts
            try:
                session.release(op.remember)
            except Exception as error:  # what it would have remembered only saves time
                logger.warning("member %s could not remember an answer: %s", request.member, error)
                session.release()
        self._results.append(StageResult(request.answer, request.member, Closed(), counts))

    def _is_time_to_draft(self) -> bool:
        """Whether this step runs the drafts that wait, or all else.

        A forward goes before them, so that those who read and verify go on, and another one for those who commit.
        """
        tasks = [task for waiting in self._waiting.values() for task in waiting]
        not_drafts = [task for task in tasks if not task.is_draft]
        if len(not_drafts) == len(tasks):
            self._held = 0
            return False
        limit = _MOST_HELD if any(task.is_branch for task in not_drafts) else 1
        if not_drafts and self._held < limit:
            self._held += 1
            return False
        self._held = 0
        return True

    def _feed(self, name: str, drafts: bool) -> list[_Task]:
        """One forward of a member for what waits for it, drafts or all else; whose it was."""
        waiting = [task for task in self._waiting[name] if task.is_draft == drafts]
        answering, pace = any(not task.is_reading for task in waiting), self._paces[name]
        limit, planned = pace.alone, None
        if self._is_beside(drafts):
            prompt_left = min((task.session.sequence.prompt_to_read for task in waiting if task.is_reading), default=0)
            limit, planned = self._reading.pieces(pace, answering, prompt_left)
        short = SHORT_PROMPT if answering else 0  # it rides on a forward that has to be
        jobs = share_prompt_tokens([task.job for task in waiting], limit, pace.tokens(pace.step), short)
        if not jobs:
            return []
        reading = [job.request.sequence for job in jobs if job.request is not None and job.request.prompt]
        read = sum(sequence.read_tokens for sequence in reading)
        if planned is not None:
            planned = planned if reading else 0.0
            self._reading.saved -= planned
        with self._stream(name):
            watch = self.local[name].runner.stream.timed()
            self.local[name].sharing = len(jobs)
            feed_all(jobs)
            watch.stop()
        read = sum(sequence.read_tokens for sequence in reading) - read
        self._timed.append(_Timed(name, len(jobs), answering, read, planned, watch))
        return [task for task in waiting if task.job in jobs]

    def _is_beside(self, drafts: bool) -> bool:
        """Whether answers that have begun wait for the forwards of this step.

        Drafts of whole segments do not: they take forwards of their own.
        """
        tasks = [task for waiting in self._waiting.values() for task in waiting if task.is_draft == drafts]
        return any(not task.is_reading for task in tasks)

    def _tell_times(self) -> None:
        """Tell of the forwards that the devices are through with, in their order."""
        waiting = []
        for timed in self._timed:
            if (seconds := timed.watch.seconds) is None:
                waiting.append(timed)
            else:
                pace = self._paces[timed.member]
                if timed.planned is not None:
                    work = pace.without_prompts(seconds, timed.prompt_tokens) if timed.answering else 0.0
                    self._reading.learn(pace, timed.planned, work, seconds - work)
                pace.learn(seconds, timed.prompt_tokens)
                self._on_forward(timed.member, timed.answers, seconds)
        self._timed = waiting

    def _stream(self, name: str) -> AbstractContextManager[Any]:
        """Where the work of a member is queued."""
        return self.local[name].runner.stream.entered()

    def _settle(self, task: _Task) -> None:
        """Take the result of a task that is done; others go on waiting."""
        if not task.job.done:
            return
        request, job = task.request, task.job
        self._waiting[request.member].remove(task)
        fault = None
        if job.error is not None:
            task.session.sequence.is_sound = False
            fault = Fault.of(job.error)
            logger.warning("member %s failed in %s", request.member, request.op.stage, exc_info=job.error)
        self._results.append(StageResult(request.answer, request.member, job.value, task.session.counts, fault))

    def _give(self) -> None:
        """Give what was found, all at once."""
        results, self._results = self._results, []
        if results:
            self._reply(results)


class LaneThread:
    """Runs the steps of `lane`, which belongs to this thread from now on."""

    def __init__(self, lane: LocalLane) -> None:
        self._lane = lane
        self._changed = threading.Condition()
        self._reply: Reply = ignore_results
        self._open: set[tuple[int, str]] = set()  # answers that were not closed, by member
        lane.reply_to(self._give)
        self._closed = False
        self._fault: Fault | None = None
        name = f"specfuse lane {'+'.join(devices_of(next(iter(lane.local.values()))))}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def members(self) -> Sequence[MemberInfo]:
        return self._lane.members

    def memory(self) -> Mapping[str, int]:
        return self._lane.memory()

    def remember(self, limits: Mapping[str, int]) -> None:
        self._lane.remember(limits)

    def reply_to(self, reply: Reply) -> None:
        self._reply = reply

    def submit(self, requests: Sequence[StageRequest]) -> None:
        with self._changed:
            if self._fault is None:
                self._open.update((request.answer, request.member) for request in requests)
                self._lane.submit(requests)
                self._changed.notify()
                return
        self._reply([unanswered(request, self._fault) for request in requests])

    def cache_use(self) -> CacheUse:
        return self._lane.cache_use()

    @property
    def fault(self) -> Fault | None:
        return self._fault

    def close(self) -> None:
        """Wait for the thread's end: one that is still on its way when Python ends would take the process with it."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        try:
            while self._await_work():
                self._lane.step()
        except BaseException as error:
            self._die(error)
        self._lane.close()

    def _await_work(self) -> bool:
        with self._changed:
            while not self._closed and (wait_seconds := self._lane.wait_seconds) != 0:
                self._changed.wait(wait_seconds)
            return not self._closed

    def _give(self, results: Sequence[StageResult]) -> None:
        with self._changed:
            self._open.difference_update((r.answer, r.member) for r in results if isinstance(r.value, Closed))
        self._reply(results)

    def _die(self, error: BaseException) -> None:
        """Nobody may wait for a lane that is gone, whatever ended it."""
        with self._changed:
            self._fault = fault = Fault.of(error, is_fatal=True)
            unanswered, self._open = self._open, set()
        self._reply([StageResult(answer, member, error=fault) for answer, member in unanswered])
