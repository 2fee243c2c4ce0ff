"""Lanes: members of this process that share a device or cores run their stages in batched forward passes.

A step is one forward pass of each member for all waiting stages: some answers draft, some verify, some prefill. With
paged execution a member drafts a whole segment in one run of steps. Such drafts wait for verifications and commits, so
that all answers draft together.

Members on one accelerator share a lane. Members on the CPU divide its cores: small steps gain little from more cores,
because waking a thread costs as much as it saves. So each lane has its own cores and thread and waits for no other
lane.

Prefill is chunked, so that running answers keep at least half of their speed. A forward pass takes the time to read the
weights, plus some for each prompt token. A piece of a prompt joins the forward passes of running answers, or gets a
separate pass once enough seconds are saved: each second that running answers take saves one for prompts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from specfuse_shared.errors import MemberLoadError
from specfuse_shared.members.local.batching import StageWork, feed_all, share_prompt_tokens
from specfuse_shared.members.local.member import InProcessMember, LocalMember
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
    Value,
    ignore_results,
    ignore_steps,
    unanswered,
)
from specfuse_shared.placement.sizing import free_memory
from specfuse_shared.runtime.cuda_streams import Stopwatch
from specfuse_shared.runtime.model_runner import share_memory
from specfuse_shared.runtime.mps import mps_turn
from specfuse_shared.runtime.out_of_memory import is_out_of_memory
from specfuse_shared.runtime.packed_layout import PAGE


def lanes_of(members: Sequence[InProcessMember]) -> list[tuple[list[InProcessMember], int | None]]:
    """Lanes of members, and the number of cores of each if the processor has several; None: no limit.

    A core belongs to one lane. If there are more members than cores, some share a lane, preferably small ones.
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
    """Limit torch to this number of cores in this thread, from now on; other threads are unaffected."""
    with _setting_cores:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        # torch also makes it the default of threads that start later: another thread sets the default back
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
"""The usual limit of a forward pass for prompts alone: a timeout or a cancellation is noticed only after it."""
_SHARE = 1.0
"""Seconds that prompts get for each second of running answers, which so keep half of the time."""
_WORTH = 4.0
"""If reading the weights takes long, a pass for prompts alone may take this many times as long: else it is wasteful."""
_LEAST, _GRAIN = 64, 16
"""Fewest tokens of a piece that is worth a forward pass, and the unit of its size: kernels are chosen by shape."""
SHORT_PROMPT = 64
"""Tokens of prompts that may join a forward pass of running answers without any saved seconds."""
_NEWS, _SLOWER = 0.3, 0.05
"""Weight of the newest forward pass in a running mean; and of one slower than the mean, which did more than read the
weights."""


@dataclass(slots=True)
class Pace:
    """A member's measured speed: a forward pass takes `step` seconds, mostly to read the weights, plus `token` seconds
    for each prompt token. `last`: prompt tokens of the last forward pass that had any."""

    step: float = 0.0
    token: float = 0.0
    last: int = _LEAST // 2

    def learn(self, seconds: float, prompt_tokens: int) -> None:
        """Record the duration of a forward pass and its number of prompt tokens."""
        if not prompt_tokens:
            self.step = _mean(self.step, seconds, _SLOWER if seconds > self.step else _NEWS)
        else:
            self.step = min(self.step, seconds)
            self.token = _mean(self.token, (seconds - self.without_prompts(seconds, prompt_tokens)) / prompt_tokens)
            self.last = prompt_tokens

    def without_prompts(self, seconds: float, prompt_tokens: int) -> float:
        """The estimated duration of a forward pass without its prompt tokens."""
        return min(self.step, 0.9 * seconds) if prompt_tokens else seconds

    @property
    def longest(self) -> float:
        """Maximum seconds of a forward pass for prompts alone."""
        return max(PIECE_SECONDS, _WORTH * self.step)

    @property
    def alone(self) -> int:
        """Prompt tokens of a forward pass while no running answer waits."""
        return max(_LEAST, self.tokens(self.longest - self.step))

    def tokens(self, seconds: float) -> int:
        """Number of prompt tokens that would make a forward pass longer by `seconds`.

        At most twice the number of the last pass with a prompt, because the measurement may be wrong.
        """
        limit = min(PREFILL_CHUNK, 2 * max(self.last, _LEAST))
        if not self.token:
            return limit
        return min(limit, int(max(0.0, seconds) / self.token) // _GRAIN * _GRAIN)


def _mean(before: float, new: float, weight: float = _NEWS) -> float:
    return new if not before else before + weight * (new - before)


@dataclass(slots=True)
class ReadingTime:
    """Seconds that prompts may take from running answers. Each second for answers adds `_SHARE` to them (`saved`)."""

    saved: float = 0.0

    def pieces(self, pace: Pace, rides: bool, prompt_left: int) -> tuple[int, float]:
        """Prompt tokens of a member's next forward pass, and the seconds that they may take.

        `rides`: the pass runs for other answers anyway; otherwise it reads the weights for prompts alone.
        `prompt_left`: unread tokens of the shortest prompt. A piece that is too small for its cost waits until it can
        be larger.
        """
        seconds = self.saved + (_SHARE if rides else -1.0) * pace.step
        tokens = pace.tokens(min(seconds, pace.longest))
        if tokens >= min(prompt_left, _LEAST):
            return tokens, seconds if rides else self.saved
        if self.saved >= pace.longest:
            return _LEAST, self.saved
        return 0, 0.0

    def learn(self, pace: Pace, planned: float, answers: float, prompts: float) -> None:
        """Record the seconds of a forward pass for answers, and for prompts, which had `planned` seconds."""
        saved = self.saved + planned + _SHARE * answers - prompts
        self.saved = max(-pace.longest, min(saved, pace.longest))


logger = logging.getLogger(__name__)

_MOST_HELD = 2
"""Number of other forward passes for which drafts wait, at most."""
_LINE_UP_SECONDS = 0.002
"""Seconds that drafts wait for answers between two stages, whose drafts could run with them."""
_BETWEEN_SECONDS = 0.02
"""Seconds that a piece of a prompt waits for answers between two stages, whose forward pass it could join."""
_SHARE_OF_FREE = {"cpu": 0.5, "mps": 0.5}
"""Share of free memory for caches, where other programs need memory too: an Apple GPU uses main memory."""
_DEFAULT_SHARE = 0.9


class _Running(StageWork[Value]):
    """A stage that has started: its `request`, and the `session` of its answer."""

    __slots__ = ("request", "session")

    def __init__(self, request: StageRequest, session: LocalSession) -> None:
        super().__init__(session.stage(request.op))
        self.request = request
        self.session = session


@dataclass(slots=True)
class _Timed:
    """A forward pass: number of answers, prompt tokens, and the watch that timed it.

    `answering`: it was not for prompts alone. `planned`: seconds of `ReadingTime` that were reserved for its prompts;
    None: no running answer waited.
    """

    member: str
    answers: int
    answering: bool
    prompt_tokens: int
    planned: float | None
    watch: Stopwatch


_MOST_ANSWERS_OF_PAGES = {"cuda": 256}
"""Limit of a member's pages: enough for this number of answers of full context length."""
_DEFAULT_MOST_ANSWERS_OF_PAGES = 16
"""The same for devices whose memory is also the processor's."""
_MOST_CONTEXT_OF_PAGES = 8192
"""Tokens of context that such devices count with at most; also for a model that states no context length."""
_FEWEST_TOKENS_OF_PAGES = 2048
"""Tokens of the smallest arena, where memory is scarce."""
_SHARE_OF_PAGES = 0.85
"""Share of the memory for answers that becomes pages; the rest is for logits."""


def _open_arenas(members: Sequence[InProcessMember], cache_bytes: int | None, lane_share: float) -> None:
    """Make the pages of members with paged execution, for the same number of tokens in each member.

    They take a share of `cache_bytes`, or of the free memory of the device if that is None. `lane_share`: the share of
    this lane, if several lanes use the device. Raises `MemberLoadError` if there is no memory for any.
    """
    paged = [member for member in members if isinstance(member, LocalMember) and member.runner.is_paged]
    for device, alike in groupby(paged, key=lambda member: next(iter(member.devices))):
        here = list(alike)
        for member in here:
            member.runner.open_arena(2)  # frees the arena of an earlier lane
        reserved = sum(member.runner.reserve_bytes for member in here)
        size = cache_bytes or free_memory(device) * _SHARE_OF_FREE.get(device, _DEFAULT_SHARE) - reserved
        tokens = max(0, int(_SHARE_OF_PAGES * lane_share * size)) // sum(member.bytes_per_token for member in here)
        for member in here:
            smallest = PAGE if cache_bytes else _FEWEST_TOKENS_OF_PAGES
            _open_arena(member, min(max(tokens, smallest), _most_tokens(member)), device)


def _open_arena(member: LocalMember, tokens: int, device: str) -> None:
    """Make a member's pages for this number of tokens, or for fewer if memory runs out, and capture its steps."""
    runner = member.runner
    with runner.stream.entered():
        while True:
            try:
                runner.open_arena(1 + tokens // PAGE)
                free = free_memory(device)
                runner.warm_up()
                runner.captured_bytes = max(0, free - free_memory(device))
                return
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                runner.open_arena(2)
                if tokens < 4 * PAGE:
                    raise MemberLoadError(
                        f"member {member.name!r}: there is no memory for its cache on {device}: name a smaller model "
                        "or a quantised one, or look at `specfuse-llm doctor --plan`"
                    ) from error
            tokens //= 2


def _most_tokens(member: LocalMember) -> int:
    """Tokens that a member's pages hold at most."""
    kind, context = member.runner.device.type, member.context_limit or _MOST_CONTEXT_OF_PAGES
    if kind in _MOST_ANSWERS_OF_PAGES:
        return _MOST_ANSWERS_OF_PAGES[kind] * context
    return _DEFAULT_MOST_ANSWERS_OF_PAGES * min(context, _MOST_CONTEXT_OF_PAGES)


class LocalLane:
    """Runs the stages of `members` when `step` is called, always by the same thread, each in its member's CUDA stream.

    `cores`: number of cores for that thread; None: unchanged. `on_forward` is called for every forward pass that its
    device has finished. `cache_bytes`: bytes of caches that are allocated at load (paged execution); None: a share of
    the free memory.
    """

    def __init__(
        self,
        members: Sequence[InProcessMember],
        cores: int | None = None,
        on_forward: OnForward = ignore_steps,
        cache_bytes: int | None = None,
        lane_share: float = 1.0,
    ) -> None:
        self.local = {member.name: member for member in members}
        _open_arenas(members, cache_bytes, lane_share)
        share_memory([member.runner for member in members])
        self._cores = cores
        self._turn = mps_turn([device for member in members for device in member.devices])
        self._on_forward = on_forward
        self._reply: Reply = ignore_results
        self._asked: deque[Sequence[StageRequest]] = deque()
        self._sessions: dict[str, dict[int, LocalSession]] = {name: {} for name in self.local}
        self._waiting: dict[str, list[_Running]] = {name: [] for name in self.local}
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
        """Bytes for answers on each device: a share of the free bytes and existing caches, minus a reserve."""
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
        """Always None: an exception in `step` ends the calling thread instead."""
        return None

    def close(self) -> None:
        with self._turn:
            self._close()

    def _close(self) -> None:
        for stages in self._waiting.values():
            stages.clear()
        for name, sessions in self._sessions.items():
            for session in sessions.values():
                session.release()
            sessions.clear()
            self.local[name].runner.stream.wait()  # kernels must not run on memory that is freed here
            self.local[name].close()
        self._tell_times()

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    @property
    def wait_seconds(self) -> float | None:
        """Seconds to wait before the next step: a pass for many answers costs little more than one for few.

        Answers between two stages may return soon; members in other lanes may still work for them. If they are the
        majority, the step waits for them, but not longer than the last step took. If they are fewer, only prompts and
        drafts of whole segments wait, and briefly. None: there is nothing to do.
        """
        stages = [stage for waiting in self._waiting.values() for stage in waiting]
        here = {stage.request.answer for stage in stages} | {r.answer for queued in self._asked for r in queued}
        if not here:
            return None
        away = {answer for sessions in self._sessions.values() for answer in sessions} - here
        longest = 0.0
        if len(away) > len(here):
            longest = self._step_seconds
        elif away and not self._asked and all(stage.is_draft for stage in stages):
            longest = _LINE_UP_SECONDS
        if away and not self._asked and all(stage.is_reading for stage in stages):
            longest = max(longest, _BETWEEN_SECONDS)
        return max(0.0, self._stepped + longest - time.monotonic())

    @torch.inference_mode()
    def step(self) -> None:
        """Start the requested stages. If results are ready, return them, else run a forward pass of every member.

        All members' forward passes are launched before the first result is read, so that devices and host overlap.
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
            fed = [stage for name in self.local for stage in self._feed(name, drafts)]
            for stage in fed:
                if not stage.done:
                    with self._stream(stage.request.member):
                        stage.advance()
                self._settle(stage)
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
            stage = _Running(request, session)
        except Exception as error:
            self._results.append(StageResult(request.answer, request.member, error=Fault.of(error)))
            return
        stage.advance()
        self._waiting[request.member].append(stage)
        self._settle(stage)

    def _forget(self, request: StageRequest, op: Close) -> None:
        waiting = self._waiting[request.member]
        for stage in [stage for stage in waiting if stage.request.answer == request.answer]:
            stage.close()
            waiting.remove(stage)
        session, counts = self._sessions[request.member].pop(request.answer, None), TokenCounts()
        if session is not None:
            counts = session.counts
            try:
                session.release(op.remember)
            except Exception as error:  # a remembered prefix only saves time
                logger.warning("member %s could not remember an answer: %s", request.member, error)
                session.release()
        self._results.append(StageResult(request.answer, request.member, Closed(), counts))

    def _is_time_to_draft(self) -> bool:
        """Whether this step runs the waiting drafts of whole segments, or everything else.

        Drafts wait for one other forward pass. They wait for a second one while answers verify or commit.
        """
        stages = [stage for waiting in self._waiting.values() for stage in waiting]
        not_drafts = [stage for stage in stages if not stage.is_draft]
        if len(not_drafts) == len(stages):
            self._held = 0
            return False
        limit = _MOST_HELD if any(stage.is_branch for stage in not_drafts) else 1
        if not_drafts and self._held < limit:
            self._held += 1
            return False
        self._held = 0
        return True

    def _feed(self, name: str, drafts: bool) -> list[_Running]:
        """Run a member's forward pass for its waiting drafts, or for everything else; returns the stages in it."""
        waiting = [stage for stage in self._waiting[name] if stage.is_draft == drafts]
        answering, pace = any(not stage.is_reading for stage in waiting), self._paces[name]
        limit, planned = pace.alone, None
        if self._is_beside(drafts):
            reading = [stage.session.sequence for stage in waiting if stage.is_reading]
            prompt_left = min((sequence.prompt_to_read for sequence in reading), default=0)
            limit, planned = self._reading.pieces(pace, answering, prompt_left)
        short = SHORT_PROMPT if answering else 0  # short prompts join a pass that runs anyway
        fed = share_prompt_tokens(waiting, limit, pace.tokens(pace.step), short)
        if not fed:
            return []
        reading = [stage.session.sequence for stage in fed if stage.is_reading]
        read = sum(sequence.read_tokens for sequence in reading)
        if planned is not None:
            planned = planned if reading else 0.0
            self._reading.saved -= planned
        with self._stream(name):
            watch = self.local[name].runner.stream.timed()
            self.local[name].sharing = len(fed)
            feed_all(fed)
            watch.stop()
        read = sum(sequence.read_tokens for sequence in reading) - read
        self._timed.append(_Timed(name, len(fed), answering, read, planned, watch))
        return fed

    def _is_beside(self, drafts: bool) -> bool:
        """Whether running answers wait for the forward passes of this step.

        `drafts`: this step runs the drafts of whole segments. Otherwise those do not count: they run in other steps.
        """
        stages = [stage for waiting in self._waiting.values() for stage in waiting if stage.is_draft == drafts]
        return any(not stage.is_reading for stage in stages)

    def _tell_times(self) -> None:
        """Learn from the forward passes that the devices have finished, and report them, in order."""
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
        """A context in which the work of a member is queued on its stream."""
        return self.local[name].runner.stream.entered()

    def _settle(self, stage: _Running) -> None:
        """If the stage is done, move its result to the results of this step."""
        if not stage.done:
            return
        request, fault = stage.request, None
        self._waiting[request.member].remove(stage)
        if stage.error is not None:
            stage.session.sequence.is_sound = False
            fault = Fault.of(stage.error)
            logger.warning("member %s failed in %s", request.member, request.op.stage, exc_info=stage.error)
        self._results.append(StageResult(request.answer, request.member, stage.value, stage.session.counts, fault))

    def _give(self) -> None:
        """Send the results of this step, all at once."""
        results, self._results = self._results, []
        if results:
            self._reply(results)


class LaneThread:
    """A thread that runs the steps of `lane`. No other thread may step it."""

    def __init__(self, lane: LocalLane) -> None:
        self._lane = lane
        self._changed = threading.Condition()
        self._reply: Reply = ignore_results
        self._open: set[tuple[int, str]] = set()  # answers that are not closed, each with a member
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
        """End the thread and wait for it: a thread in torch's code can crash Python while the process exits."""
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
        """Fail the requests of all open answers, because `error` ends the thread."""
        with self._changed:
            self._fault = fault = Fault.of(error, is_fatal=True)
            unanswered, self._open = self._open, set()
        self._reply([StageResult(answer, member, error=fault) for answer, member in unanswered])
