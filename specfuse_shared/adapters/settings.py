"""The settings of a model over an ensemble, and the engine behind it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from specfuse_shared.adapters.records import Detail, plain, plain_config
from specfuse_shared.config import EnsembleConfig
from specfuse_shared.errors import ConfigError, MemberFailedWarning, SpecFuseError
from specfuse_shared.events import Event, SegmentEvent, WarningEvent
from specfuse_shared.loading.demo import demo_members
from specfuse_shared.loading.planning import stated_context
from specfuse_shared.loading.pretrained import OnProgress
from specfuse_shared.member_config import MemberConfig
from specfuse_shared.sampling_params import SamplingParams
from specfuse_shared.serving.engine import EnsembleEngine
from specfuse_shared.serving.leases import EngineLease, lease_engine
from specfuse_shared.validation import unknown_setting

Members = Annotated[
    Literal["demo"] | Sequence[str | MemberConfig] | None,
    PlainValidator(lambda value: _as_members(value)),
    PlainSerializer(lambda value: plain(value)),
]
Config = Annotated[
    EnsembleConfig | None,
    PlainValidator(lambda value: _as_config(value)),
    PlainSerializer(lambda value: value and plain_config(value)),
]
OnSegment = Callable[[SegmentEvent], None]

TRANSPORT_OPTIONS = frozenset(
    {
        *("extra_body", "extra_headers", "extra_query", "metadata", "prompt_cache_key", "safety_identifier"),
        *("service_tier", "store", "stream_options", "user"),
    }
)
"""What components pass for a provider's HTTP client: accepted with a call, and without effect."""

_SAMPLING = SamplingParams()
_SOURCES = 'members="demo", a list of hub ids, folders or MemberConfigs; config=EnsembleConfig(...); or engine='


class EnsembleSettings(BaseModel):
    """The fields of a chat model over an ensemble; exactly one of `members`, `config` and `engine` is given.

    Construction loads nothing. Copies share the engine; pickles and dictionaries carry its configuration instead.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, use_attribute_docstrings=True)

    members: Members = None
    """Who answers: "demo" (two small packaged models), or hub ids, folders, GGUF files and `MemberConfig`s."""
    config: Config = None
    """Members together with how a round is decided; that of `engine` if one is given."""
    engine: EnsembleEngine | None = Field(default=None, exclude=True, repr=False)
    """An engine to share; without one, equal configurations share one engine of this process."""
    max_tokens: int = _SAMPLING.max_tokens
    """Longest answer, in tokens of the reference member."""
    temperature: float = _SAMPLING.temperature
    """0 is greedy."""
    top_p: float = _SAMPLING.top_p
    """Sample from the most probable tokens that hold this much probability."""
    top_k: int = _SAMPLING.top_k
    """Sample from this many tokens; 0 is all."""
    min_p: float = _SAMPLING.min_p
    """Leave out tokens less probable than this share of the most probable one."""
    repetition_penalty: float = _SAMPLING.repetition_penalty
    """Above 1, tokens that already appeared become less probable."""
    seed: int | None = _SAMPLING.seed
    """The same seed gives the same answer."""
    stop: str | list[str] | None = None
    """Strings that end the answer and never appear in it."""
    logprobs: bool = _SAMPLING.logprobs
    """Report log p of every token of the answer, as the reference member sees it."""
    max_thinking_tokens: int = _SAMPLING.max_thinking_tokens
    """Longest thoughts of a member that thinks, in its own tokens."""
    parallel_tool_calls: bool = False
    """One answer may call several tools. Off, since small models repeat a call where they might."""
    timeout: float | None = None
    """Seconds after which an answer ends with `RequestTimeoutError`; loading the members does not count."""
    ledger: Detail = "summary"
    """How much of the record of an answer goes with it: "summary", "full" (every round) or "none"."""
    on_segment: OnSegment | None = Field(default=None, exclude=True, repr=False)
    """Called with each verified segment before it is streamed, in the thread that runs the answer."""

    _leases: list[EngineLease] = PrivateAttr(default_factory=list)

    def __init__(self, *args: Any, **values: Any) -> None:
        try:
            super().__init__(*args, **values)
        except ValidationError as error:
            raise _own_error(error) or error from None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        known = {name for field in cls.model_fields.items() for name in (field[0], field[1].alias) if name}
        if not isinstance(values, Mapping):
            return values
        for name in values:
            if name not in known:
                raise unknown_setting(cls.__name__, str(name), sorted(known))
        own = EnsembleSettings.model_fields  # None says nothing, as it does in a call
        return {k: v for k, v in values.items() if v is not None or k not in own or own[k].default is None}

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if self.engine is not None and self.config in (None, self.engine.config):
            self.config = self.engine.config
        elif self.engine is not None:
            raise ConfigError("config differs from that of engine: give one of them")
        if (self.members is None) == (self.config is None):
            raise ConfigError(f"give one of {_SOURCES}")
        self._sampling({})
        return self

    def _ensemble(self) -> EnsembleConfig:
        if self.engine is not None:
            return self.engine.config
        return config_of(self.config if self.config is not None else self.members)

    def _resolve_engine(self) -> EnsembleEngine:
        return self._engine_for(self._ensemble())

    def _engine_for(self, config: EnsembleConfig) -> EnsembleEngine:
        """The engine given, where it has this configuration, else the one that this process shares.

        An engine that was made before this process was forked cannot answer here, so that this one gets its own.
        """
        if self.engine is not None and self.engine.config == config and self.engine.is_of_this_process:
            return self.engine
        held = self._held(config)
        if held is None:
            self._leases = [lease for lease in self._leases if not lease.engine.closed]
            self._leases.append(held := lease_engine(config))
        return held.engine

    def _held(self, config: EnsembleConfig) -> EngineLease | None:
        return next((held for held in self._leases if held.engine.config == config and not held.engine.closed), None)

    def load(self, on_progress: OnProgress | None = None) -> Self:
        """Load the members now rather than with the first answer; again, it does nothing. Raises `MemberLoadError`."""
        self._resolve_engine().load(on_progress)
        return self

    def close(self) -> None:
        """Let go of the shared engine; the last model that does frees its memory. An `engine` given stays open."""
        for lease in self._leases:
            lease.close()
        self._leases = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _observe(self, event: Event) -> None:
        """Tell `on_segment` of a segment, and Python's warnings of a member that failed."""
        if isinstance(event, SegmentEvent) and self.on_segment is not None:
            self.on_segment(event)
        if isinstance(event, WarningEvent):
            warnings.warn(event.message, MemberFailedWarning, stacklevel=2)

    def _sampling(self, overrides: Mapping[str, Any]) -> SamplingParams:
        """The fields with one call's settings on top; None means "as in the field", an unknown key is refused."""
        given = {k: v for k, v in overrides.items() if v is not None and k not in TRANSPORT_OPTIONS}
        return SamplingParams.from_dict({**self._settings(), **given})

    def _settings(self) -> dict[str, Any]:
        """The sampling of this model; what belongs to a single request (tools, a grammar) has no field here."""
        return {f.name: getattr(self, f.name) for f in fields(SamplingParams) if f.name in type(self).model_fields}

    def _identity(self) -> dict[str, Any]:
        """Everything that decides an answer besides the messages, as plain JSON."""
        sampling = {**self._settings(), "stop": list(self._sampling({}).stops)}
        return {"ensemble": self._plain_ensemble(self._ensemble()), "sampling": plain(sampling)}

    @staticmethod
    def _plain_ensemble(config: EnsembleConfig) -> dict[str, Any]:
        return plain_config(config, changed=False)

    def _context_limit(self) -> int | None:
        """Of the smallest member; before the members are loaded, as far as configurations on this machine say."""
        config = self._ensemble()
        held = self.engine or ((lease := self._held(config)) and lease.engine)
        return held.context_limit if held else stated_context(config)

    def _model_name(self) -> str:
        return "demo" if self.members == "demo" else "+".join(self._ensemble().names)

    def __copy__(self) -> Self:
        copied = super().__copy__()
        copied._leases = []
        return copied

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        shared = {id(held): held for held in (self.engine, *self._leases)}
        copied = super().__deepcopy__({**(memo or {}), **shared})
        copied._leases = []
        return copied

    def __getstate__(self) -> dict[Any, Any]:
        bare = self.model_copy(update={} if self.engine is None else {"engine": None})
        return super(EnsembleSettings, bare).__getstate__()


def _own_error(error: ValidationError) -> SpecFuseError | None:
    """The error of ours that pydantic wrapped, if it was one."""
    found = (told.get("ctx", {}).get("error") for told in error.errors())
    return next((own for own in found if isinstance(own, SpecFuseError)), None)


def config_of(ensemble: Members | EnsembleConfig) -> EnsembleConfig:
    """The configuration that `members` or `config` stand for. Raises `ConfigError`."""
    if isinstance(ensemble, EnsembleConfig):
        return ensemble
    members = _as_members(ensemble)
    return _demo_config() if members == "demo" else EnsembleConfig(members or ())


@cache
def _demo_config() -> EnsembleConfig:
    return EnsembleConfig(demo_members())


def _as_members(value: Any) -> Members:
    if value is None or value == "demo":
        return "demo" if value else None
    if isinstance(value, (str, MemberConfig, Mapping)) or not isinstance(value, Sequence):
        raise ConfigError(f"members is {value!r}: give {_SOURCES}")
    return EnsembleConfig([MemberConfig.from_dict(m) if isinstance(m, Mapping) else m for m in value]).member_configs


def _as_config(value: Any) -> EnsembleConfig | None:
    if isinstance(value, Mapping):
        return EnsembleConfig.from_dict({**value, "members": _as_members(value.get("members"))})
    if value is None or isinstance(value, EnsembleConfig):
        return value
    raise ConfigError(f"config must be an EnsembleConfig, not {type(value).__name__}")
