"""JSON over HTTP with one server of a model: connections that are kept, timeouts, and errors by name."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from specfuse_shared import bounded_http
from specfuse_shared.addresses import trusted
from specfuse_shared.bounded_http import ResponseRefusedError
from specfuse_shared.errors import ServerError, ServerKeyError, ServerModelError, ServerUnreachableError

CONNECT_SECONDS = 10.0
_KEPT_SECONDS = 4.0
"""Idle connections go before the servers, which keep them for 5 s, end them."""
_MOST_SHOWN = 300
"""Characters of what a server says went wrong."""

OnRequest = Callable[[float, int], None]
"""Called after each request with the seconds that it took, and the steps that a model made for it."""


class ServerClient:
    """Belongs to one event loop. `key`: sent as `Authorization: Bearer …`, and shown nowhere.

    `timeout`: seconds for a whole request, after which it is cancelled, which servers take for a client that left.
    `key_name`: what to call the key in an error.
    """

    def __init__(
        self,
        address: str,
        key: str | None = None,
        key_name: str | None = None,
        timeout: float = 60.0,
        on_request: OnRequest = lambda seconds, steps: None,
    ) -> None:
        self.address = address
        self.on_request = on_request
        self._key_name = key_name
        self._timeout = timeout
        self._http = httpx.AsyncClient(
            base_url=address,
            headers={**bounded_http.HEADERS, **({"Authorization": f"Bearer {key}"} if key else {})},
            event_hooks={"response": [bounded_http.abound]},
            verify=trusted(),
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEPT_SECONDS),
        )

    def __repr__(self) -> str:
        return f"ServerClient({self.address!r})"

    async def get(self, path: str) -> httpx.Response:
        """What the server answers, whatever its status. Raises `ServerUnreachableError`."""
        return await self._sent(lambda: self._http.get(path), min(self._timeout, CONNECT_SECONDS))

    async def post(self, path: str, body: Mapping[str, Any], steps: int = 1) -> Any:
        """The JSON that answers `body`, for which a model makes so many `steps`. Raises `ServerError`."""
        began = time.monotonic()
        response = await self._sent(lambda: self._http.post(path, json=dict(body)), self._timeout)
        answer = self.read(response)
        self.on_request(time.monotonic() - began, steps)
        return answer

    async def tokenized(self, model: str, text: str) -> list[int]:
        """Ids of a text as the server's tokenizer has them, without special tokens."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        ids: list[int] = (await self.post("/tokenize", body))["tokens"]
        return ids

    def read(self, response: httpx.Response) -> Any:
        """The JSON of a response. Raises `ServerError` for one that is none, or says that something went wrong."""
        if response.is_error:
            raise self._refusal(response)
        try:
            return json.loads(response.content)
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{self.address}{response.url.path} answers no JSON: is a model served there?") from error

    async def close(self) -> None:
        await self._http.aclose()

    async def _sent(self, send: Callable[[], Any], seconds: float) -> httpx.Response:
        """Requests say all that they need, so one whose connection breaks is sent once more."""
        try:
            async with asyncio.timeout(seconds):
                try:
                    response: httpx.Response = await send()
                except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                    response = await send()
                return response
        except TimeoutError as error:
            raise ServerUnreachableError(
                f"the server at {self.address} did not answer within {seconds:g} s: give it time with "
                "MemberConfig(server_timeout=…), or look after it"
            ) from error
        except ResponseRefusedError as error:
            raise ServerError(f"the server at {self.address} is not believed: {error}") from error
        except httpx.TransportError as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise ServerUnreachableError(
                f"no server answers at {self.address} ({reason}): start it, or correct MemberConfig(server=…)"
            ) from error

    def _refusal(self, response: httpx.Response) -> ServerError:
        said = _message(response)
        if response.status_code in (401, 403):
            named = f"the one in {self._key_name} is not its own" if self._key_name else "name it with api_key_env=…"
            return ServerKeyError(f"the server at {self.address} asks for its key: {named}")
        kind = ServerModelError if response.status_code == 404 else ServerError
        return kind(f"the server at {self.address} answers {response.status_code} to {response.url.path}: {said}")


def _message(response: httpx.Response) -> str:
    """What a server says went wrong, in its own words."""
    try:
        body = response.json()
    except ValueError:
        body = response.text
    if isinstance(body, Mapping):
        body = body.get("error", body)
    if isinstance(body, Mapping):
        body = body.get("message", body)
    return " ".join(str(body).split())[:_MOST_SHOWN]
