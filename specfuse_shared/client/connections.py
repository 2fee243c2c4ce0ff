"""Connections to a server: one client for threads, and one for each event loop, which ends with its loop."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import AsyncGenerator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, finalize

import httpx

from specfuse_shared import bounded_http
from specfuse_shared.addresses import trusted
from specfuse_shared.errors import ConfigError

CONNECT_SECONDS = 10.0
_NAME, _VALUE = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"), re.compile(r"[\x20-\x7e]*")
_OWN = ("authorization", "accept-encoding", "connection", "content-length", "content-type", "transfer-encoding")
"""Headers that a request has by itself."""


def checked_headers(what: str, headers: Mapping[str, str] | None) -> dict[str, str]:
    """Headers of a user's. Raises `ConfigError`, which repeats no value, for what can be none."""
    if not isinstance(headers or {}, Mapping):
        raise ConfigError(f'{what} must be names and values, such as {{"X-Team": "blue"}}')
    for name, value in (headers or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(f"{what} holds {name!r}: names and values of headers are text")
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ConfigError(f"{what} holds {name!r}, whose name or value is no header: use printable ASCII")
        if name.lower() == "authorization":
            raise ConfigError(f"{what} holds {name!r}: give the key as api_key=…, so that it is kept secret")
        if name.lower() in _OWN:
            raise ConfigError(f"{what} holds {name!r}, which a request sets by itself: leave it out")
    return dict(headers or {})


Loops = WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, AsyncGenerator[None, None]]]


class Connections:
    """What is kept between requests to one server. Any number of threads and event loops may ask at once."""

    def __init__(self, base_url: str, headers: Mapping[str, str | bytes]) -> None:
        self._base_url = base_url
        self._headers = headers
        self._lock = threading.Lock()
        self._client: httpx.Client | None = None
        self._loops: Loops = WeakKeyDictionary()
        self._process = os.getpid()

    def client(self) -> httpx.Client:
        """For the threads of this process."""
        with self._lock:
            self._check_process()
            if self._client is None:
                self._client = httpx.Client(**self._settings(bounded_http.bound))
                finalize(self, self._client.close)  # one that is only dropped leaves its sockets open
            return self._client

    async def of_loop(self) -> httpx.AsyncClient:
        """For the running event loop, which closes it when it ends: it closes its asynchronous generators."""
        loop, begun = asyncio.get_running_loop(), None
        with self._lock:
            self._check_process()
            for other in [each for each in self._loops if each.is_closed()]:
                del self._loops[other]
            if loop not in self._loops:
                client = httpx.AsyncClient(**self._settings(bounded_http.abound))
                begun = _closes(client)
                self._loops[loop] = (client, begun)
            client, _ = self._loops[loop]
        if begun is not None:
            await anext(begun)
        return client

    def close(self) -> None:
        """Let the connections go; the next request makes new ones."""
        with self._lock:
            client = self._client
            self._forget()
        if client is not None:
            client.close()

    def _check_process(self) -> None:
        if self._process != os.getpid():  # connections do not survive a fork
            self._forget()

    def _forget(self) -> None:
        self._client, self._loops, self._process = None, WeakKeyDictionary(), os.getpid()

    def _settings(self, hook: Any) -> dict[str, Any]:
        return {
            "base_url": self._base_url,
            "headers": self._headers,
            "event_hooks": {"response": [hook]},
            "verify": trusted(),
            "timeout": httpx.Timeout(60, connect=CONNECT_SECONDS),
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=20),
        }


async def _closes(client: httpx.AsyncClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.aclose()
