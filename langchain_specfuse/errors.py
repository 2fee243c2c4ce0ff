"""The engine's errors as LangChain's: each is both, so that either can be caught, retried or fallen back on.

The names are the engine's. A prompt too long is a `ContextOverflowError`, a request or setting that cannot work a
`ModelInvalidRequestError`, an unknown model a `ModelNotFoundError`; a timeout (`ModelTimeoutError`), a full queue
(`ModelRateLimitError`), a closed engine (`ModelConnectionError`) and a failed answer (`ModelAPIError`) may be tried
again. A value cut by `max_tokens` is an `OutputParserException` with the beginning in `llm_output`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core import exceptions

from specfuse_shared import errors


class ModelError(errors.SpecFuseError, exceptions.ModelError):
    """An engine error without a class in this module."""


class ConfigError(errors.ConfigError, exceptions.ModelInvalidRequestError):
    """A setting cannot work; the message says what was expected."""


class GrammarError(errors.GrammarError, exceptions.ModelInvalidRequestError):
    """A schema, expression or grammar cannot be used."""


class MissingExtraError(errors.MissingExtraError, exceptions.ModelInvalidRequestError):
    """An optional part was used without its extra."""


class AuthenticationError(errors.AuthenticationError, exceptions.ModelAuthenticationError):
    """The server asks for its key, or for another one."""


class UnknownModelError(errors.UnknownModelError, exceptions.ModelNotFoundError):
    """No ensemble has this name."""


class MemberLoadError(errors.MemberLoadError, exceptions.ModelError):
    """A member could not be loaded."""


class PlacementError(errors.PlacementError, exceptions.ModelError):
    """The members do not fit onto the devices."""


class UnsupportedModelError(errors.UnsupportedModelError, exceptions.ModelError):
    """A member's probabilities cannot be reproduced."""


class ServerError(errors.ServerError, exceptions.ModelError):
    """A member's server cannot be used, or refused a request."""


class ServerUnreachableError(errors.ServerUnreachableError, exceptions.ModelConnectionError):
    """A member's server is unreachable or timed out."""


class ServerKeyError(errors.ServerKeyError, exceptions.ModelAuthenticationError):
    """A member's server asks for another key."""


class ServerModelError(errors.ServerModelError, exceptions.ModelNotFoundError):
    """A member's server has no such model, or one with another vocabulary."""


class ServerSettingsError(errors.ServerSettingsError, exceptions.ModelError):
    """A member's server was started in a way in which no member can live there."""


class RequestError(errors.RequestError, exceptions.ModelInvalidRequestError):
    """This request is refused or impossible."""


class PromptTooLongError(errors.PromptTooLongError, exceptions.ContextOverflowError):
    """The prompt fills a member's context."""


class ValueTooLongError(errors.ValueTooLongError, exceptions.ModelInvalidRequestError):
    """No value of the grammar fits into `max_tokens`."""


class EngineBusyError(errors.EngineBusyError, exceptions.ModelRateLimitError):
    """The queue is full."""


class EngineClosedError(errors.EngineClosedError, exceptions.ModelConnectionError):
    """The engine was closed."""


class GenerationError(errors.GenerationError, exceptions.ModelAPIError):
    """A running answer failed; `text` holds what was generated before."""


class RequestTimeoutError(errors.RequestTimeoutError, exceptions.ModelTimeoutError):
    """The request's timeout passed; `text` holds what was generated before."""


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
    """Errors of the engine that leave this block are LangChain's too; their traceback is kept."""
    try:
        yield
    except errors.SpecFuseError as error:
        raise translated(error).with_traceback(error.__traceback__) from error.__cause__


def translated(error: errors.SpecFuseError) -> errors.SpecFuseError:
    """The same error, with the same attributes, as the class that is LangChain's too."""
    if isinstance(error, exceptions.LangChainException):
        return error
    kind = next(_TRANSLATED[kind] for kind in type(error).__mro__ if kind in _TRANSLATED)
    remake, (_, args, state) = error.__reduce__()
    remade: errors.SpecFuseError = remake(kind, args, state)
    return remade
