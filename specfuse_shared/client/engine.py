"""An engine on a server (`specfuse-llm serve`): the same events, errors and counts as a local one, over HTTP.

- Connections: one httpx client for all threads, and one for each event loop, closed with its loop.
- Events: parsed from a server's response.
- Retries: only if the server did not respond, was busy or failed (a status of 5xx), never once an answer has begun.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from copy import copy
from dataclasses import fields
from email.utils import parsedate_to_datetime
from typing import Any, Self, Unpack
from urllib.parse import quote
from weakref import WeakKeyDictionary, finalize

import httpx
from httpx import Response, TransportError
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    stop_after_attempt,
    stop_before_delay,
    wait_exponential,
    wait_random,
)

from specfuse_shared import bounded_http
from specfuse_shared.addresses import is_private, server_address, trusted
from specfuse_shared.bounded_http import ResponseRefusedError
from specfuse_shared.client import MAX_RETRIES
from specfuse_shared.client.wire import error_from_json, event_from_json, request_to_json
from specfuse_shared.config import EnsembleConfig, SamplingParams
from specfuse_shared.errors import (
    AuthenticationError,
    ConfigError,
    EngineClosedError,
    GenerationError,
    RequestError,
    SpecFuseError,
)
from specfuse_shared.events import EnsembleResult, Event, FinishEvent, SegmentEvent
from specfuse_shared.messages import Message, Tool
from specfuse_shared.serving.calls import CallOptions, Conversation, check_options, conversation_of, params_of, tools_of
from specfuse_shared.serving.scheduler import result_of
from specfuse_shared.validation import is_whole_text

REQUEST_SECONDS = 60.0
"""Maximum silence of a server in any request but an answer's."""
_NAME, _VALUE = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"), re.compile(r"[\x20-\x7e]*")
_CLIENT_HEADERS = (
    "authorization",
    "accept-encoding",
    "connection",
    "content-length",
    "content-type",
    "transfer-encoding",
)
"""Headers that the client sets itself."""


def checked_headers(what: str, headers: Mapping[str, str] | None) -> dict[str, str]:
    """A user's headers, checked. Raises `ConfigError` for an invalid one; the message never contains a value."""
    if not isinstance(headers or {}, Mapping):
        raise ConfigError(f'{what} must be names and values, such as {{"X-Team": "blue"}}')
    for name, value in (headers or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(f"{what} holds {name!r}: names and values of headers are text")
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ConfigError(f"{what} holds {name!r}, which cannot be an HTTP header: use printable ASCII")
        if name.lower() == "authorization":
            raise ConfigError(f"{what} holds {name!r}: give the key as api_key=…, so that it is kept secret")
        if name.lower() in _CLIENT_HEADERS:
            raise ConfigError(f"{what} holds {name!r}, which the client sets by itself: leave it out")
    return dict(headers or {})


Loops = WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, AsyncGenerator[None, None]]]


class Connections:
    """The connections to one server, kept between requests, for any number of threads and event loops at once."""

    def __init__(self, base_url: str, headers: Mapping[str, str | bytes]) -> None:
        self._base_url = base_url
        self._headers = headers
        self._lock = threading.Lock()
        self._client: httpx.Client | None = None
        self._loops: Loops = WeakKeyDictionary()
        self._process = os.getpid()

    def client(self) -> httpx.Client:
        """The client for the threads of this process."""
        with self._lock:
            self._check_process()
            if self._client is None:
                self._client = httpx.Client(**self._settings(bounded_http.bound))
                finalize(self, self._client.close)  # httpx does not close the sockets of a dropped client
            return self._client

    async def of_loop(self) -> httpx.AsyncClient:
        """The client of the running event loop. An asynchronous generator closes it when the loop shuts down."""
        loop, closer = asyncio.get_running_loop(), None
        with self._lock:
            self._check_process()
            for closed in [each for each in self._loops if each.is_closed()]:
                del self._loops[closed]
            if loop not in self._loops:
                client = httpx.AsyncClient(**self._settings(bounded_http.abound))
                closer = _close_on_exit(client)
                self._loops[loop] = (client, closer)
            client, _ = self._loops[loop]
        if closer is not None:
            await anext(closer)
        return client

    def close(self) -> None:
        """Close the connections; the next request makes new ones."""
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
            "timeout": httpx.Timeout(REQUEST_SECONDS, connect=bounded_http.CONNECT_SECONDS),
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=20),
        }


async def _close_on_exit(client: httpx.AsyncClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.aclose()


_DATA, _DONE = "data: ", "[DONE]"
END_SECONDS = 1.0
"""Maximum time to read the end of a response after its answer. Only then can its connection be used again."""


class _Lines:
    """Splits a response into lines, at line feeds alone: httpx also splits at U+2028, which texts may contain."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []

    def take(self, part: bytes) -> list[str]:
        """The lines that this part completes."""
        self._begun.append(part)
        if b"\n" not in part:
            return []
        *whole, rest = b"".join(self._begun).split(b"\n")
        self._begun = [rest]
        return [line.decode("utf-8", "replace").rstrip("\r") for line in whole]


def _lines(response: Response) -> Iterator[str]:
    lines = _Lines()
    for part in response.iter_bytes():
        yield from lines.take(part)


async def _alines(response: Response) -> AsyncGenerator[str, None]:
    lines = _Lines()
    async for part in response.aiter_bytes():
        for line in lines.take(part):
            yield line


class RemoteStream(Iterator[Event]):
    """The events of one answer. Closing or dropping it stops the answer, even before the first iteration.

    `owner`: kept alive, because its deletion would close the response's connection.
    """

    def __init__(self, response: Response, owner: object = None) -> None:
        self._response = response
        self._kept = owner
        self._read = _EventReader()
        self._lines = _lines(response)

    def __next__(self) -> Event:
        try:
            for line in self._lines:
                if (event := self._read.event(line)) is not None:
                    if self._read.over:
                        self._read_rest()
                    return event
        except ResponseRefusedError as error:
            self.close()
            raise self._read.refused(error) from error
        except TransportError as error:
            raise self._read.lost() from error
        except SpecFuseError:
            self.close()
            raise
        if not self._read.over:
            raise self._read.lost()
        raise StopIteration

    def _read_rest(self) -> None:
        """Read the response to its end, for at most `END_SECONDS`."""
        timer = threading.Timer(END_SECONDS, _shut_down, (self._response,))
        timer.daemon = True
        timer.start()
        try:
            with suppress(TransportError):
                for _ in self._lines:
                    pass
        finally:
            timer.cancel()
            self.close()

    def close(self) -> None:
        """Stop the answer."""
        self._read.over, self._lines = True, iter(())
        self._response.close()

    def __del__(self) -> None:
        self.close()


def _shut_down(response: Response) -> None:
    """Shut the connection down, which ends a read in another thread."""
    with suppress(OSError, KeyError):  # closed already, or a transport without connections
        response.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)


async def events_of(response: Response) -> AsyncGenerator[Event, None]:
    """The events of one answer, on an event loop."""
    read, lines = _EventReader(), _alines(response)
    try:
        async for line in lines:
            if (event := read.event(line)) is not None:
                yield event
            if read.over:
                with suppress(TimeoutError, TransportError):
                    async with asyncio.timeout(END_SECONDS):
                        async for _ in lines:
                            pass
                return
    except ResponseRefusedError as error:
        raise read.refused(error) from error
    except TransportError as error:
        raise read.lost() from error
    raise read.lost()


@contextmanager
def checked_format(server: str) -> Iterator[None]:
    """Raises `SpecFuseError` if the server's data do not have SpecFuse's format."""
    try:
        yield
    except SpecFuseError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:  # pydantic's are ValueErrors
        raise SpecFuseError(f"{server} does not answer like a SpecFuse server ({type(error).__name__})") from error


class _EventReader:
    """Reads lines of server-sent events, and keeps the text of the answer so far."""

    def __init__(self) -> None:
        self.text = ""
        self.over = False

    def event(self, line: str) -> Event | None:
        """The event in a line, None if there is none. Raises the error that a line contains."""
        if not line.startswith(_DATA) or line == _DATA + _DONE:
            return None
        with checked_format("the server"):
            return self._event(json.loads(line.removeprefix(_DATA)))

    def _event(self, data: Mapping[str, Any]) -> Event | None:
        if (error := data.get("error")) is not None:
            raise error_from_json(error.get("specfuse") or error)
        details: Mapping[str, Any] = data["choices"][0].get("specfuse", {}) if data["choices"] else {}
        for sent_event in details.get("events", ()):
            event = event_from_json(sent_event)
            self.text += event.text if isinstance(event, SegmentEvent) else ""
            self.over = isinstance(event, FinishEvent)
            return event
        if (error := details.get("error")) is not None:
            raise error_from_json(error)
        return None

    def refused(self, error: Exception) -> GenerationError:
        return GenerationError(f"the server's response was refused: {error}", member=None, text=self.text)

    def lost(self) -> EngineClosedError:
        return EngineClosedError("the connection to the server was lost during the answer: try again", text=self.text)


LONGEST_SECONDS = 60.0
"""If a server asks for a longer wait than this (Retry-After), the request is not made again."""
_RETRIED_ERRORS = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.ReadError,
    httpx.WriteError,
    httpx.RemoteProtocolError,
)
"""Exceptions that are retried. A read timeout is not retried, because the answer would take the same time again."""
_RETRIED_STATUSES = (408, 429)
_backoff = wait_exponential(multiplier=0.5, max=8) + wait_random(0, 0.5)


def retry_settings(attempts: int, seconds: float | None = None) -> dict[str, Any]:
    """Settings of tenacity's `Retrying` and `AsyncRetrying`: at most `attempts` retries, none after `seconds`.

    The retried function returns a response. The result is the last response, or the last httpx error is raised.
    """
    stop = stop_after_attempt(attempts + 1)
    return {
        "stop": stop if seconds is None else stop | stop_before_delay(seconds),
        "wait": _wait,
        "retry": _should_retry,
        "retry_error_callback": lambda state: state.outcome.result(),
    }


def retry_after(response: httpx.Response) -> float | None:
    """Seconds that the server asks to wait, given as a number or a date; None if it does not."""
    header = response.headers.get("retry-after", "").strip()
    try:
        seconds = (
            float(header) if not header.endswith("GMT") else parsedate_to_datetime(header).timestamp() - time.time()
        )
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _should_retry(state: RetryCallState) -> bool:
    assert state.outcome is not None
    if (error := state.outcome.exception()) is not None:
        return isinstance(error, _RETRIED_ERRORS)
    response = state.outcome.result()
    if response.headers.get("x-should-retry", "").lower() == "false":
        return False
    busy = response.status_code in _RETRIED_STATUSES or response.status_code >= 500
    return busy and (retry_after(response) or 0) <= LONGEST_SECONDS


def _wait(state: RetryCallState) -> float:
    assert state.outcome is not None
    requested = None if state.outcome.failed else retry_after(state.outcome.result())
    return _backoff(state) if requested is None else requested


KEY_ENV = "SPECFUSE_API_KEY"
GRACE_SECONDS = 30.0
"""Seconds after the timeout of an answer in which its server may still send data."""
SILENT_SECONDS = 600.0
"""Maximum silence of a server if a call has no timeout."""
_MAX_CONCURRENT = next(f.default for f in fields(EnsembleConfig) if f.name == "max_concurrent")


class RemoteEngine:
    """One model of a server, for any number of threads and event loops. Connects on first use, and keeps connections.

    `base_url`: the server's address, with or without "/v1". `model`: one of its models; the first, if None. `api_key`:
    the server's key; by default the environment variable SPECFUSE_API_KEY. `max_retries`: number of retries if the
    server does not respond, is busy or fails. `headers`: sent with each request.

    Raises `ConfigError` for a key that would cross a network without TLS. Calls raise `EngineClosedError` if no server
    answers, `AuthenticationError` for a wrong key, `UnknownModelError` for an unknown model, and otherwise the errors
    of a local engine.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        api_key: str | None = None,
        *,
        max_retries: int = MAX_RETRIES,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.base_url = server_address("base_url", base_url)
        self._model = model
        self._api_key = _key_for(self.base_url, api_key)
        self._max_retries = max_retries
        self._described: dict[str, Any] = {}
        key = {"Authorization": f"Bearer {self._api_key}".encode()} if self._api_key else {}
        sent_headers: dict[str, str | bytes] = {
            **bounded_http.HEADERS,
            **checked_headers("default_headers", headers),
            **key,
        }
        self._connections = Connections(self.base_url, sent_headers)
        self._extra_headers: Mapping[str, str] = {}

    def with_headers(self, headers: Mapping[str, str] | None) -> Self:
        """The same model and connections, with more headers in each request. Raises `ConfigError`."""
        clone = copy(self)
        clone._extra_headers = {**self._extra_headers, **checked_headers("extra_headers", headers)}
        return clone

    def __repr__(self) -> str:
        return f"RemoteEngine({self.base_url!r}, {self._model!r})"

    @property
    def closed(self) -> bool:
        """Always False: it reconnects on use."""
        return False

    @property
    def is_of_this_process(self) -> bool:
        """Always True: it reconnects after a fork."""
        return True

    @property
    def label(self) -> str:
        """The model's name if known without a request. It never contains the private address."""
        return str(self._model or self.known.get("id") or "specfuse")

    @property
    def thinks(self) -> bool:
        """Whether a member thinks before it answers; False before the first request."""
        return bool(self.known.get("thinking"))

    @property
    def max_concurrent(self) -> int:
        """The server's `max_concurrent`; before the first request, the default of `EnsembleConfig`."""
        return int(self.known.get("max_concurrent", _MAX_CONCURRENT))

    @property
    def known(self) -> Mapping[str, Any]:
        """The server's description of its model; empty before the first request."""
        return self._described

    @property
    def model(self) -> str:
        """The model's name, requested from the server if none was given."""
        return str(self.describe()["id"]) if self._model is None else self._model

    @property
    def context_limit(self) -> int | None:
        """Context size of the smallest member, in tokens; None before the first request."""
        limit: int | None = self.known.get("context_limit")
        return limit

    def describe(self) -> Mapping[str, Any]:
        """The server's description: id, members, reference, thinking members, context_limit, max_concurrent."""
        if not self._described:
            path = "/v1/models" if self._model is None else f"/v1/models/{quote(self._model, safe='')}"
            listed = self._call("GET", path)
            with checked_format(self.base_url):
                listed = listed["data"][0] if self._model is None else listed
                self._described |= {"id": listed["id"], **listed["specfuse"]}
        return self._described

    def load(self, on_progress: object = None) -> Self:
        """Request the server's description of the model. The server loads the members by itself."""
        self.describe()
        return self

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text in the reference member."""
        ids: list[int] = self._call("POST", "/tokenize", {"model": self.model, "prompt": text})["tokens"]
        return ids

    def count_tokens(self, messages: Conversation, tools: Sequence[Tool | Mapping[str, Any]] = ()) -> int:
        """Tokens of a prompt in the reference member's chat template, `tools` included."""
        turns = [message.to_dict() for message in conversation_of(messages)]
        offered = [tool.to_dict() for tool in tools_of(tools)]
        counted = self._call("POST", "/tokenize", {"model": self.model, "messages": turns, "tools": offered})
        return int(counted["count"])

    def generate(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> EnsembleResult:
        """Answer a conversation: the result of `stream`."""
        return result_of(self.stream(messages, params, **options))

    def stream(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> Iterator[Event]:
        """Answer a conversation as typed events. If the server refuses the request, this call raises the error.

        Closing the iterator stops the answer.
        """
        request = self._request(conversation_of(messages), params, options)
        with self._transport_errors():
            response = self._send(request, options.get("timeout"))
        if response.is_error:
            raise _error_of(response)
        return RemoteStream(response, self._connections)

    async def astream(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> AsyncIterator[Event]:
        """`stream` without blocking the event loop. Closing it or cancelling its task stops the answer."""
        if self._model is None:
            await asyncio.to_thread(self.describe)
        request = self._request(conversation_of(messages), params, options)
        with self._transport_errors():
            response = await self._asend(request, options.get("timeout"))
        async with aclosing(response):
            if response.is_error:
                raise _error_of(response)
            async with aclosing(events_of(response)) as events:
                async for event in events:
                    yield event

    def close(self) -> None:
        """Close the connections; the next call makes new ones."""
        self._connections.close()

    def _request(self, messages: Sequence[Message], params: SamplingParams | None, options: CallOptions) -> Any:
        check_options(options)
        if options.get("timeout") == math.inf:
            options = {**options, "timeout": None}
        body = request_to_json(messages, params_of(params), options)
        body |= {"model": self.model, "stream": True, "specfuse": {"events": True}}
        seconds = options.get("timeout")
        whole = None if seconds is None else seconds + GRACE_SECONDS
        timeout = httpx.Timeout(bounded_http.CONNECT_SECONDS, read=SILENT_SECONDS if whole is None else whole)
        bounds = {bounded_http.SECONDS: whole}
        return self._build("POST", "/v1/chat/completions", json=body, timeout=timeout, extensions=bounds)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        with self._transport_errors():
            response = self._send(self._build(method, path, json=body))
            response.read()
        if response.is_error:
            raise _error_of(response)
        with checked_format(self.base_url):
            return response.json()

    def _build(self, method: str, path: str, **content: Any) -> httpx.Request:
        """A request. Raises `RequestError` if the content cannot be written as JSON, such as a schema with NaN."""
        try:
            return self._connections.client().build_request(method, path, headers=self._extra_headers, **content)
        except ValueError as error:
            raise RequestError(f"the request cannot be written as JSON: {error}") from error

    def _send(self, request: httpx.Request, seconds: float | None = None) -> httpx.Response:
        """The response to a request, with retries. The body is read only if the response is an error."""

        def send() -> httpx.Response:
            response = self._connections.client().send(request, stream=True)
            if response.is_error:
                response.read()
            return response

        return Retrying(**retry_settings(self._max_retries, seconds))(send)

    async def _asend(self, request: httpx.Request, seconds: float | None = None) -> httpx.Response:
        async def send() -> httpx.Response:
            client = await self._connections.of_loop()
            response = await client.send(request, stream=True)
            if response.is_error:
                await response.aread()
            return response

        return await AsyncRetrying(**retry_settings(self._max_retries, seconds))(send)

    @contextmanager
    def _transport_errors(self) -> Iterator[None]:
        try:
            yield
        except ResponseRefusedError as error:
            raise SpecFuseError(f"the response of the server at {self.base_url} was refused: {error}") from error
        except httpx.TransportError as error:
            what = f"no server answers at {self.base_url} ({type(error).__name__})"
            raise EngineClosedError(f"{what}: start one with specfuse-llm serve, or correct base_url") from error


def _key_for(base_url: str, api_key: str | None) -> str | None:
    """The key to send with every request. Raises `ConfigError` if it would cross a network unencrypted."""
    key = (os.environ.get(KEY_ENV, "") if api_key is None else api_key).strip()
    whose = f"that {KEY_ENV} holds" if api_key is None else "of api_key=…"
    if not (key.isprintable() and is_whole_text(key)):
        raise ConfigError(f"the key {whose} cannot be sent in a header: give it as the server has it, on one line")
    if not key or is_private(base_url):
        return key or None
    raise ConfigError(
        f"the key {whose} would go to {base_url} unencrypted: use an https:// address, or a tunnel to 127.0.0.1; "
        'api_key="" sends no key'
    )


def _error_of(response: httpx.Response) -> SpecFuseError:
    """The error of a response, as the engine would have raised it."""
    try:
        error = response.json()["error"]
        refused = error_from_json(error.get("specfuse") or error)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return SpecFuseError(f"{response.url.host} answers {response.status_code}: this is not a SpecFuse server")
    if response.status_code == 401:
        return AuthenticationError(f"the server needs a key, or got a wrong one: give api_key=…, or set {KEY_ENV}")
    return refused
