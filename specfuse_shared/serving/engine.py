"""The engine: loads the members once, and streams many concurrent answers segment by segment.

With `lease_engine`, a process has one engine per configuration. All callers share it, and the last lease frees it. A
forked child starts without engines, because neither threads nor device contexts survive a fork.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, Self, Unpack

import torch

from specfuse_shared.config import EnsembleConfig, MemberConfig, SamplingParams, as_config
from specfuse_shared.errors import EngineClosedError, SpecFuseError
from specfuse_shared.events import EnsembleResult, Event, FinishEvent, SideBySide
from specfuse_shared.fusion.session import ScoringSession
from specfuse_shared.loading.context_limits import stated_context
from specfuse_shared.loading.progress import OnLoadProgress, loading_bar
from specfuse_shared.members.assembly import Assembly, assemble_ensemble, read_prompts
from specfuse_shared.members.stages import CacheUse, Member
from specfuse_shared.messages import Tool
from specfuse_shared.placement.sizing import shared_out
from specfuse_shared.serving.admission import Budget, bound_kernels, release
from specfuse_shared.serving.calls import CallOptions, Conversation, check_texts, conversation_of, one_each, tools_of
from specfuse_shared.serving.scheduler import (
    EventStream,
    PendingCall,
    QueueSlots,
    Request,
    Scheduler,
    Submitter,
    result_of,
    results_of,
)
from specfuse_shared.serving.telemetry import Metrics, MetricsSnapshot
from specfuse_shared.text.chat_template import MemberText, PromptEncoder
from specfuse_shared.text.tool_calls import ToolUse
from specfuse_shared.types import MemberReport

FORKED = (
    "this engine belongs to the parent of this forked process: make a new one here (ChatSpecFuse, SpecFuseLLM and "
    "lease_engine do so by themselves)"
)


@cache
def limit_threads_after_fork() -> None:
    """Limit processes that are forked from this one to one compute thread each.

    OpenMP's thread pool does not survive a fork, so a child that uses it would hang.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


class EnsembleEngine:
    """Several causal language models that answer together, for any number of callers at once.

    The members load on first use, or with `load`. Every method can be called from any thread, and the `a…` methods
    from any event loop; all answers share the members' forward passes. `close`, or the end of a `with` block, frees
    the memory.

    `config`: an `EnsembleConfig`, or a list of members with settings as keywords. A conversation is a question, a list
    of `Message`s, or OpenAI's dictionaries. Every call takes `CallOptions` as keywords: `tools`, `tool_choice`,
    `parallel_tool_calls` (see `ToolUse`), `timeout` (seconds until `RequestTimeoutError`; loading does not count) and
    `members` (names of the participating members, if not all do).
    """

    def __init__(self, config: EnsembleConfig | Sequence[MemberConfig | str], **settings: Any) -> None:
        bound_kernels()
        self.config = as_config(config, **settings)
        self._assembly = Assembly(())
        self._scheduler: Scheduler | None = None
        self._submitter: Submitter | None = None
        self._metrics = Metrics()
        self._load_lock = threading.Lock()
        self._prompts_lock = threading.Lock()
        self._prompts = dict[str, PromptEncoder]()
        self._closed = False
        self._process = os.getpid()

    @property
    def closed(self) -> bool:
        """Whether it cannot answer any more: it was closed, it failed, or this process is a forked child."""
        return self._closed or not self.is_of_this_process or self.failure is not None

    @property
    def failure(self) -> EngineClosedError | None:
        """Why it failed; None while it works or if it was closed."""
        return self._scheduler.failure if self._scheduler is not None else None

    @property
    def lost_members(self) -> tuple[str, ...]:
        """Members that are unreachable now. Answers continue without them. Recovered members join the next answer."""
        return self._scheduler.lost_members if self._scheduler is not None else ()

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked child, because neither threads nor device contexts survive a fork."""
        return self._process == os.getpid()

    @property
    def context_limit(self) -> int | None:
        """The members' smallest context size, in tokens; before loading, from the configurations, or None."""
        if not self._members:
            return stated_context(self.config)
        return min((limit for m in self._members if (limit := m.context_limit)), default=None)

    def load(self, on_progress: OnLoadProgress | None = None) -> Self:
        """Load the members, unless they are loaded: plan their devices, then load one after another.

        Args:
            on_progress: Called with each step. By default a bar on the terminal or in the notebook shows them.

        Returns:
            This engine.

        Raises:
            PlacementError: The members do not fit; no weight was read.
            MemberLoadError: A member's files are missing or unusable.

        Example:
            ```python
            from specfuse_shared import EnsembleEngine, demo_members

            engine = EnsembleEngine(demo_members()).load()
            ```
        """
        self._check_open()
        with self._load_lock:
            self._check_open()
            if self._scheduler is None:
                try:
                    assembly = self._assemble(on_progress or loading_bar)
                    scheduler = self._scheduler_of(assembly)
                finally:
                    loading_bar.close()
                self._submitter = Submitter(assembly.members, scheduler)
                self._assembly, self._scheduler = assembly, scheduler
                weakref.finalize(self, scheduler.close)
                limit_threads_after_fork()
        return self

    def _scheduler_of(self, assembly: Assembly) -> Scheduler:
        """The scheduler of loaded members, which are closed if it cannot be made."""
        try:
            assembly.read_vocabularies()
            infos = [member.info for member in assembly.members]
            free = {device: size for lane in assembly.lanes for device, size in lane.memory().items()}
            budget = Budget(self.config, infos, shared_out(free))
            for lane in assembly.lanes:
                lane.remember({info.name: budget.prefix_bytes(info) for info in lane.members})
            return Scheduler(assembly, budget, QueueSlots(self.config), self._metrics)
        except BaseException:
            for lane in assembly.lanes:
                lane.close()
            raise

    def prepare_grammars(self) -> None:
        """`load` under another name: it reads the vocabularies, so that the first grammar does not wait.

        Example:
            ```python
            engine.prepare_grammars()
            ```
        """
        self.load()._assembly.read_vocabularies()

    def describe(self) -> tuple[MemberReport, ...]:
        """Describe the members; loads them if necessary.

        Returns:
            A report for each member: device, number format, memory, verification, probe error.

        Example:
            ```python
            for report in engine.describe():
                print(report.name, report.device, report.verification)
            ```
        """
        infos = {info.name: info for lane in self.load()._assembly.lanes for info in lane.members}
        return tuple(infos[member.name].report for member in self._members)

    def metrics(self) -> MetricsSnapshot:
        """Counters and histograms since the start. Does not load the members.

        Returns:
            A snapshot; sizes are in bytes, durations in seconds.

        Example:
            ```python
            print(engine.metrics().to_dict())
            ```
        """
        running, waiting = self._scheduler.load if self._scheduler else (0, 0)
        use = sum((lane.cache_use() for lane in self._assembly.lanes), CacheUse())
        return self._metrics.snapshot(
            running=running,
            waiting=waiting,
            cache_bytes=use.cache_bytes,
            prefix_bytes=use.prefix_bytes,
            reused_prompt_tokens=use.reused_tokens,
        )

    def tokenize(self, text: str, *, members: Sequence[str] | None = None) -> list[int]:
        """Token ids of a text in the reference member, which counts `max_tokens` and usage.

        Before the members are loaded, this reads a tokenizer and no weights.

        Args:
            text: The text to encode.
            members: Names of the participating members, if not all do; the reference is then one of them.

        Returns:
            The ids, without special tokens.

        Raises:
            MemberLoadError: The tokenizer cannot be read.

        Example:
            ```python
            print(len(engine.tokenize("The tide rises twice a day.")))
            ```
        """
        check_texts("tokenize", [text])
        return self._reference_prompts(members).codec.encode(text)

    def count_tokens(
        self,
        messages: Conversation,
        tools: Sequence[Tool | Mapping[str, Any]] = (),
        *,
        members: Sequence[str] | None = None,
    ) -> int:
        """Number of tokens of a prompt in the reference member's chat template.

        Before the members are loaded, this reads a tokenizer and no weights.

        Args:
            messages: A conversation, or one question as a string.
            tools: Tools to offer; their descriptions count.
            members: Names of the participating members, if not all do.

        Returns:
            The number of tokens.

        Raises:
            MemberLoadError: The tokenizer cannot be read.

        Example:
            ```python
            print(engine.count_tokens("Why is the sky blue?"))
            ```
        """
        offered = ToolUse(tools_of(tools)).offered
        return len(self._reference_prompts(members).encode(conversation_of(messages), offered))

    # ── synchronous ──────────────────────────────────────────────────────────────────────────────

    def generate(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> EnsembleResult:
        """Answer a conversation or one question.

        Args:
            messages: A conversation, or one question as a string.
            params: Sampling settings; by default greedy decoding.
            **options: See `CallOptions`: `tools`, `tool_choice`, `parallel_tool_calls`, `timeout`, `members`.

        Returns:
            The text with its record, such as rounds, usage and agreement.

        Raises:
            RequestError: The request cannot be served.
            GenerationError: The answer failed; the error has the text so far.

        Example:
            ```python
            from specfuse_shared import SamplingParams

            result = engine.generate("Why is the sky blue?", SamplingParams(max_tokens=24))
            print(result.text)
            ```
        """
        return result_of(self.stream(messages, params, **options))

    def stream(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> Iterator[Event]:
        """Answer a conversation as typed events. Decided text arrives at once, in `SegmentEvent`.

        Closing or dropping the iterator stops the answer within one forward pass and frees its caches.

        Args:
            messages: A conversation, or one question as a string.
            params: Sampling settings; by default greedy decoding.
            **options: See `CallOptions`.

        Returns:
            An iterator of events, from `StartEvent` to `FinishEvent`.

        Raises:
            RequestError: The request cannot be served; raised by this call, before any model runs.
            GenerationError: The answer failed; raised by the iterator, with the text so far. If `timeout` passes before
                the answer is queued, this call raises `RequestTimeoutError`, one of its subclasses.

        Example:
            ```python
            from specfuse_shared import SamplingParams, SegmentEvent

            for event in engine.stream("Why is the sky blue?", SamplingParams(max_tokens=24)):
                if isinstance(event, SegmentEvent):
                    print(event.text, end="")
            ```
        """
        return self._begin(PendingCall(self.config, messages, params, options))[1]

    def generate_batch(
        self,
        conversations: Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        return_exceptions: bool = False,
        **options: Unpack[CallOptions],
    ) -> list[EnsembleResult | BaseException]:
        """Answer several conversations concurrently.

        Args:
            conversations: Conversations or questions.
            params: Sampling settings for all, or one per conversation.
            return_exceptions: Return errors in place of results.
            **options: See `CallOptions`.

        Returns:
            Results in the order of the conversations.

        Raises:
            SpecFuseError: The first error, after all answers have ended, unless `return_exceptions`.

        Example:
            ```python
            from specfuse_shared import SamplingParams

            results = engine.generate_batch(["Name a colour.", "Name a fruit."], SamplingParams(max_tokens=8))
            print([result.text for result in results])
            ```
        """
        requests = zip(conversations, one_each(conversations, params), strict=True)
        return results_of(
            [partial(self.stream, each, request_params, **options) for each, request_params in requests],
            return_exceptions,
        )

    def generate_each(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> SideBySide:
        """The joint answer and each member's own answer, computed concurrently.

        Args:
            messages: A conversation, or one question as a string.
            params: Sampling settings; by default greedy decoding.
            **options: See `CallOptions`.

        Returns:
            The answers. A member that fails alone is in `SideBySide.failed`.

        Raises:
            SpecFuseError: The joint answer failed, as in `generate`.

        Example:
            ```python
            from specfuse_shared import SamplingParams

            answers = engine.generate_each("Name a colour.", SamplingParams(max_tokens=8))
            print(answers.joint.text, {name: result.text for name, result in answers.alone.items()})
            ```
        """
        names = list(self.config.only(options.get("members")).names)
        calls: list[CallOptions] = [{**options, "members": each} for each in (names, *([name] for name in names))]
        starts = [partial(self.stream, messages, params, **call) for call in calls]
        joint, *alone = results_of(starts, return_exceptions=True)
        for outcome in (joint, *alone):
            if isinstance(outcome, Exception) and (outcome is joint or not isinstance(outcome, SpecFuseError)):
                raise outcome
        of = dict(zip(names, alone, strict=True))
        return SideBySide(
            joint,
            {name: outcome for name, outcome in of.items() if isinstance(outcome, EnsembleResult)},
            {name: outcome for name, outcome in of.items() if isinstance(outcome, SpecFuseError)},
        )

    def log_probabilities(
        self, messages: Conversation, texts: Sequence[str], **options: Unpack[CallOptions]
    ) -> dict[str, tuple[float, ...]]:
        """Score given texts as the beginning of the answer; nothing is generated.

        Args:
            messages: A conversation, or one question as a string.
            texts: The texts to score.
            **options: See `CallOptions`.

        Returns:
            Member → natural log p of each text. Members that fail are missing.

        Raises:
            RequestError: There is nothing to score, or the request cannot be served.
            GenerationError: All members failed.

        Example:
            ```python
            print(engine.log_probabilities("Is the sky blue?", ["Yes", "No"]))
            ```
        """
        check_texts("log_probabilities", texts if all(texts) else ())
        request, events = self._begin(PendingCall(self.config, messages, None, options, texts))
        result_of(events)
        assert isinstance(request.session, ScoringSession)
        return request.session.scores

    # ── asynchronous ─────────────────────────────────────────────────────────────────────────────

    async def agenerate(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> EnsembleResult:
        """`generate` without blocking the event loop. Cancelling the task stops the answer.

        Args:
            messages: A conversation, or one question as a string.
            params: Sampling settings; by default greedy decoding.
            **options: See `CallOptions`.

        Returns:
            The text with its record.

        Raises:
            SpecFuseError: As in `generate`.

        Example:
            ```python
            import asyncio

            from specfuse_shared import SamplingParams

            print(asyncio.run(engine.agenerate("Name a colour.", SamplingParams(max_tokens=8))).text)
            ```
        """
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
        """`stream` without blocking the event loop. Closing it or cancelling its task stops the answer.

        Args:
            messages: A conversation, or one question as a string.
            params: Sampling settings; by default greedy decoding.
            **options: See `CallOptions`.

        Yields:
            Events, from `StartEvent` to `FinishEvent`.

        Raises:
            SpecFuseError: As in `stream`, but always by the iterator.

        Example:
            ```python
            import asyncio

            from specfuse_shared import SamplingParams, SegmentEvent


            async def show() -> None:
                async for event in engine.astream("Name a colour.", SamplingParams(max_tokens=8)):
                    if isinstance(event, SegmentEvent):
                        print(event.text, end="")


            asyncio.run(show())
            ```
        """
        loop, items = asyncio.get_running_loop(), asyncio.Queue[Event | Exception]()

        def deliver(item: Event | Exception) -> None:
            loop.call_soon_threadsafe(items.put_nowait, item)

        call = PendingCall(self.config, messages, params, options)
        self._check_open()
        submitter = self._submitter
        if submitter is None:
            submitter = await asyncio.to_thread(self._ready)
        request = await submitter.aopen(call.start(), deliver)
        try:
            while True:
                item = await items.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if isinstance(item, FinishEvent):
                    return
        finally:
            submitter.cancel(request)

    def check_busy(self) -> None:
        """Check for a free queue slot, without taking it.

        Raises:
            EngineBusyError: A request would be refused now.

        Example:
            ```python
            engine.check_busy()
            ```
        """
        if self._submitter is not None:
            self._submitter.check()

    # ── end ──────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Free the members. Running answers end with an error that contains their text. Safe to call twice.

        Example:
            ```python
            from specfuse_shared import EnsembleEngine, demo_members

            with EnsembleEngine(demo_members()) as short_lived:  # closes at the end
                print(short_lived.closed)
            ```
        """
        with self._load_lock:
            self._closed = True
            scheduler, self._scheduler, self._assembly = self._scheduler, None, Assembly(())
            submitter, self._submitter = self._submitter, None
        if scheduler is not None and submitter is not None:
            scheduler.close()
            submitter.close()
            del scheduler, submitter
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "loaded" if self._members else "not loaded"
        return f"EnsembleEngine({', '.join(self.config.names)}; {state})"

    def _ready(self) -> Submitter:
        self.load()
        if (submitter := self._submitter) is None:
            self._check_open()
            raise EngineClosedError()
        return submitter

    def _begin(self, call: PendingCall) -> tuple[Request, EventStream]:
        submitter, items = self._ready(), SimpleQueue[Event | Exception]()
        request = submitter.open(call.start(), items.put)
        return request, EventStream(items, partial(submitter.cancel, request), self)

    @property
    def _members(self) -> tuple[Member, ...]:
        return self._assembly.members

    def _assemble(self, on_progress: OnLoadProgress | None) -> Assembly:
        return assemble_ensemble(self.config, self._metrics.forward, on_progress)

    def _reference_prompts(self, members: Sequence[str] | None) -> PromptEncoder:
        """The template and tokenizer of the reference member, kept until the engine is closed."""
        self._check_open()
        name = self.config.only(members).reference_name
        loaded = next((member.text for member in self._members if member.name == name), None)
        if isinstance(loaded, MemberText):
            return loaded.prompts
        with self._prompts_lock:
            if name not in self._prompts:
                member = next(member for member in self.config.member_configs if member.label == name)
                self._prompts[name] = read_prompts(member, self.config.cache_dir)
            return self._prompts[name]

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError()
        if not self.is_of_this_process:
            raise EngineClosedError(FORKED)


@dataclass(slots=True, eq=False)
class _Shared:
    """An engine of this process, and the number of its leases."""

    engine: EnsembleEngine
    leases: int = 0


class EngineLease:
    """A caller's right to use a shared engine. Closing the last lease closes the engine.

    If a lease is dropped without `close`, the engine stays loaded for the next caller, until `close_idle_engines`.
    """

    def __init__(self, engine: EnsembleEngine, release: Callable[[bool], None]) -> None:
        self.engine = engine
        self._on_release: Callable[[bool], None] | None = release

    def close(self) -> None:
        """End the lease. Closing the last one closes the engine. A second call has no effect.

        Example:
            ```python
            from specfuse_shared import EnsembleConfig, demo_members, lease_engine

            lease = lease_engine(EnsembleConfig(demo_members()))
            lease.close()
            ```
        """
        self._release(close=True)

    def _release(self, close: bool) -> None:
        release, self._on_release = self._on_release, None
        if release is not None:
            release(close)

    def __del__(self) -> None:
        self._release(close=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Registry:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.RLock()  # a lease may be collected while another one is made
        self._shared: list[_Shared] = []

    def lease(self, config: EnsembleConfig) -> EngineLease:
        with self._lock:
            dead = [shared for shared in self._shared if shared.engine.closed]
            self._shared = [shared for shared in self._shared if shared not in dead]
            for shared in dead:
                shared.engine.close()  # one that failed still holds its weights
            shared_engine = next((shared for shared in self._shared if shared.engine.config == config), None)
            if shared_engine is None:
                shared_engine = _Shared(EnsembleEngine(config))
                self._shared.append(shared_engine)
            shared_engine.leases += 1
            return EngineLease(shared_engine.engine, partial(self.release, shared_engine))

    def release(self, shared: _Shared, close: bool) -> None:
        with self._lock:
            shared.leases -= 1
            if shared not in self._shared or shared.leases or not close:
                return
            self._shared.remove(shared)
        shared.engine.close()

    def close_idle(self) -> int:
        with self._lock:
            idle = [shared for shared in self._shared if not shared.leases]
            self._shared = [shared for shared in self._shared if shared.leases]
        for shared in idle:
            shared.engine.close()
        return len(idle)


_registry = _Registry()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_registry.reset)


def lease_engine(config: EnsembleConfig) -> EngineLease:
    """A lease of this process's engine for a configuration. The engine loads on first use.

    Args:
        config: The ensemble. Equal configurations share one engine.

    Returns:
        A lease. Closing the last one frees the engine.

    Example:
        ```python
        from specfuse_shared import EnsembleConfig, demo_members, lease_engine

        lease = lease_engine(EnsembleConfig(demo_members()))
        lease.close()
        ```
    """
    return _registry.lease(config)


def close_idle_engines() -> int:
    """Close the engines of this process that have no lease, for example after models were dropped without `close`.

    Returns:
        The number of closed engines.

    Example:
        ```python
        from specfuse_shared import close_idle_engines

        print(close_idle_engines())
        ```
    """
    return _registry.close_idle()
