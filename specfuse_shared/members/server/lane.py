"""Members behind servers: an event loop in a thread of its own has all their requests on their way at once.

Batching is the servers' own. A request that is not needed any more is cancelled, which its server takes for a client
that left. A server that cannot be reached fails the stages of its members, which leave the answers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from specfuse_shared.members.base import CacheUse, MemberInfo, OnForward, nobody_listens
from specfuse_shared.members.server.member import ServerMember
from specfuse_shared.members.server.session import ServerSession, run_stage
from specfuse_shared.members.stages import (
    NOTHING_YET,
    Close,
    Closed,
    Fault,
    Open,
    Reply,
    StageRequest,
    StageResult,
    nobody_waits,
    unanswered,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
Key = tuple[int, str]


class ServerLane:
    """Runs the stages of `members`; connects to their servers first. Raises `MemberLoadError` where one is unfit."""

    def __init__(
        self,
        members: Sequence[ServerMember],
        on_forward: OnForward = nobody_listens,
    ) -> None:
        self.served = {member.name: member for member in members}
        self._sessions: dict[Key, ServerSession] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._reply: Reply = nobody_waits
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="specfuse servers", daemon=True)
        self._thread.start()
        try:
            self._call(self._connect(on_forward))
        except BaseException:
            self.close()
            raise

    @property
    def members(self) -> Sequence[MemberInfo]:
        return [member.info for member in self.served.values()]

    def memory(self) -> Mapping[str, int]:
        """Nothing of ours."""
        return {}

    def remember(self, limits: Mapping[str, int]) -> None:
        """What is remembered is the servers' affair."""

    def cache_use(self) -> CacheUse:
        return CacheUse()

    @property
    def fault(self) -> Fault | None:
        """A server that fails is no fault of the lane: its members are asked again in the next answer."""
        return None if self._thread.is_alive() else Fault("EngineClosedError", "the lane of servers has ended")

    def reply_to(self, reply: Reply) -> None:
        self._reply = reply

    def submit(self, requests: Sequence[StageRequest]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._start, requests)
        except RuntimeError as error:  # the loop is closed
            self._reply([unanswered(request, Fault.of(error)) for request in requests])

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._call(self._leave())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ── in the loop ──────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _connect(self, on_forward: OnForward) -> None:
        connecting = (member.connect(on_forward) for member in self.served.values())
        for problem in await asyncio.gather(*connecting, return_exceptions=True):
            if problem is not None:
                raise problem

    async def _leave(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sessions.clear()
        for member in self.served.values():
            await member.close()

    def _start(self, requests: Sequence[StageRequest]) -> None:
        for request in requests:
            key = request.answer, request.member
            before = self._tasks.get(key)
            work = self._forget(request, before) if isinstance(request.op, Close) else self._stage(request)
            self._tasks[key] = task = self._loop.create_task(work)
            task.add_done_callback(partial(self._over, key))

    def _over(self, key: Key, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    async def _stage(self, request: StageRequest) -> None:
        key, op, value, fault = (request.answer, request.member), request.op, None, None
        member = self.served[request.member]
        try:
            if isinstance(op, Open):
                self._sessions[key] = member.open(op.prompt, op.params, op.seed)
            value = await run_stage(self._sessions[key].stage(op), member.observe)
        except Exception as error:
            logger.warning("member %s failed in %s: %s", request.member, op.stage, error)
            fault = Fault.of(error)
        session = self._sessions.get(key)
        self._reply([StageResult(*key, value, session.counts if session else NOTHING_YET, fault)])

    async def _forget(self, request: StageRequest, before: asyncio.Task[None] | None) -> None:
        """Cancel what still runs, and say so when it is over."""
        key = request.answer, request.member
        if before is not None:
            before.cancel()
            await asyncio.gather(before, return_exceptions=True)
        session = self._sessions.pop(key, None)
        self._reply([StageResult(*key, Closed(), session.counts if session else NOTHING_YET)])
