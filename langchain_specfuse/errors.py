"""The engine's errors as LangChain's. Each class inherits from both, so `with_retry` and `with_fallbacks` work.

The names are the engine's. A prompt that is too long is a `ContextOverflowError`, an invalid request or setting a
`ModelInvalidRequestError`, and an unknown model a `ModelNotFoundError`. Four kinds are retryable: a timeout
(`ModelTimeoutError`), a full queue (`ModelRateLimitError`), a closed engine (`ModelConnectionError`) and a failed
answer (`ModelAPIError`). A value cut by `max_tokens` is an `OutputParserException` with the beginning in `llm_output`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core import exceptions

from specfuse_shared import errors


class ModelError(errors.SpecFuseError, exceptions.ModelError):
    """An engine error without a class in this module."""


class ConfigError(errors.ConfigError, exceptions.ModelInvalidRequestError):
    """A setting is invalid; the message states the expected value."""


class GrammarError(errors.GrammarError, exceptions.ModelInvalidRequestError):
    """A grammar is malformed, or uses a keyword that no grammar can enforce."""


class MissingExtraError(errors.MissingExtraError, exceptions.ModelInvalidRequestError):
    """An optional feature was used without its extra."""


class AuthenticationError(errors.AuthenticationError, exceptions.ModelAuthenticationError):
    """The server needs a key, or got a wrong one."""


class UnknownModelError(errors.UnknownModelError, exceptions.ModelNotFoundError):
    """No ensemble, and no model of a server, has this name."""


class MemberLoadError(errors.MemberLoadError, exceptions.ModelError):
    """A member could not be loaded."""


class PlacementError(errors.PlacementError, exceptions.ModelError):
    """The members do not fit on the devices, or name one that is missing."""


class UnsupportedModelError(errors.UnsupportedModelError, exceptions.ModelError):
    """A member's probabilities cannot be reproduced."""


class ServerError(errors.ServerError, exceptions.ModelError):
    """A member's server cannot be used, or refused a request."""


class ServerUnreachableError(errors.ServerUnreachableError, exceptions.ModelConnectionError):
    """A member's server is unreachable or timed out."""


class ServerKeyError(errors.ServerKeyError, exceptions.ModelAuthenticationError):
    """A member's server needs a key, or got a wrong one."""


class ServerModelError(errors.ServerModelError, exceptions.ModelNotFoundError):
    """A member's server does not have the model, or has one with another vocabulary."""


class ServerSettingsError(errors.ServerSettingsError, exceptions.ModelError):
    """A member cannot use its server's settings."""


class RequestError(errors.RequestError, exceptions.ModelInvalidRequestError):
    """This request cannot be served."""


class PromptTooLongError(errors.PromptTooLongError, exceptions.ContextOverflowError):
    """The prompt fills a member's context."""


class ValueTooLongError(errors.ValueTooLongError, exceptions.ModelInvalidRequestError):
    """No value of the grammar fits into `max_tokens`."""


class EngineBusyError(errors.EngineBusyError, exceptions.ModelRateLimitError):
    """The queue is full."""


class EngineClosedError(errors.EngineClosedError, exceptions.ModelConnectionError):
    """The engine was closed or failed, or no server answers."""


class GenerationError(errors.GenerationError, exceptions.ModelAPIError):
    """A running answer failed; `text` is the answer so far."""


class RequestTimeoutError(errors.RequestTimeoutError, exceptions.ModelTimeoutError):
    """The request's timeout passed; `text` is the answer so far."""


class UnfinishedValueError(errors.UnfinishedValueError, exceptions.OutputParserException, exceptions.ModelError):
    """A value or call was cut before it was complete. Not retryable: the same limit would cut it again."""

    observation = None
    send_to_llm = False

    @property
    def llm_output(self) -> str:
        """The beginning of the value."""
        return self.text

    @llm_output.setter
    def llm_output(self, text: str | None) -> None:
        """LangChain's constructor sets it, to None."""


_TRANSLATED: dict[type[BaseException], type[errors.SpecFuseError]] = {
    kind.__bases__[0]: kind
    for kind in (
        ModelError,
        ConfigError,
        GrammarError,
        MissingExtraError,
        AuthenticationError,
        UnknownModelError,
        MemberLoadError,
        PlacementError,
        UnsupportedModelError,
        ServerError,
        ServerUnreachableError,
        ServerKeyError,
        ServerModelError,
        ServerSettingsError,
        RequestError,
        PromptTooLongError,
        ValueTooLongError,
        EngineBusyError,
        EngineClosedError,
        GenerationError,
        RequestTimeoutError,
        UnfinishedValueError,
    )
}


@contextmanager
def as_langchain() -> Iterator[None]:
    """Raises the engine's errors as the classes of this module, with their traceback."""
    try:
        yield
    except errors.SpecFuseError as error:
        raise translated(error).with_traceback(error.__traceback__) from error.__cause__


def translated(error: errors.SpecFuseError) -> errors.SpecFuseError:
    """The same error, with the same attributes, as a class of this module."""
    if isinstance(error, exceptions.LangChainException):
        return error
    kind = next(_TRANSLATED[kind] for kind in type(error).__mro__ if kind in _TRANSLATED)
    remake, (_, args, state) = error.__reduce__()
    remade: errors.SpecFuseError = remake(kind, args, state)
    return remade
