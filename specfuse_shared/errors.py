"""Every error of the engine, in one tree.

    SpecFuseError
    ├── ConfigError              a setting that cannot work (also a ValueError)
    │   ├── GrammarError         a schema, expression or grammar that cannot be used
    │   ├── AuthenticationError  a server asks for its key, or for another one
    │   ├── UnknownModelError    no ensemble, and no model of a server, has this name
    │   └── MissingExtraError    a package that an optional part needs (also an ImportError)
    ├── MemberLoadError          weights, tokenizer or template of a member cannot be used
    │   ├── PlacementError        the devices have no room for a member, or not the one it names
    │   ├── UnsupportedModelError no verification path gives the model's own probabilities
    │   └── ServerError           a member's server cannot be used, or refused a request
    │       ├── ServerUnreachableError  nobody answers there, or not in time
    │       ├── ServerKeyError          it asks for another key
    │       ├── ServerModelError        it has no such model, or one with another vocabulary
    │       └── ServerSettingsError     it was started in a way in which no member can live there
    ├── RequestError             one request cannot be served; the engine is unharmed
    │   ├── PromptTooLongError   the prompt leaves a member no room to answer
    │   └── ValueTooLongError    no value of the grammar fits into max_tokens (also a ValueError)
    ├── EngineBusyError          the queue is full, and the engine was told not to wait
    ├── GenerationError          a running answer failed; carries the text so far
    │   ├── RequestTimeoutError  the caller's timeout passed (also a TimeoutError)
    │   └── UnfinishedValueError  under a grammar, it ended before its value was complete (also a ValueError)
    └── EngineClosedError        the engine was closed

Every one of them survives pickling.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self


class SpecFuseError(Exception):
    """Base class of everything this package raises on purpose.

    Every error survives pickling: pools of processes lose the worker, and wait for ever, over one that does not.
    `shared` names the attributes, and `public` is the message, that a server tells its clients.
    """

    shared: ClassVar[tuple[str, ...]] = ()

    @property
    def public(self) -> str:
        """The message without what may name files, addresses or the code of this process."""
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self.args, self.__dict__)


class ConfigError(SpecFuseError, ValueError):
    """A configuration value is impossible; the message says what was expected."""


class GrammarError(ConfigError):
    """A grammar is malformed, or asks for what no grammar can promise."""


class AuthenticationError(ConfigError):
    """The server that answers asks for its key, or for another one."""


class UnknownModelError(ConfigError):
    """No ensemble, and no model of a server, has this name; the message lists those that there are."""


class MissingExtraError(ConfigError, ImportError):
    """An optional part was used without its extra."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f'{feature} needs the "{extra}" extra: pip install "specfuse-llm[{extra}]"')


class MemberLoadError(SpecFuseError):
    """A member could not be loaded; the message names it and says what to do."""

    @property
    def public(self) -> str:
        return "a member cannot be used: the server's log says why"


class PlacementError(MemberLoadError):
    """The members do not fit onto the devices; the message says what they need and what would help."""


class UnsupportedModelError(MemberLoadError):
    """Neither packed nor row-by-row verification reproduces the model's own probabilities."""


class ServerError(MemberLoadError):
    """A member's server cannot be used, or refused a request. In an answer it is why the member left."""


class ServerUnreachableError(ServerError):
    """Nobody answers at the address of a member's server, or not in time."""


class ServerKeyError(ServerError):
    """A member's server asks for another key; the message names the environment variable."""


class ServerModelError(ServerError):
    """A member's server has no such model, or one with another vocabulary."""


class ServerSettingsError(ServerError):
    """A member's server runs without its prefix cache, or does not tell the model's own log-probabilities."""


class RequestError(SpecFuseError):
    """This request is refused or impossible; other requests are not affected.

    It is no `ValueError`: frameworks take those for a bad value of a model, and go on without an answer.
    """


class PromptTooLongError(RequestError):
    """The prompt leaves a member no room for one segment.

    Attributes: `member` (name), `limit` and `count` (tokens of that member, or the least that it can have).
    """

    shared = ("member", "limit", "count")

    def __init__(self, member: str, limit: int, count: int, room: int, *, at_least: bool = False) -> None:
        super().__init__(
            f"the prompt has {'at least ' if at_least else ''}{count} tokens for member {member!r}, whose context "
            f"holds {limit} and needs {room} of them for the first segment: shorten the prompt by "
            f"{count + room - limit} tokens or leave this member out"
        )
        self.member = member
        self.limit = limit
        self.count = count


class ValueTooLongError(RequestError, ValueError):
    """No value of the grammar fits into `max_tokens`."""


class GenerationError(SpecFuseError):
    """A running answer failed. `text` holds what was generated before; `member` failed, if it was one.

    `public`: the message for others than this process, where `message` repeats an error that is not this package's.
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
    """An answer under a grammar ran out of room before its value was complete. `text` holds the beginning."""


class RequestTimeoutError(GenerationError, TimeoutError):
    """The request's timeout passed. `text` holds what was generated before."""

    def __init__(self, message: str, *, text: str) -> None:
        super().__init__(message, member=None, text=text)

    @classmethod
    def of(cls, text: str) -> Self:
        """The timeout of a request that has generated `text`."""
        return cls(f"the timeout passed after {len(text)} characters of the answer", text=text)


class EngineBusyError(SpecFuseError):
    """More requests wait than the engine queues; try again later."""


class EngineClosedError(SpecFuseError):
    """The engine was used after `close()`, or closed while it answered; `text` is the answer so far."""

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
    """An error as it was, whatever its constructor takes."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class MemberFailedWarning(RuntimeWarning):
    """A member failed in a stage and left an answer, which went on with the others."""


class SlowVerificationWarning(RuntimeWarning):
    """A member's server cannot score given tokens behind its prefix cache, and reads every context again each round."""
