"""Limits on a server's responses: bytes, seconds, no compression. Used as event hooks of an httpx client."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

import httpx

MOST_BYTES = 64 * 2**20
"""Of one response. Log-probabilities of a thousand prompts take a tenth of it."""
SECONDS = "specfuse_seconds"
"""Extension of a request: seconds that its whole response may take."""
CONNECT_SECONDS = 10.0
"""How long a connection to a server may take to open."""
HEADERS = {"Accept-Encoding": "identity"}


class ResponseRefusedError(httpx.TransportError):
    """A response that is too long, takes too long, or is compressed; the rest of it is not read."""


def bound(response: httpx.Response) -> None:
    """A hook for `httpx.Client(event_hooks={"response": [bound]})`. Raises `ResponseRefusedError`."""
    _check_encoding(response)
    response.stream = _Bounded(response)


async def abound(response: httpx.Response) -> None:
    """`bound` for `httpx.AsyncClient`."""
    bound(response)


class _Bounded(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The stream of a response, up to its bounds."""

    def __init__(self, response: httpx.Response) -> None:
        self._stream = response.stream
        self._request = response.request
        seconds = self._request.extensions.get(SECONDS)
        self._ends = None if seconds is None else time.monotonic() + float(seconds)
        self._bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        assert isinstance(self._stream, httpx.SyncByteStream)
        for part in self._stream:
            yield self._counted(part)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert isinstance(self._stream, httpx.AsyncByteStream)
        async for part in self._stream:
            yield self._counted(part)

    def close(self) -> None:
        assert isinstance(self._stream, httpx.SyncByteStream)
        self._stream.close()

    async def aclose(self) -> None:
        assert isinstance(self._stream, httpx.AsyncByteStream)
        await self._stream.aclose()

    def _counted(self, part: bytes) -> bytes:
        self._bytes += len(part)
        if self._bytes > MOST_BYTES:
            raise ResponseRefusedError(f"it sends more than {MOST_BYTES >> 20} MiB", request=self._request)
        if self._ends is not None and time.monotonic() > self._ends:
            raise ResponseRefusedError("its response takes longer than the timeout allows", request=self._request)
        return part


def _check_encoding(response: httpx.Response) -> None:
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        message = f"it compresses ({encoding[:20]}) what was asked for as it is"
        raise ResponseRefusedError(message, request=response.request)
