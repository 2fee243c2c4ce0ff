"""Limits on a server's responses: bytes, seconds, no compression. Used as event hooks of an httpx client.

Server addresses: which are well formed, which are loopback, and which certificates TLS trusts.
"""

from __future__ import annotations

import ipaddress
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from functools import cache
from urllib.parse import urlsplit

import httpx

from specfuse_shared.errors import ConfigError

MOST_BYTES = 64 * 2**20
"""Of one response. Log-probabilities of a thousand prompts take a tenth of it."""
SECONDS = "specfuse_seconds"
"""Extension of a request: seconds that its whole response may take."""
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


def server_address(what: str, url: str) -> str:
    """`url` without a trailing slash or "/v1". Raises `ConfigError`, which calls it `what`, if it is no address."""
    address = url.strip().rstrip("/").removesuffix("/v1")
    if not _is_address(address):
        # anything in the position of a password is hidden
        safe_url = "…" if "@" in url else url
        raise ConfigError(f"{what} is {safe_url!r}: give the address of a server, such as http://127.0.0.1:8000")
    return address


def is_loopback(host: str) -> bool:
    """Only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_private(address: str) -> bool:
    """The connection is private: TLS, or this machine."""
    parts = urlsplit(address)
    return parts.scheme == "https" or is_loopback(parts.hostname or "")


@cache
def trusted() -> ssl.SSLContext:
    """TLS trust store, cached: reading the certificates takes as long as a forward pass."""
    import httpx

    return httpx.create_ssl_context()


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # no such port
        return False
    is_bare = "@" not in parts.netloc and not parts.query and not parts.fragment
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and is_bare
