"""The engine: members loaded once, many answers at a time, streamed segment by segment."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Self, TypedDict, Unpack

import torch

from specfuse_shared.config import EnsembleConfig, as_config
from specfuse_shared.errors import ConfigError, EngineClosedError, RequestError, SpecFuseError
from specfuse_shared.events import Event, FinishEvent
from specfuse_shared.fusion.session import AnswerSession
from specfuse_shared.loading.planning import plan_ensemble, stated_context
from specfuse_shared.loading.pretrained import LoadProgress, OnProgress
from specfuse_shared.member_config import MemberConfig
from specfuse_shared.members.assembly import Assembly, assemble
from specfuse_shared.members.base import CacheUse, Member
from specfuse_shared.members.local import LocalMember
from specfuse_shared.results import EnsembleResult
from specfuse_shared.sampling_params import SamplingParams
from specfuse_shared.serving.admission import Budget
from specfuse_shared.serving.metrics import Metrics, MetricsSnapshot
from specfuse_shared.serving.scheduler import Deliver, Request, Scheduler
from specfuse_shared.serving.tracing import AnswerSpan
from specfuse_shared.text.tool_calls import ToolUse
from specfuse_shared.types import MemberReport, Message, Tool

logger = logging.getLogger(__name__)

Conversation = str | Sequence[Message | Mapping[str, Any]]


class CallOptions(TypedDict, total=False):
    """What every answer takes besides its conversation and its `SamplingParams`."""

    tools: Sequence[Tool | Mapping[str, Any]]
    tool_choice: str
    parallel_tool_calls: bool
    timeout: float | None


class EnsembleEngine:
    """Several causal language models that answer together, for any number of callers at once.

    Loads on first use, or at once with `load`. Every method may be called from any thread, and the `a…` ones from
    any event loop; all answers share the members' forward passes. Use as a context manager, or `close` to free the
    memory.

    `config`: an `EnsembleConfig`, or its members and, as keywords, its settings. A conversation is one question, or
    `Message`s, or OpenAI's dictionaries of messages. Every answer takes, as keywords, `tools`, `tool_choice` and
    `parallel_tool_calls` (see `ToolUse`), and a `timeout` in seconds, counted from when the members are loaded, which
    ends it with `RequestTimeoutError`.
    """

    def __init__(self, config: EnsembleConfig | Sequence[MemberConfig | str], **settings: Any) -> None:
        self.config = as_config(config, **settings)
        self._assembly = Assembly(())
        self._scheduler: Scheduler | None = None
        self._metrics = Metrics()
        self._loading = threading.Lock()
        self._closed = False
        self._process = os.getpid()

    @property
    def closed(self) -> bool:
        """It cannot answer any more: it was closed, or it belongs to the process that this one was forked from."""
        return self._closed or not self.is_of_this_process

    @property
    def is_of_this_process(self) -> bool:
        """False after a fork, which neither threads nor device contexts survive."""
        return self._process == os.getpid()

    @property
    def context_limit(self) -> int | None:
        """Tokens that the smallest member's context holds; before they are loaded, as far as configurations say."""
        if not self._members:
            return stated_context(self.config)
        return min((limit for m in self._members if (limit := m.context_limit)), default=None)

    def load(self, on_progress: OnProgress | None = None) -> Self:
        """Plan where the members go, then load each into its place; again, it does nothing.

        Raises `MemberLoadError`; where the members do not fit, `PlacementError`, before any weight is read.
        """
        self._check_open()
        with self._loading:
            self._check_open()
            if self._scheduler is None:
                assembly = self._assemble(on_progress)
                infos = [member.info for member in assembly.members]
                free = {device: size for lane in assembly.lanes for device, size in lane.memory().items()}
                budget = Budget(self.config, infos, free)
                for lane in assembly.lanes:
                    lane.remember({info.name: budget.prefix_bytes(info) for info in lane.members})
                self._assembly, self._scheduler = assembly, Scheduler(assembly, budget, self._metrics)
                weakref.finalize(self, self._scheduler.close)
                _spare_forks()
        return self

    def describe(self) -> tuple[MemberReport, ...]:
        """What each member turned out to be; loads them if need be."""
        infos = {info.name: info for lane in self.load()._assembly.lanes for info in lane.members}
        return tuple(infos[member.name].report for member in self._members)

    def metrics(self) -> MetricsSnapshot:
        """Counters and histograms since the start; loads nothing."""
        running, waiting = self._scheduler.load if self._scheduler else (0, 0)
        use = sum((lane.cache_use() for lane in self._assembly.lanes), CacheUse())
        return self._metrics.snapshot(
            running=running,
            waiting=waiting,
            cache_bytes=use.cache_bytes,
            prefix_bytes=use.prefix_bytes,
            reused_prompt_tokens=use.reused_tokens,
        )

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text in the reference member, which counts `max_tokens` and usage; loads if need be."""
        return self._reference().codec.encode(text)

    def count_tokens(self, messages: Conversation, tools: Sequence[Tool | Mapping[str, Any]] = ()) -> int:
        """Tokens of a prompt in the reference member's chat template, `tools` included; loads if need be."""
        return len(self._reference().encode_prompt(_conversation(messages), ToolUse(_as_tools(tools)).offered))

    # ── synchronous ──────────────────────────────────────────────────────────────────────────────

    def generate(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> EnsembleResult:
        """Answer a conversation (or one question); the fold of `stream`."""
        return _result(self.stream(messages, params, **options))

    def stream(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> Iterator[Event]:
        """Answer a conversation as typed events; verified text arrives at once, in `SegmentEvent`.

        Raises `RequestError` here, before any work, if the request cannot be served; while it runs,
        `GenerationError` with the text so far. Closing or dropping the iterator stops the answer within one
        forward pass and frees its caches.
        """
        items: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()
        request = self._submit(messages, params, items.put, **options)
        return self._events(request, items)

    def generate_batch(
        self,
        conversations: Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        return_exceptions: bool = False,
        **options: Unpack[CallOptions],
    ) -> list[EnsembleResult | BaseException]:
        """Answer conversations at the same time; results in their order. One `params` for all, or one for each.

        The first failure is raised once all have ended; `return_exceptions` puts failures in their places instead.
        """
        each = _one_each(conversations, params)
        outcomes: list[Any] = []
        for conversation, own in zip(conversations, each, strict=True):
            try:
                outcomes.append(self.stream(conversation, own, **options))
            except SpecFuseError as error:
                outcomes.append(error)
        for index, events in enumerate(outcomes):
            if not isinstance(events, Exception):
                try:
                    outcomes[index] = _result(events)
                except SpecFuseError as error:
                    outcomes[index] = error
        failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if failures and not return_exceptions:
            raise failures[0]
        return outcomes

    # ── asynchronous ─────────────────────────────────────────────────────────────────────────────

    async def agenerate(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> EnsembleResult:
        """`generate` without blocking the event loop; cancelling the task stops the answer."""
        events = self.astream(messages, params, **options)
        try:
            async for event in events:
                if isinstance(event, FinishEvent):
                    return event.result
        finally:
            await events.aclose()  # type: ignore[attr-defined]
        raise AssertionError("a stream ends with a FinishEvent")

    async def astream(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> AsyncIterator[Event]:
        """`stream` without blocking the event loop; closing it or cancelling its task stops the answer."""
        loop, items = asyncio.get_running_loop(), asyncio.Queue[Event | Exception]()

        def deliver(item: Event | Exception) -> None:
            loop.call_soon_threadsafe(items.put_nowait, item)

        # loading, encoding and a full queue may take long, so they run in a thread; a task that is cancelled
        # meanwhile cannot stop that thread, so what comes out of it is cancelled then
        opening = asyncio.ensure_future(asyncio.to_thread(self._submit, messages, params, deliver, **options))
        try:
            request = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._cancel_late)
            raise
        try:
            while True:
                item = await items.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if isinstance(item, FinishEvent):
                    return
        finally:
            self._cancel(request)

    # ── end ──────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Free the members. Running answers end with an error that carries their text. Safe to call twice."""
        with self._loading:
            self._closed = True
            scheduler, self._scheduler, self._assembly = self._scheduler, None, Assembly(())
        if scheduler is not None:
            scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "loaded" if self._members else "not loaded"
        return f"EnsembleEngine({', '.join(self.config.names)}; {state})"

    def _submit(
        self,
        messages: Conversation,
        params: SamplingParams | None,
        deliver: Deliver,
        *,
        tools: Sequence[Tool | Mapping[str, Any]] = (),
        tool_choice: str = "auto",
        parallel_tool_calls: bool = False,
        timeout: float | None = None,
    ) -> Request:
        conversation, offered = _conversation(messages), ToolUse(_as_tools(tools), tool_choice, parallel_tool_calls)
        if timeout is not None and not timeout > 0:
            raise RequestError(f"timeout must be a positive number of seconds, not {timeout!r}")
        self.load()
        deadline = None if timeout is None else time.monotonic() + timeout
        scheduler, members = self._scheduler, self._members
        if scheduler is None:
            self._check_open()
            raise EngineClosedError()
        settings = params or SamplingParams()
        session = AnswerSession(self.config, members, conversation, settings, offered)
        span = AnswerSpan(self.config.names, settings)

        def observed(item: Event | Exception) -> None:
            span.observe(item)
            deliver(item)

        request = Request(session, observed, deadline)
        scheduler.submit(request, wait=self.config.when_busy == "wait")
        return request

    def _events(self, request: Request, items: queue.SimpleQueue[Event | Exception]) -> Iterator[Event]:
        return _Events(self, request, items)

    def _cancel(self, request: Request) -> None:
        if (scheduler := self._scheduler) is not None:
            scheduler.cancel(request)

    def _cancel_late(self, opening: asyncio.Future[Request]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._cancel(opening.result())

    @property
    def _members(self) -> tuple[Member, ...]:
        return self._assembly.members

    def _assemble(self, on_progress: OnProgress | None) -> Assembly:
        """The members and their lanes; here is where members of another kind would come in."""
        return assemble(tuple(self._load_all(on_progress)), self._metrics.forward)

    def _load_all(self, on_progress: OnProgress | None) -> Iterator[LocalMember]:
        names = self.config.names

        def report(name: str, stage: str) -> None:
            index = names.index(name) + 1
            logger.info("member %s (%d of %d): %s", name, index, len(names), stage)
            if on_progress is not None:
                on_progress(LoadProgress(name, index, len(names), stage))

        plan, execution = plan_ensemble(self.config, convert=True, on_stage=report), self.config.execution
        for config in self.config.member_configs:
            tell, place = partial(report, config.label), plan.of(config.label)
            folder = self.config.cache_dir
            yield LocalMember(config, cache_dir=folder, on_stage=tell, place=place, execution=execution)
            tell("ready")

    def _reference(self) -> Member:
        self.load()
        return next(member for member in self._members if member.name == self.config.reference_name)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError()
        if not self.is_of_this_process:
            raise EngineClosedError(
                "this engine belongs to the process that this one was forked from: make a new one here, or let "
                "ChatSpecFuse, SpecFuseLLM or lease_engine find one (they do so by themselves)"
            )


@cache
def _spare_forks() -> None:
    """Let processes that are forked from this one compute with one thread each.

    The threads that OpenMP keeps do not survive a fork, and the next one to ask for them would wait for ever.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


class _Events(Iterator[Event]):
    """The events of one answer; stops it when it is closed or no longer referenced, even if never iterated."""

    def __init__(self, engine: EnsembleEngine, request: Request, items: queue.SimpleQueue[Event | Exception]) -> None:
        self._engine, self._request, self._items = engine, request, items
        self._over = False

    def __next__(self) -> Event:
        if self._over:
            raise StopIteration
        try:
            item = self._items.get()
        except BaseException:  # Ctrl-C while waiting
            self.close()
            raise
        if isinstance(item, Exception):
            self._over = True
            raise item
        self._over = isinstance(item, FinishEvent)
        return item

    def close(self) -> None:
        """Stop the answer and free its caches."""
        if not self._over:
            self._over = True
            self._engine._cancel(self._request)

    def __del__(self) -> None:
        self.close()


def _conversation(messages: Conversation) -> list[Message]:
    if isinstance(messages, str):
        return [Message("user", messages)]
    return [m if isinstance(m, Message) else Message.from_dict(m) for m in messages]


def _as_tools(tools: Sequence[Tool | Mapping[str, Any]]) -> list[Tool]:
    return [tool if isinstance(tool, Tool) else Tool.from_dict(tool) for tool in tools]


def _result(events: Iterator[Event]) -> EnsembleResult:
    for event in events:
        if isinstance(event, FinishEvent):
            return event.result
    raise AssertionError("a stream ends with a FinishEvent")


def _one_each(
    conversations: Sequence[Conversation], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams | None]:
    if isinstance(conversations, str):
        raise RequestError("generate_batch takes a list of conversations, not one text")
    if params is None or isinstance(params, SamplingParams):
        return [params] * len(conversations)
    if len(params) != len(conversations):
        raise ConfigError(f"{len(params)} params for {len(conversations)} conversations: give one for each, or one")
    return list(params)
