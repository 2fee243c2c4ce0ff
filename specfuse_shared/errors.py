"""Every error of the engine, in one tree.

    SpecFuseError
    ├── ConfigError              a setting is invalid (also a ValueError)
    │   ├── GrammarError         a schema, expression or grammar cannot be used
    │   ├── AuthenticationError  a server needs a key, or got a wrong one
    │   ├── UnknownModelError    no ensemble, and no model of a server, has this name
    │   └── MissingExtraError    an optional feature needs an extra (also an ImportError)
    ├── MemberLoadError          weights, tokenizer or template of a member cannot be used
    │   ├── PlacementError        a member does not fit, or names a device that is missing
    │   ├── UnsupportedModelError no verification path gives the model's own probabilities
    │   └── ServerError           a member's server cannot be used, or refused a request
    │       ├── ServerUnreachableError  it does not answer, or not in time
    │       ├── ServerKeyError          it needs a key, or got a wrong one
    │       ├── ServerModelError        it does not have the model, or one with another vocabulary
    │       └── ServerSettingsError     it was started with settings that a member cannot use
    ├── RequestError             one request cannot be served; the engine is unharmed
    │   ├── PromptTooLongError   the prompt fills a member's context
    │   └── ValueTooLongError    no value of the grammar fits into max_tokens (also a ValueError)
    ├── EngineBusyError          the queue is full (when_busy="raise")
    ├── GenerationError          a running answer failed; the error has the text so far
    │   ├── RequestTimeoutError  the caller's timeout passed (also a TimeoutError)
    │   └── UnfinishedValueError  it ended before its value was complete (also a ValueError)
    └── EngineClosedError        the engine was closed or failed, or no server answers

All of them can be pickled.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self


def install_command(extra: str) -> str:
    """Command that installs an optional part. The package is not on PyPI yet."""
    return f'pip install ".[{extra}]" in a clone of the repository'


class SpecFuseError(Exception):
    """Base class of the errors of this package.

    Every error can be pickled, because a process pool hangs on one that cannot. A server sends two things to its
    clients: the attributes named in `shared`, and the message `public`. `param`: the field of the request that the
    error is about, if a server knows it.
    """

    shared: ClassVar[tuple[str, ...]] = ()
    param: str | None = None

    @property
    def public(self) -> str:
        """The message without names of files, addresses or code of this process."""
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self.args, self.__dict__)


class ConfigError(SpecFuseError, ValueError):
    """A setting is invalid; the message states the expected value."""


class GrammarError(ConfigError):
    """A grammar is malformed, or uses a keyword that no grammar can enforce.

    `tool`: the tool whose schema it is about; `field`: the place in the schema ("properties.day.pattern"); if known.
    """

    shared = ("tool", "field")

    def __init__(self, message: str = "", *, tool: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.tool = tool
        self.field = field


class AuthenticationError(ConfigError):
    """The server needs a key, or got a wrong one."""


class UnknownModelError(ConfigError):
    """No ensemble, and no model of a server, has this name; the message lists the known ones."""


class MissingExtraError(ConfigError, ImportError):
    """An optional feature was used without its extra."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f'{feature} needs the "{extra}" extra: {install_command(extra)}')


class MemberLoadError(SpecFuseError):
    """A member could not be loaded; the message names it and a remedy."""

    @property
    def public(self) -> str:
        return "a member cannot be used: the server's log says why"


class PlacementError(MemberLoadError):
    """The members do not fit on the devices, or name one that is missing. The message states needs and remedies."""


class UnsupportedModelError(MemberLoadError):
    """Verification, in one forward pass or row by row, does not reproduce the model's own probabilities."""


class ServerError(MemberLoadError):
    """A member's server cannot be used, or refused a request. During an answer, the member then leaves the answer."""


class ServerUnreachableError(ServerError):
    """A member's server does not answer, or not in time."""


class ServerKeyError(ServerError):
    """A member's server needs a key, or got a wrong one; the message names the environment variable."""


class ServerModelError(ServerError):
    """A member's server does not have the model, or has one with another vocabulary."""


class ServerSettingsError(ServerError):
    """A member cannot use its server's settings, for example no prefix cache, or log-probabilities that are not raw."""


class RequestError(SpecFuseError):
    """This request cannot be served; other requests are not affected.

    Only `ValueTooLongError` is also a `ValueError`: frameworks treat those as bad output of the model, and continue
    without an answer.
    """


class PromptTooLongError(RequestError):
    """The prompt leaves too little of a member's context for one segment.

    Attributes: `member` (name), `limit` and `count` (in tokens of that member; `count` may be a lower bound).
    """

    shared = ("member", "limit", "count")

    def __init__(self, member: str, limit: int, count: int, segment_tokens: int, *, at_least: bool = False) -> None:
        remedy = f"shorten the prompt by at least {count + segment_tokens - limit} tokens"
        if segment_tokens >= limit:
            remedy = "no prompt fits: lower first_segment_tokens or segment_tokens"
        super().__init__(
            f"the prompt has {'at least ' if at_least else ''}{count} tokens for member {member!r}. This model's "
            f"maximum context length is {limit} tokens, and a segment may need {segment_tokens} of them: {remedy}, "
            "raise the member's max_context if it is set, or leave this member out"
        )
        self.member = member
        self.limit = limit
        self.count = count


class ValueTooLongError(RequestError, ValueError):
    """No value of the grammar fits into `max_tokens`."""


class GenerationError(SpecFuseError):
    """A running answer failed. `text` is the answer so far; `member` is the member that failed, or None.

    `public`: the message for clients of a server, where `message` quotes an error of another library.
    """

    shared = ("member", "text")

    def __init__(self, message: str, *, member: str | None, text: str, public: str | None = None) -> None:
        super().__init__(message)
        self.member = member
        self.text = text
        self._public = message if public is None else public

    @property
    def public(self) -> str:
        return self._public


class UnfinishedValueError(GenerationError, ValueError):
    """An answer under a grammar ended before its value was complete, mostly at `max_tokens`. `text` is the beginning.

    `usage`: the `Usage` of that answer, None where it is not known.
    """

    def __init__(
        self, message: str, *, member: str | None, text: str, public: str | None = None, usage: Any = None
    ) -> None:
        super().__init__(message, member=member, text=text, public=public)
        self.usage = usage


class RequestTimeoutError(GenerationError, TimeoutError):
    """The request's timeout passed. `text` is the answer so far."""

    def __init__(self, message: str, *, text: str) -> None:
        super().__init__(message, member=None, text=text)

    @classmethod
    def of(cls, text: str) -> Self:
        """The timeout of a request.

        Args:
            text: The text that the answer had by then.

        Returns:
            The error.

        Example:
            ```python
            from specfuse_shared import RequestTimeoutError

            print(RequestTimeoutError.of("The sky is blue because"))
            ```
        """
        return cls(f"the timeout passed after {len(text)} characters of the answer", text=text)


class EngineBusyError(SpecFuseError):
    """The engine's queue is full; try again later."""


class EngineClosedError(SpecFuseError):
    """The engine was used after `close()` or a fork, was closed or failed while it answered, or no server answers.

    `text` is the answer so far.
    """

    shared = ("text",)

    def __init__(
        self, message: str = "this engine was closed: make a new one", *, text: str = "", public: str | None = None
    ) -> None:
        super().__init__(message)
        self.text = text
        self._public = message if public is None else public

    @property
    def public(self) -> str:
        return self._public


def _remade(kind: type[SpecFuseError], args: tuple[Any, ...], state: dict[str, Any]) -> SpecFuseError:
    """The error that was pickled. Its constructor, which may need other arguments, is not called."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class MemberFailedWarning(RuntimeWarning):
    """A member failed and left an answer; the other members finished it."""


class ClosedValueWarning(RuntimeWarning):
    """A value repeated itself or reached `max_tokens`, and was closed at that point: it may be incomplete."""


class SlowVerificationWarning(RuntimeWarning):
    """A member's server cannot score given tokens from its prefix cache, so it reads the context again every round."""


class MissingTemplateWarning(RuntimeWarning):
    """A model in Ollama's store has no chat template in its file, so its prompts are plain text."""
