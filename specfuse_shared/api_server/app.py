"""The ASGI application and its routes, over models that the caller loads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from specfuse_shared.api_server import page
from specfuse_shared.api_server.access.clients import Clients
from specfuse_shared.api_server.access.guard import GONE, Guard, HttpCounters
from specfuse_shared.api_server.failures import HttpError, error_body, error_headers, status_of
from specfuse_shared.api_server.models import Models
from specfuse_shared.api_server.replies.answers import ChoiceReader
from specfuse_shared.api_server.replies.formats import ChatFormat, CompletionFormat, Format, usage_of
from specfuse_shared.api_server.replies.responses_api import ResponsesFormat
from specfuse_shared.api_server.replies.streaming import (
    ChoiceStream,
    EventStreamResponse,
    fold,
    run_choices,
    unless_gone,
)
from specfuse_shared.api_server.requests.bodies import (
    Asked,
    BodyError,
    ChatBody,
    CompletionBody,
    TokenizeBody,
    read_body,
)
from specfuse_shared.api_server.requests.calls import Call, Reader
from specfuse_shared.api_server.requests.responses_api import NOTHING_KEPT, ResponsesBody
from specfuse_shared.api_server.settings import ServerSettings
from specfuse_shared.config import SamplingParams
from specfuse_shared.errors import SpecFuseError
from specfuse_shared.serving.prometheus import prometheus_collector

READERS = 4
"""Threads that parse request bodies."""
T = TypeVar("T")
A = TypeVar("A", bound=Asked)

DRAINED_BODIES = 16
"""A body over the limit is drained up to this multiple of the limit, so that its sender receives the error."""


@dataclass(slots=True)
class Service:
    """The endpoints, and the state that they share."""

    models: Models
    settings: ServerSettings = field(default_factory=ServerSettings)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    began: int = field(default_factory=lambda: int(time.time()))
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(READERS, "specfuse-http"))

    def __post_init__(self) -> None:
        self.registry.register(prometheus_collector(self.models.engines))

    @property
    def reader(self) -> Reader:
        return Reader(self.models, self.settings, self.sampling)

    # ── answers ──────────────────────────────────────────────────────────────────────────────────

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatBody, self.reader.chat, ChatFormat)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionBody, self.reader.completion, CompletionFormat)

    async def responses(self, request: Request) -> Response:
        return await self._answer(request, ResponsesBody, self.reader.response, ResponsesFormat)

    async def kept_response(self, request: Request) -> Response:
        raise HttpError(404, f"{NOTHING_KEPT}: only the reply to POST /v1/responses contains a response")

    async def _answer(
        self, request: Request, kind: type[A], read: Callable[[A], Call], write: Callable[[A, Call], Format]
    ) -> Response:
        def called(raw: bytes) -> tuple[A, Call]:
            body = read_body(kind, raw)
            self.models.find(body.model).engine.check_busy()
            return body, read(body)

        try:
            parsed, call = await self._read(request, called)
            answers = [ChoiceReader(i, call, parsed.extension) for i in range(len(call.choices))]
            request.state.logged = {"model": call.model.id}
            pieces, form = run_choices(call, answers, request.state.client), write(parsed, call)
            if not parsed.stream:
                folded = await unless_gone(request, fold(pieces, answers))
                request.state.logged |= usage_of(answers)
                return JSONResponse(form.whole(answers, folded))
            # the first piece comes once the request is accepted, so that an error still sets the status code
            first = await unless_gone(request, anext(pieces))
            return EventStreamResponse(ChoiceStream(pieces, answers, form, request.state.logged).lines(first))
        except ClientDisconnect:
            return Response(status_code=GONE)

    async def tokenize(self, request: Request) -> Response:
        def counted(raw: bytes) -> dict[str, Any]:
            body = read_body(TokenizeBody, raw)
            model = self.models.find(body.model)
            if (body.prompt is None) == (body.messages is None):
                raise BodyError("give either prompt (a text) or messages (a conversation)")
            payload: dict[str, Any] = {"max_model_len": model.engine.context_limit}
            if body.messages is None:
                ids = model.engine.tokenize(body.prompt or "", members=model.members)
                return {**payload, "count": len(ids), "tokens": ids}
            turns, tools = self.reader.conversation(body.messages, body.tools)
            return {**payload, "count": model.engine.count_tokens(turns, tools, members=model.members)}

        try:
            return JSONResponse(await self._read(request, counted))
        except ClientDisconnect:
            return Response(status_code=GONE)

    async def input_tokens(self, request: Request) -> Response:
        """The number of prompt tokens of a request of the Responses API, with its tools and schema."""

        def counted(raw: bytes) -> dict[str, Any]:
            call = self.reader.response(read_body(ResponsesBody, raw))
            [choice], engine = call.choices, call.model.engine
            count = engine.count_tokens(choice.messages, call.use.offered, members=call.model.members)
            return {"object": "response.input_tokens", "input_tokens": count}

        try:
            return JSONResponse(await self._read(request, counted))
        except ClientDisconnect:
            return Response(status_code=GONE)

    async def _read(self, request: Request, read: Callable[[bytes], T]) -> T:
        """The result of `read` for the body. It runs in a thread, because validating grammars and texts takes time."""
        raw = await self._raw(request)
        return await unless_gone(request, request.state.client.read(raw, read, self.threads))

    async def _raw(self, request: Request) -> bytes:
        """The body. Raises `HttpError` if it is too long, arrives too slowly, or has no JSON content type."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HttpError(415, "the body must be JSON: send the header Content-Type: application/json")
        limit, seconds = self.settings.max_body_bytes, self.settings.connection_seconds
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > limit * DRAINED_BODIES:
                        break
                    parts.append(part) if size <= limit else parts.clear()
        except TimeoutError:
            raise HttpError(408, f"the body did not come within {seconds:g} seconds", "body_too_slow") from None
        if size > limit:
            raise HttpError(413, f"the body has more than {limit} bytes: shorten the conversation", "body_too_long")
        return b"".join(parts)

    # ── about the server ─────────────────────────────────────────────────────────────────────────

    async def list_models(self, request: Request) -> Response:
        listed = [model.to_dict(self.began) for model in self.models.all()]
        return JSONResponse({"object": "list", "data": listed})

    async def show_model(self, request: Request) -> Response:
        return JSONResponse(self.models.named(request.path_params["id"]).to_dict(self.began))

    async def health(self, request: Request) -> Response:
        """Readiness. The stage names loading or lost members, and needs the key if the server has one."""
        status = self.models.status
        payload = {"status": status, "stage": self.models.stage} if request.state.client else {"status": status}
        return JSONResponse(payload, 200 if status in ("ok", "degraded") else 503)

    async def live(self, request: Request) -> Response:
        """Liveness: 503 once an engine has failed, so that a supervisor restarts the process."""
        return JSONResponse({"status": "failed" if self.models.failed else "ok"}, 503 if self.models.failed else 200)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    async def failed(self, request: Request, error: Exception) -> Response:
        headers: Mapping[str, str] = {}
        if isinstance(error, HTTPException):
            headers = error.headers or {}
            what = {404: "there is no such path: see GET /v1/models", 405: f"use another method than {request.method}"}
            error = HttpError(error.status_code, what.get(error.status_code, error.detail))
        unknown = HttpError(500, f"the server failed; its log says where under {request.state.id}", "internal_error")
        failure = error if isinstance(error, SpecFuseError) else unknown
        headers = {**headers, **error_headers(failure, self.models.retry_seconds())}
        return JSONResponse(error_body(failure), status_of(failure), headers)


def build_app(service: Service, clients: Clients | None = None) -> ASGIApp:
    """The ASGI application. `clients`: the allowed clients; None allows all."""
    routes = [
        Route("/v1/models", service.list_models, methods=["GET"]),
        Route("/v1/models/{id:path}", service.show_model, methods=["GET"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/v1/responses", service.responses, methods=["POST"]),
        Route("/v1/responses/input_tokens", service.input_tokens, methods=["POST"]),
        Route("/v1/responses/{id:path}", service.kept_response, methods=["GET", "POST", "DELETE"]),
        Route("/tokenize", service.tokenize, methods=["POST"]),
        Route("/live", service.live, methods=["GET"]),
        Route("/health", service.health, methods=["GET"]),
        Route("/metrics", service.metrics, methods=["GET"]),
        *page.routes(),
    ]
    handlers: Mapping[Any, Any] = dict.fromkeys((SpecFuseError, HTTPException, Exception), service.failed)
    paths = frozenset(route.path for route in routes if "{" not in route.path)
    app = Starlette(routes=routes, exception_handlers=handlers)
    clients = clients or Clients(service.settings, None)
    return Guard(app, clients, paths, HttpCounters(service.registry), service.settings.is_loopback)
