"""From a call to a request in the queue: a place first, then everything that costs: conversation, grammar, prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Self

from specfuse_shared.errors import EngineClosedError, RequestError, RequestTimeoutError
from specfuse_shared.events import Event
from specfuse_shared.fusion.round import ScoringSession
from specfuse_shared.fusion.session import AnswerSession
from specfuse_shared.members.stages import Member
from specfuse_shared.serving.calls import (
    CallOptions,
    Conversation,
    check_options,
    choice_of,
    conversation_of,
    params_of,
    tools_of,
)
from specfuse_shared.serving.request import Deliver, Request
from specfuse_shared.serving.scheduler import Scheduler
from specfuse_shared.serving.telemetry.tracing import AnswerSpan
from specfuse_shared.settings.config import EnsembleConfig
from specfuse_shared.settings.sampling_params import SamplingParams
from specfuse_shared.text.tool_calls import ToolUse

OPENING_THREADS = 4
"""Threads that read the prompts of asynchronous calls; encoding hardly runs in parallel, so more would gain nothing."""


class Opening:
    """A call on its way into the queue. Raises what is wrong with it at the first look: `RequestError`, `ConfigError`.

    `deadline`: when its timeout passes, by the monotonic clock. `texts`: what members shall judge instead of answering.
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
        """From now on the timeout runs."""
        self.deadline = None if self._timeout is None else time.monotonic() + self._timeout
        return self

    @property
    def seconds_left(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def check(self) -> None:
        """Raises where nobody waits for the answer any more; asked between the steps that cost."""
        if self.cancelled:
            raise EngineClosedError("the request was cancelled")
        if self.seconds_left == 0.0:
            raise RequestTimeoutError("the timeout passed while the prompt was read", text="")


class Opener:
    """Opens requests of the loaded `members`. Every method may be called from any thread or event loop."""

    def __init__(self, members: Sequence[Member], scheduler: Scheduler) -> None:
        self._members = tuple(members)
        self._scheduler = scheduler
        self._pool = ThreadPoolExecutor(OPENING_THREADS, thread_name_prefix="specfuse-opening")

    def open(self, opening: Opening, deliver: Deliver) -> Request:
        """The request in the queue. Raises `RequestError` for one that cannot be served, before any work."""
        self._scheduler.places.take(opening.seconds_left)
        return self._submit(opening, deliver)

    async def aopen(self, opening: Opening, deliver: Deliver) -> Request:
        """`open` without blocking the event loop. A thread cannot be stopped: what a cancelled call opens is closed."""
        await self._scheduler.places.atake(opening.seconds_left)
        submit = partial(copy_context().run, self._submit, opening, deliver)
        try:
            submitting = asyncio.get_running_loop().run_in_executor(self._pool, submit)
        except RuntimeError as error:  # the engine was closed meanwhile
            self._scheduler.places.leave()
            raise EngineClosedError() from error
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            opening.cancelled = True
            submitting.add_done_callback(self._cancel_late)
            raise

    def check(self) -> None:
        """Raises `EngineBusyError` where no place is free and none is waited for."""
        self._scheduler.places.check()

    def cancel(self, request: Request) -> None:
        self._scheduler.cancel(request)

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    def _submit(self, opening: Opening, deliver: Deliver) -> Request:
        try:
            span = AnswerSpan(opening.config.names, opening.params)
        except Exception:
            self._scheduler.places.leave()
            raise

        def observed(item: Event | Exception) -> None:
            span.observe(item)
            deliver(item)

        try:
            opening.check()
            request = Request(self._session(opening), observed, opening.deadline)
            self._scheduler.submit(request)
        except Exception as error:
            self._scheduler.places.leave()
            span.observe(error)
            raise
        return request

    def _session(self, opening: Opening) -> AnswerSession | ScoringSession:
        members = [member for member in self._members if member.name in opening.config.names]
        traffic, check = self._scheduler.traffic, opening.check
        if opening.texts:
            return ScoringSession(opening.config, members, opening.messages, opening.texts, opening.tools, check)
        return AnswerSession(opening.config, members, opening.messages, opening.params, opening.tools, traffic, check)

    def _cancel_late(self, submitting: asyncio.Future[Request]) -> None:
        if not submitting.cancelled() and submitting.exception() is None:
            self.cancel(submitting.result())
