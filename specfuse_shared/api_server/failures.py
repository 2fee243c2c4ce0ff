"""Errors of the engine as OpenAI's error objects, with the HTTP status that its clients expect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specfuse_shared.api_server.models import ModelsLoadingError
from specfuse_shared.api_server.requests.bodies import BodyError, LongPromptError
from specfuse_shared.client.wire import error_to_json
from specfuse_shared.errors import (
    ConfigError,
    EngineBusyError,
    EngineClosedError,
    GenerationError,
    MemberLoadError,
    PromptTooLongError,
    RequestError,
    RequestTimeoutError,
    SpecFuseError,
    UnfinishedValueError,
    UnknownModelError,
)
from specfuse_shared.events import Event, FinishEvent, WarningEvent
from specfuse_shared.types import MemberFault

_FAILURES: tuple[tuple[type[SpecFuseError], int, str, str | None], ...] = (
    (UnknownModelError, 404, "invalid_request_error", "model_not_found"),
    (PromptTooLongError, 400, "invalid_request_error", "context_length_exceeded"),
    (LongPromptError, 400, "invalid_request_error", "context_length_exceeded"),
    (RequestError, 400, "invalid_request_error", None),
    (ConfigError, 400, "invalid_request_error", None),
    (UnfinishedValueError, 400, "invalid_request_error", "unfinished_value"),
    (ModelsLoadingError, 503, "server_error", "models_loading"),
    (EngineBusyError, 429, "rate_limit_error", "engine_busy"),
    (RequestTimeoutError, 504, "server_error", "timeout"),
    (GenerationError, 500, "server_error", "generation_failed"),
    (EngineClosedError, 503, "server_error", "stopping"),
    (MemberLoadError, 503, "server_error", "load_failed"),
    (SpecFuseError, 500, "server_error", None),
)
"""Status, type and code of each class of errors. The first matching class counts."""


class HttpError(SpecFuseError):
    """A request that is refused before it reaches the engine. `retry_seconds`: seconds until it may be repeated."""

    def __init__(self, status: int, message: str, code: str | None = None, retry_seconds: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_seconds = retry_seconds


def status_of(error: SpecFuseError) -> int:
    return error.status if isinstance(error, HttpError) else _failure_of(error)[1]


def error_body(error: SpecFuseError) -> dict[str, Any]:
    """OpenAI's error object. `specfuse`: the error for this package's clients, which raise it."""
    body = {"message": error.public, "param": getattr(error, "param", None), "specfuse": error_to_json(error)}
    if isinstance(error, HttpError):
        kind = "rate_limit_error" if error.status == 429 else "invalid_request_error"
        return {"error": {**body, "type": kind, "code": error.code}}
    _, _, kind, code = _failure_of(error)
    param = "model" if isinstance(error, UnknownModelError) else body["param"]
    return {"error": {**body, "param": param, "type": kind, "code": code}}


def public(event: Event) -> Event:
    """The event without the messages of members' errors, which may contain paths and addresses."""
    if isinstance(event, WarningEvent):
        message = MemberFault.public(event.member, event.stage, event.kind)
        return replace(event, message=message.message)
    if isinstance(event, FinishEvent) and event.result.warnings:
        warnings = tuple(MemberFault.public(f.member, f.stage, f.kind) for f in event.result.warnings)
        return FinishEvent(replace(event.result, warnings=warnings))
    return event


def error_headers(error: SpecFuseError, retry_seconds: int) -> dict[str, str]:
    """Headers for a client: when to retry, that it need not retry after a timeout, or that it must send a key."""
    if isinstance(error, EngineBusyError) or (isinstance(error, HttpError) and error.code == "too_many_requests"):
        return {"Retry-After": str(retry_seconds)}
    if isinstance(error, HttpError) and error.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, HttpError) and error.retry_seconds is not None:
        return {"Retry-After": str(error.retry_seconds)}
    return {"x-should-retry": "false"} if isinstance(error, RequestTimeoutError) else {}


def _failure_of(error: SpecFuseError) -> tuple[type[SpecFuseError], int, str, str | None]:
    return next(failure for failure in _FAILURES if isinstance(error, failure[0]))


__all__ = ["BodyError", "HttpError", "error_body", "error_headers", "public", "status_of"]
