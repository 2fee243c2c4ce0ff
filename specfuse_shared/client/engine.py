"""An engine behind `specfuse-llm serve`: the same events, errors and counts as in this process, over HTTP."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from copy import copy
from dataclasses import fields
from typing import Any, Self, Unpack

import httpx
from tenacity import AsyncRetrying, Retrying

from specfuse_shared import bounded_http
from specfuse_shared.addresses import is_private, server_address
from specfuse_shared.bounded_http import ResponseRefusedError
from specfuse_shared.client import MAX_RETRIES
from specfuse_shared.client.connections import CONNECT_SECONDS, Connections, checked_headers
from specfuse_shared.client.events import RemoteStream, events_of, understood
from specfuse_shared.client.retries import again
from specfuse_shared.client.wire import error_from_json, request_to_json
from specfuse_shared.errors import AuthenticationError, ConfigError, EngineClosedError, RequestError, SpecFuseError
from specfuse_shared.events import Event
from specfuse_shared.messages import Message, Tool
from specfuse_shared.results import EnsembleResult
from specfuse_shared.serving.calls import (
    CallOptions,
    Conversation,
    check_options,
    conversation_of,
    params_of,
    tools_of,
)
from specfuse_shared.serving.streams import result_of
from specfuse_shared.settings.config import EnsembleConfig
from specfuse_shared.settings.sampling_params import SamplingParams
from specfuse_shared.validation import is_whole_text

KEY_ENV = "SPECFUSE_API_KEY"
GRACE_SECONDS = 30.0
"""How long after the timeout of an answer its server may still send."""
SILENT_SECONDS = 600.0
"""How long a server may send nothing, where a call has no timeout of its own."""
_MAX_CONCURRENT = next(f.default for f in fields(EnsembleConfig) if f.name == "max_concurrent")


class RemoteEngine:
    """One model of a server. Any number of threads and event loops may ask at once; connections are kept.

    `base_url`: the server's, with or without "/v1". `model`: one that it lists; its first, if None. `api_key`: what it
    was started with; that of the environment variable SPECFUSE_API_KEY, if None. `max_retries`: how often a request is
    made again where nobody answers or the server is busy; `headers` go with each. Connects on first use.

    Raises `ConfigError` for a key that would cross a network without TLS. Calls raise `EngineClosedError` where no
    server answers, `AuthenticationError` for a wrong key, `UnknownModelError` for a model that it does not know, and
    otherwise what the engine raises in its own process.
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
        own: dict[str, str | bytes] = {**bounded_http.HEADERS, **checked_headers("default_headers", headers), **key}
        self._connections = Connections(self.base_url, own)
        self._extra: Mapping[str, str] = {}

    def sending(self, headers: Mapping[str, str] | None) -> Self:
        """The same model over the same connections, with more headers in each request. Raises `ConfigError`."""
        other = copy(self)
        other._extra = {**self._extra, **checked_headers("extra_headers", headers)}
        return other

    def __repr__(self) -> str:
        return f"RemoteEngine({self.base_url!r}, {self._model!r})"

    @property
    def closed(self) -> bool:
        """Never: it connects again when it is asked."""
        return False

    @property
    def is_of_this_process(self) -> bool:
        """Always: after a fork it connects anew."""
        return True

    @property
    def label(self) -> str:
        """The model's name as far as it is known without asking; never an address, which is nobody's affair."""
        return str(self._model or self.known.get("id") or "specfuse")

    @property
    def thinks(self) -> bool:
        """A member thinks before it answers; False before the server was asked."""
        return bool(self.known.get("thinking"))

    @property
    def max_concurrent(self) -> int:
        """Most answers that run at once."""
        return int(self.known.get("max_concurrent", _MAX_CONCURRENT))

    @property
    def known(self) -> Mapping[str, Any]:
        """What the server has said of its model; nothing before it was asked."""
        return self._described

    @property
    def model(self) -> str:
        """The model's name; asks the server if none was given."""
        return str(self.describe()["id"]) if self._model is None else self._model

    @property
    def context_limit(self) -> int | None:
        """Tokens that the smallest member's context holds; None before the server was asked."""
        limit: int | None = self.known.get("context_limit")
        return limit

    def describe(self) -> Mapping[str, Any]:
        """Members, reference, context_limit, max_concurrent and the members that think, as the server says."""
        if not self._described:
            path = "/v1/models" if self._model is None else f"/v1/models/{self._model}"
            told = self._call("GET", path)
            with understood(self.base_url):
                told = told["data"][0] if self._model is None else told
                self._described |= {"id": told["id"], **told["specfuse"]}
        return self._described

    def load(self, on_progress: object = None) -> Self:
        """Ask the server for its model; loading is its own affair."""
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
        told = self._call("POST", "/tokenize", {"model": self.model, "messages": turns, "tools": offered})
        return int(told["count"])

    def generate(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> EnsembleResult:
        """Answer a conversation; the fold of `stream`."""
        return result_of(self.stream(messages, params, **options))

    def stream(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> Iterator[Event]:
        """Answer a conversation as typed events. Raises here what the server refuses; closing it stops the answer."""
        request = self._request(conversation_of(messages), params, options)
        with self._reached():
            response = self._sent(request, options.get("timeout"))
        if response.is_error:
            raise _refusal(response)
        return RemoteStream(response, self._connections)

    async def astream(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> AsyncIterator[Event]:
        """`stream` without blocking the event loop; closing it or cancelling its task stops the answer."""
        if self._model is None:
            await asyncio.to_thread(self.describe)
        request = self._request(conversation_of(messages), params, options)
        with self._reached():
            response = await self._asent(request, options.get("timeout"))
        async with aclosing(response):
            if response.is_error:
                raise _refusal(response)
            async with aclosing(events_of(response)) as events:
                async for event in events:
                    yield event

    def close(self) -> None:
        """Let the connections go; a call makes new ones."""
        self._connections.close()

    def _request(self, messages: Sequence[Message], params: SamplingParams | None, options: CallOptions) -> Any:
        check_options(options)
        if options.get("timeout") == math.inf:
            options = {**options, "timeout": None}
        body = request_to_json(messages, params_of(params), options)
        body |= {"model": self.model, "stream": True, "specfuse": {"events": True}}
        seconds = options.get("timeout")
        whole = None if seconds is None else seconds + GRACE_SECONDS
        timeout = httpx.Timeout(CONNECT_SECONDS, read=SILENT_SECONDS if whole is None else whole)
        bounds = {bounded_http.SECONDS: whole}
        return self._built("POST", "/v1/chat/completions", json=body, timeout=timeout, extensions=bounds)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        with self._reached():
            response = self._sent(self._built(method, path, json=body))
            response.read()
        if response.is_error:
            raise _refusal(response)
        with understood(self.base_url):
            return response.json()

    def _built(self, method: str, path: str, **content: Any) -> httpx.Request:
        """Raises `RequestError` for content that is no JSON, such as a schema with NaN in it."""
        try:
            return self._connections.client().build_request(method, path, headers=self._extra, **content)
        except ValueError as error:
            raise RequestError(f"the request is no JSON: {error}") from error

    def _sent(self, request: httpx.Request, seconds: float | None = None) -> httpx.Response:
        """The response to a request, which is made again where that may help; one of an error is read."""

        def send() -> httpx.Response:
            response = self._connections.client().send(request, stream=True)
            if response.is_error:
                response.read()
            return response

        return Retrying(**again(self._max_retries, seconds))(send)

    async def _asent(self, request: httpx.Request, seconds: float | None = None) -> httpx.Response:
        async def send() -> httpx.Response:
            client = await self._connections.of_loop()
            response = await client.send(request, stream=True)
            if response.is_error:
                await response.aread()
            return response

        return await AsyncRetrying(**again(self._max_retries, seconds))(send)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except ResponseRefusedError as error:
            raise SpecFuseError(f"the server at {self.base_url} is not believed: {error}") from error
        except httpx.TransportError as error:
            what = f"no server answers at {self.base_url} ({type(error).__name__})"
            raise EngineClosedError(f"{what}: start one with specfuse-llm serve, or correct base_url") from error


def _key_for(base_url: str, given: str | None) -> str | None:
    """The key that goes with every request. Raises `ConfigError` where others could read it on its way."""
    key = (os.environ.get(KEY_ENV, "") if given is None else given).strip()
    whose = f"that {KEY_ENV} holds" if given is None else "of api_key=…"
    if not (key.isprintable() and is_whole_text(key)):
        raise ConfigError(f"the key {whose} holds what no header can: give it as the server has it, on one line")
    if not key or is_private(base_url):
        return key or None
    raise ConfigError(
        f"the key {whose} would go to {base_url} unencrypted: use an https:// address, or a tunnel to 127.0.0.1; "
        'api_key="" sends no key'
    )


def _refusal(response: httpx.Response) -> SpecFuseError:
    """The error of a response, as the engine would have raised it."""
    try:
        error = response.json()["error"]
        refused = error_from_json(error.get("specfuse") or error)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return SpecFuseError(f"{response.url.host} answers {response.status_code}: it is no server of SpecFuse")
    if response.status_code == 401:
        return AuthenticationError(f"the server asks for its key: give api_key=…, or set {KEY_ENV}")
    return refused
