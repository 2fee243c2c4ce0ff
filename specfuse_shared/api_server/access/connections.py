"""Timeouts for slow clients (heads, bodies, unread responses), and a limit on connections.

uvicorn itself has no such timeouts. Above the limit, a new connection replaces the one that has been silent for
longest, so that silent connections cannot lock clients out.

The class is passed as uvicorn's `http` setting. Its parser is always h11, which limits heads to 16 KiB, even if
httptools is installed.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specfuse_shared.api_server.settings import ServerSettings

_OWED = {h11.IDLE: 0.0, h11.SEND_BODY: 5.0}
"""States in which the client must send data, and additional seconds. A late body first gets a response (408)."""


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 of one connection. The client has `seconds` for each head, each body and each read."""

    seconds: ClassVar[float]
    most: ClassVar[int]

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._owed: Any = None
        self._owed_since = 0.0
        self._sending: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            dropped = self._longest_silent() or self
            dropped.drop()
            if dropped is self:
                return
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(self.seconds, self.transport.abort)  # unread data keep the connection open

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._sending, self._reading):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close at once. The connection counts until it is lost, but `_longest_silent` ignores it."""
        if self._sending is not None:
            self._sending.cancel()
        self._sending = None
        self.transport.abort()

    def _longest_silent(self) -> BoundedProtocol | None:
        """The connection whose client has owed a head or a body for longest; None if all wait for answers."""
        silent = (c for c in self.connections if isinstance(c, BoundedProtocol) and c._sending is not None)
        return min(silent, key=lambda c: c._owed_since, default=None)

    def _watch(self) -> None:
        """Start the timer of a head or body at its beginning. Later pieces do not restart it."""
        state = self.conn.their_state
        if state is self._owed:
            return
        if self._sending is not None:
            self._sending.cancel()
        self._owed, self._owed_since = state, self.loop.time()
        self._sending = None
        if (more := _OWED.get(state)) is not None:
            self._sending = self.loop.call_later(self.seconds + more, self.transport.abort)


def protocol_of(settings: ServerSettings) -> type[H11Protocol]:
    """The protocol of a server's connections, under its settings."""
    bounds = {"seconds": settings.connection_seconds, "most": settings.max_connections}
    return type("BoundedProtocol", (BoundedProtocol,), bounds)
