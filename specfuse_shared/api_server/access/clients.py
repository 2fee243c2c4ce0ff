"""Clients by their keys, with limits on concurrent requests, answers, and requests per minute."""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from specfuse_shared.api_server.failures import HttpError
from specfuse_shared.api_server.settings import ClientSettings, ServerSettings
from specfuse_shared.errors import ConfigError, RequestTimeoutError

MINUTE = 60.0
LARGE_BODY = 65_536
"""From this size in bytes, a client's bodies are parsed one after another."""
RESTS, LONGEST_REST, REFUSED_REST = 10.0, 5.0, 1.0
"""After a large body, the client's next large one waits for this multiple of its CPU time, up to this maximum, and for
at least this minimum after a refused body. In seconds."""
T = TypeVar("T")


@dataclass(slots=True)
class Client:
    """A key, its limits, and its current load. `key`: None for clients without a key."""

    settings: ClientSettings
    key: bytes | None
    open: int = 0
    _allowance: float = field(init=False)
    _counted: float = field(default_factory=time.monotonic)
    _places: asyncio.Semaphore | None = field(init=False)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _rests_until: float = 0.0

    def __post_init__(self) -> None:
        self._allowance = float(self.settings.requests_per_minute or 0)
        limit = self.settings.max_answers
        self._places = None if limit is None else asyncio.Semaphore(limit)

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request, from its first byte to its last. Raises `HttpError` (429) beyond the client's limits."""
        self._check()
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    async def read(self, raw: bytes, read: Callable[[bytes], T], threads: Executor) -> T:
        """The result of `read` for a body, in one of `threads`. Clients that send many large bodies delay only
        themselves."""
        loop = asyncio.get_running_loop()
        if len(raw) < LARGE_BODY:
            return await loop.run_in_executor(threads, read, raw)

        def timed() -> T:
            began, minimum = time.thread_time(), REFUSED_REST
            try:
                value = read(raw)
                minimum = 0.0
                return value
            finally:
                rest = min(LONGEST_REST, RESTS * (time.thread_time() - began))
                self._rests_until = time.monotonic() + max(minimum, rest)

        async with self._reading:
            await asyncio.sleep(max(0.0, self._rests_until - time.monotonic()))
            return await loop.run_in_executor(threads, timed)

    @asynccontextmanager
    async def answer(self, timeout: float | None) -> AsyncIterator[float | None]:
        """A slot for one answer, within `max_answers`. Yields the remaining timeout.

        Raises `RequestTimeoutError` if no slot is free in time.
        """
        if self._places is None:
            yield timeout
            return
        began = time.monotonic()
        try:
            await asyncio.wait_for(self._places.acquire(), timeout)
        except TimeoutError:
            raise RequestTimeoutError.of("") from None
        try:
            remaining = None if timeout is None else timeout - (time.monotonic() - began)
            if remaining is not None and remaining <= 0:
                raise RequestTimeoutError.of("")
            yield remaining
        finally:
            self._places.release()

    def _check(self) -> None:
        limit, per_minute = self.settings.max_requests, self.settings.requests_per_minute
        if self.open >= limit:
            message = f"you have {self.open} open requests, and the limit is {limit}: wait for one of them"
            raise HttpError(429, message, "too_many_requests")
        if per_minute is None:
            return
        now = time.monotonic()
        self._allowance = min(per_minute, self._allowance + (now - self._counted) * per_minute / MINUTE)
        self._counted = now
        if self._allowance < 1:
            seconds = math.ceil((1 - self._allowance) * MINUTE / per_minute)
            raise HttpError(429, f"the limit is {per_minute} requests a minute", "rate_limited", retry_seconds=seconds)
        self._allowance -= 1


class Clients:
    """The clients of a server: one for the server's own `key`, and the clients `named` in the settings.

    Without any key, all callers count as one client. Raises `ConfigError` if two clients have the same key.
    """

    def __init__(
        self, settings: ServerSettings, key: str | None, named: Mapping[str, ClientSettings] | None = None
    ) -> None:
        default = Client(ClientSettings(max_requests=settings.max_requests), None if key is None else key.encode())
        named_clients = [Client(each, each.api_key(name).encode()) for name, each in (named or {}).items()]
        self._clients = [*([] if named_clients and key is None else [default]), *named_clients]
        keys = [client.key for client in self._clients]
        for name, client in zip(named or (), named_clients, strict=True):
            if keys.count(client.key) > 1:
                raise ConfigError(f"[clients.{name}] has the key of another client, or the server's: give it its own")

    def find(self, authorization: str) -> Client | None:
        """The client that sent this header; None for an unknown key. Takes the same time for every key."""
        kind, _, token = authorization.partition(" ")
        key = token.strip().encode("latin-1", "replace") if kind.lower() == "bearer" else b""  # as Starlette decodes it
        matching = [client for client in self._clients if client.key is None or hmac.compare_digest(key, client.key)]
        return matching[0] if matching else None
