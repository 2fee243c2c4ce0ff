"""Checks every request: the key and the origin. Gives it an id and a log line without content.

The log has method, known path, status, seconds, request id and token counts, and the type and traceback lines of
exceptions. It never has a body, a header's value, a query or an unknown path.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specfuse_shared.api_server.access.clients import Client, Clients
from specfuse_shared.api_server.failures import HttpError, error_body, error_headers
from specfuse_shared.api_server.page import FILES

logger = logging.getLogger(__name__)

GONE, BROKEN = 499, 500
OPEN_PATHS = frozenset({*FILES, "/health", "/live"})
"""Paths that need no key: the page and the health checks. They expose no answer."""
_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)
_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.ASCII)


@dataclass(slots=True)
class HttpCounters:
    """Counters of requests, for Prometheus."""

    registry: CollectorRegistry
    requests: Counter = field(init=False)
    open: Gauge = field(init=False)

    def __post_init__(self) -> None:
        what = "HTTP requests by path and status"
        self.requests = Counter("specfuse_http_requests", what, ["path", "status"], registry=self.registry)
        self.open = Gauge("specfuse_http_open", "HTTP requests that are being answered", registry=self.registry)


@dataclass(slots=True)
class _Seen:
    """The log entry of one request."""

    id: str
    path: str
    began: float = field(default_factory=time.monotonic)
    status: int | None = None


class Guard:
    """Wraps an application. `paths`: its known paths. `loopback`: refuse every host name but localhost."""

    def __init__(
        self, app: ASGIApp, clients: Clients, paths: frozenset[str], counters: HttpCounters, loopback: bool
    ) -> None:
        self._app = app
        self._clients = clients
        self._paths = paths
        self._counters = counters
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        entry = _Seen(_request_id(headers), scope["path"] if scope["path"] in self._paths else "other")
        scope.setdefault("state", {})["id"] = entry.id

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = entry.id
                MutableHeaders(scope=message).setdefault("X-Content-Type-Options", "nosniff")
            await send(message)

        with self._counters.open.track_inprogress():
            try:
                client = self._client(scope, headers)
                with client.request() if scope["method"] == "POST" and client is not None else nullcontext():
                    await self._app(scope, receive, answer)
            except HttpError as refusal:
                await _refuse(answer, refusal)
            except ClientDisconnect:
                entry.status = GONE
            except Exception as error:
                _log_failure(entry.id, error)
                entry.status = BROKEN
            finally:
                self._log(scope, entry)

    def _client(self, scope: Scope, headers: Headers) -> Client | None:
        """The client; None for an open path without a key.

        Raises `HttpError` for an unknown key, another host name, or a web page of another site.
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._loopback and not _LOOPBACK.fullmatch(host):
            raise HttpError(403, "this server accepts only the host localhost: use 127.0.0.1", "host_refused")
        if origin is not None and origin.partition("://")[2] != host:
            raise HttpError(403, "a page of another site may not send requests here", "origin_refused")
        client = self._clients.find(headers.get("authorization", ""))
        scope["state"]["client"] = client
        if client is None and scope["path"] not in OPEN_PATHS:
            raise HttpError(401, "the key is missing or wrong: send Authorization: Bearer KEY", "invalid_api_key")
        return client

    def _log(self, scope: Scope, entry: _Seen) -> None:
        status = GONE if entry.status is None else entry.status
        method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        self._counters.requests.labels(entry.path, str(status)).inc()
        extras = " ".join(f"{name}={value}" for name, value in scope["state"].get("logged", {}).items())
        spent = time.monotonic() - entry.began
        logger.info("%s %s %d %.3fs id=%s %s", method, entry.path, status, spent, entry.id, extras)


def _request_id(headers: Mapping[str, str]) -> str:
    """The client's X-Request-ID if it is a plain word, so that both logs can be matched; else a new id."""
    header = headers.get("x-request-id", "")
    return header if _ID.fullmatch(header) else f"req-{secrets.token_hex(8)}"


def _log_failure(request_id: str, error: Exception) -> None:
    """Log the type and the traceback lines. The message is left out, because it may quote the request."""
    code = "".join(traceback.format_tb(error.__traceback__))
    logger.error("request %s failed with %s at\n%s", request_id, type(error).__name__, code)


async def _refuse(send: Send, error: HttpError) -> None:
    body = json.dumps(error_body(error)).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error_headers(error, 1)}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
