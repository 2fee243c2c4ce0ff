"""The fields that both framework models share, and their engine.

- The ensemble: members or a configuration, validated, and serialised as plain JSON.
- Options of other models: some have no effect here, the others raise an error that names the replacement.
- Local paths: dictionaries, dumps and traces contain a name, never a path. The same process can map the name back to
  its path; another process needs the members again.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path, PurePath, PureWindowsPath
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    SecretStr,
    ValidationError,
    model_validator,
)

from specfuse_shared.client import MAX_RETRIES
from specfuse_shared.config import DEMO, EnsembleConfig, MemberConfig, SamplingParams
from specfuse_shared.errors import ConfigError, MemberFailedWarning
from specfuse_shared.events import Event, SegmentEvent, WarningEvent
from specfuse_shared.frameworks.records import Detail
from specfuse_shared.loading import ensembles
from specfuse_shared.loading.config_files import plain, plain_config, read_ensemble
from specfuse_shared.loading.context_limits import stated_context
from specfuse_shared.loading.progress import OnLoadProgress, loading_bar
from specfuse_shared.loading.sources import check_sources
from specfuse_shared.validation import own_error, unknown_setting

TRANSPORT_OPTIONS = frozenset(
    {
        *("extra_body", "extra_headers", "extra_query", "metadata", "prompt_cache_key", "safety_identifier"),
        *("service_tier", "store", "stream_options", "user"),
    }
)
"""Options of a provider's HTTP client that components pass with a call. Only `extra_headers` have an effect: they are
sent to a server."""
_REPLACEMENTS = {
    "api_base": "use base_url=…, the address of specfuse-llm serve",
    "best_of": 'ask several times, with different "seed"s',
    "frequency_penalty": "use repetition_penalty=…, which multiplies where that one subtracts",
    "format": "use with_structured_output or structured_predict, response_format=… or grammar=…",
    "json_mode": 'use with_structured_output or structured_predict, or response_format={"type": "json_object"}',
    "keep_alive": "members stay loaded until close(), or until close_idle_engines()",
    "max_completion_tokens": "use max_tokens=…",
    "max_new_tokens": "use max_tokens=…",
    "n": 'ask several times, with different "seed"s',
    "num_ctx": "use MemberConfig(max_context=…); without it a member has all of its model's context",
    "num_gpu": "use MemberConfig(device=…), and specfuse-llm doctor --plan",
    "num_predict": "use max_tokens=…",
    "num_thread": "use the environment variable OMP_NUM_THREADS",
    "presence_penalty": "use repetition_penalty=…, which multiplies where that one subtracts",
    "reasoning": "use MemberConfig(thinking=True)",
    "reasoning_effort": "use MemberConfig(thinking=True) and max_thinking_tokens=…",
    "repeat_penalty": "use repetition_penalty=…",
    "request_timeout": "use timeout=…",
    "think": "use MemberConfig(thinking=True)",
    "thinking": "use MemberConfig(thinking=True)",
    "validate_model_on_init": "use load(), which loads the members or asks the server",
}
"""Options of Ollama's and OpenAI's models, and their replacements here."""
_NEUTRAL_VALUES = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), 0),
    **dict.fromkeys(("json_mode", "reasoning", "think", "thinking", "validate_model_on_init"), False),
    **dict.fromkeys(("n", "repeat_penalty"), 1),
}
"""Values of such options that change nothing here."""


def own_options(options: Mapping[str, Any], extra: Container[str] = ()) -> dict[str, Any]:
    """The options without those that have no effect. Raises `ConfigError` for options of other models."""
    foreign = {name for name in _REPLACEMENTS if name in options and name not in extra}
    for name in sorted(foreign):
        if options[name] not in (None, _NEUTRAL_VALUES.get(name)):
            raise ConfigError(f"{name} is an option of other models: {_REPLACEMENTS[name]}")
    return {name: value for name, value in options.items() if name not in foreign}


_PATH_SETTINGS = ("model", "tokenizer", "adapter")
"""Settings of a member that may be paths."""
_PATH_MARK = "local:"
_PATHS: dict[str, str] = {}


def without_paths(value: Any) -> Any:
    """The plain JSON of members and ensembles, with names in place of paths."""
    if isinstance(value, Mapping):
        return {
            k: path_name(v) if k in _PATH_SETTINGS and isinstance(v, str) else without_paths(v)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [path_name(each) if isinstance(each, str) else without_paths(each) for each in value]
    return value


def path_name(value: str) -> str:
    """The public name of a path; a hub id is its own name. Different paths have different names."""
    if value.startswith(_PATH_MARK) or not _is_path(value):
        return value
    digest = hashlib.sha256(os.path.abspath(os.path.expanduser(value)).encode()).hexdigest()[:12]
    name = f"{_PATH_MARK}{_path(value).name}#{digest}"
    _PATHS[name] = value
    return name


def path_of(value: str) -> str:
    """The path that `path_name` replaced. Raises `ConfigError` for a path of another process."""
    if not value.startswith(_PATH_MARK):
        return value
    if value not in _PATHS:
        raise ConfigError(f"{value!r} is a folder or file that another process knew: give its path in members=[…]")
    return _PATHS[value]


def _is_path(value: str) -> bool:
    """Whether a value is a path, even one of Windows or one that does not exist; no hub id looks like these."""
    if value.startswith(("/", "~", "./", "../")) or "\\" in value or PureWindowsPath(value).drive:
        return True
    return os.path.exists(value)


def _path(value: str) -> PurePath:
    return PureWindowsPath(value) if "\\" in value or PureWindowsPath(value).drive else Path(value)


Members = Annotated[
    Literal["demo"] | Sequence[str | MemberConfig] | None,
    PlainValidator(lambda value: _as_members(value)),
    PlainSerializer(lambda value: without_paths(plain(value))),
]
Config = Annotated[
    EnsembleConfig | str | Path | None,
    PlainValidator(lambda value: named_config(value)),
    PlainSerializer(lambda value: value and without_paths(plain_config(value))),
]
Ensembles = Annotated[Mapping[str, Any], PlainSerializer(lambda value: without_paths(plain(value)))]
"""Ensembles by name, each as `members` or `config` take them."""
SOURCES = (
    'members="demo", a list of hub ids, folders or MemberConfigs; config=EnsembleConfig(...) or a TOML file; '
    "engine=; "
    'or base_url="http://…" of a server'
)


def members_of_model(values: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """The settings with `model=…`, one model or a list, as `members`."""
    members = list(model) if isinstance(model, list | tuple) else [model]
    return {**{k: v for k, v in values.items() if k not in ("model", "model_name")}, "members": members}


def config_of(ensemble: Members | EnsembleConfig | Mapping[str, Any]) -> EnsembleConfig:
    """The configuration for a value of `members` or `config`, or a dictionary. Raises `ConfigError`."""
    if isinstance(ensemble, Mapping):
        ensemble = named_config(ensemble)
    if isinstance(ensemble, EnsembleConfig):
        return ensemble
    return ensembles.config_of(_as_members(ensemble) or ())


def _as_members(value: Any) -> Members:
    if value is None or value == DEMO:
        return DEMO if value else None
    if isinstance(value, (str, MemberConfig, Mapping)) or not isinstance(value, Sequence):
        hint = f"[{value!r}] is an ensemble of one" if isinstance(value, str) else f"give {SOURCES}"
        raise ConfigError(f"members is {value!r}: it is a list of models, {hint}")
    return EnsembleConfig([_as_member(member) for member in value]).member_configs


def _as_member(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return path_of(value) if isinstance(value, str) else value
    return MemberConfig.from_dict({k: path_of(v) if isinstance(v, str) else v for k, v in value.items()})


def named_config(value: Any) -> EnsembleConfig | None:
    """The configuration for a value of `config`: an object, plain JSON, or a TOML file."""
    if isinstance(value, Mapping):
        members = ensembles.members_of(_as_members(value.get("members")) or ())
        return EnsembleConfig.from_dict({**value, "members": members})
    if isinstance(value, (str, Path)):
        return read_ensemble(value)
    if value is None or isinstance(value, EnsembleConfig):
        return value
    raise ConfigError(f"config must be an EnsembleConfig or a TOML file, not {type(value).__name__}")


OnSegment = Callable[[SegmentEvent], None]

_SAMPLING = SamplingParams()
if TYPE_CHECKING:
    from specfuse_shared.client.engine import RemoteEngine
    from specfuse_shared.serving.engine import EngineLease, EnsembleEngine
else:  # the import of this package must not import torch, which takes seconds
    EnsembleEngine = EngineLease = RemoteEngine = Any
Engine = EnsembleEngine | RemoteEngine
OwnEngine = Annotated[EnsembleEngine | None, PlainValidator(lambda value: _as_engine(value))]


class EnsembleSettings(BaseModel):
    """The fields of a chat model over an ensemble. Exactly one of `members`, `config`, `engine` and `base_url` is
    given.

    Construction loads nothing. Copies share the engine; pickles and dictionaries contain its configuration instead, and
    never the key of a server.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, defer_build=True, populate_by_name=True, use_attribute_docstrings=True
    )

    members: Members = None
    """The members: "demo" (two small packaged models), or hub ids, folders, GGUF files and `MemberConfig`s."""
    config: Config = None
    """An `EnsembleConfig`, or a TOML file of one ("FILE"; "FILE#NAME" picks one of several). With `engine`, the
    engine's configuration."""
    engine: OwnEngine = Field(default=None, exclude=True, repr=False)
    """An engine to use. Without one, equal configurations share one engine in this process."""
    base_url: str | None = None
    """Address of a server (`specfuse-llm serve`), used instead of members in this process."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """The server's key; if unset, the environment variable SPECFUSE_API_KEY."""
    model_name: str | None = Field(default=None, alias="model")
    """One of the server's models; its first if unset."""
    max_retries: int = Field(default=MAX_RETRIES, ge=0)
    """How often a request is retried if the server does not respond, is busy or fails; never after an answer has
    begun."""
    default_headers: Mapping[str, str] | None = Field(default=None, exclude=True, repr=False)
    """Headers of every request to the server. Like the key, they are never printed or serialised."""
    max_tokens: int = _SAMPLING.max_tokens
    """The most tokens of the answer, counted by the reference member."""
    temperature: float = _SAMPLING.temperature
    """0 is greedy decoding."""
    top_p: float = _SAMPLING.top_p
    """Sample from the most probable tokens whose probabilities add up to this."""
    top_k: int = _SAMPLING.top_k
    """Sample from this many of the most probable tokens; 0: from all."""
    min_p: float = _SAMPLING.min_p
    """Leave out tokens whose probability is below this share of the most probable token's."""
    repetition_penalty: float = _SAMPLING.repetition_penalty
    """Above 1, tokens that occur in the prompt or the answer become less probable."""
    seed: int | None = _SAMPLING.seed
    """The same seed gives the same answer."""
    stop: str | list[str] | None = None
    """Strings that end the answer and never appear in it."""
    logprobs: bool = _SAMPLING.logprobs
    """Report log p of every token of the answer, as the reference member sees it."""
    top_logprobs: int = _SAMPLING.top_logprobs
    """With `logprobs`: also report this many of the most probable tokens at each position, at most 20."""
    max_thinking_tokens: int = _SAMPLING.max_thinking_tokens
    """Maximum tokens of a member's reasoning, in its own tokens."""
    parallel_tool_calls: bool = False
    """One answer may call several tools. Off by default, because small models tend to repeat a call."""
    timeout: float | None = None
    """Seconds after which an answer ends with `RequestTimeoutError`; loading the members does not count."""
    ledger: Detail = "summary"
    """How much of its record an answer carries: "summary", "full" (every round) or "none"."""
    on_segment: OnSegment | None = Field(default=None, exclude=True, repr=False)
    """Called with each verified segment before it is streamed, in the thread that runs the answer."""

    _leases: list[EngineLease] = PrivateAttr(default_factory=list)
    _remotes: dict[str | None, RemoteEngine] = PrivateAttr(default_factory=dict)

    def __init__(self, *args: Any, **values: Any) -> None:
        if args:
            members = [args[0]] if isinstance(args[0], str) and args[0] != "demo" else args[0]
            raise ConfigError(f"{type(self).__name__} takes its settings by name: write members={members!r}")
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise own_error(error) or error from None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        names = {name for field in cls.model_fields.items() for name in (field[0], field[1].alias) if name}
        if not isinstance(values, Mapping):
            return values
        values = own_options(values, names)
        for name in values:
            if name not in names:
                raise unknown_setting(cls.__name__, str(name), sorted(names))
        settings = EnsembleSettings.model_fields  # None means unset, as in a call
        return {k: v for k, v in values.items() if v is not None or k not in settings or settings[k].default is None}

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if self.engine is not None and self.config in (None, self.engine.config):
            self.config, self.api_key = self.engine.config, None
        elif self.engine is not None:
            raise ConfigError("config is not the engine's configuration: pass one of them")
        if sum(source is not None for source in (self.members, self.config, self.base_url)) != 1:
            raise ConfigError(f"give one of {SOURCES}")
        self._sampling({})
        self._remote()
        return self

    def _remote(self, name: str | None = None) -> RemoteEngine | None:
        """The server's model of this name, by default `model_name`; None if the ensemble is in this process."""
        if self.base_url is None:
            return None
        from specfuse_shared.client.engine import RemoteEngine

        name = name or self._chosen_model
        if name not in self._remotes:
            key = None if self.api_key is None else self.api_key.get_secret_value()
            retries, headers = self.max_retries, self.default_headers
            self._remotes[name] = RemoteEngine(self.base_url, name, key, max_retries=retries, headers=headers)
        return self._remotes[name]

    def _ensemble(self, name: str | None = None) -> EnsembleConfig:
        """The ensemble in this process. `name`: for subclasses with several."""
        if self.engine is not None:
            return self.engine.config
        return named_config(self.config) or config_of(self.members)

    def _resolve_engine(self, name: str | None = None, headers: Mapping[str, str] | None = None) -> Engine:
        """The engine or server that answers. `headers`: sent with this call to a server."""
        if (remote := self._remote(name)) is not None:
            return remote.with_headers(headers) if headers else remote
        return self._engine_for(self._ensemble(name))

    def _engine_for(self, config: EnsembleConfig) -> EnsembleEngine:
        """The model's own `engine` if it has this configuration, else the engine that this process shares.

        An engine of the parent process cannot answer after a fork.
        """
        if self.engine is not None and self.engine.config == config and self.engine.is_of_this_process:
            return self.engine
        leased = self._leased(config)
        if leased is None:
            check_sources(config)
            if "torch" not in sys.modules:
                loading_bar.open(config.names)
            from specfuse_shared.serving.engine import lease_engine

            self._leases = [lease for lease in self._leases if not lease.engine.closed]
            self._leases.append(leased := lease_engine(config))
        return leased.engine

    def _leased(self, config: EnsembleConfig) -> EngineLease | None:
        return next(
            (lease for lease in self._leases if lease.engine.config == config and not lease.engine.closed), None
        )

    def load(self, on_progress: OnLoadProgress | None = None) -> Self:
        """Load the members now rather than with the first answer. Safe to call twice. Raises `MemberLoadError`."""
        self._resolve_engine().load(on_progress)
        return self

    def close(self) -> None:
        """Release the shared engine; the last release frees its memory. An engine passed as `engine` stays open."""
        for lease in self._leases:
            lease.close()
        for remote in self._remotes.values():
            remote.close()
        self._leases = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _observe(self, event: Event) -> None:
        """Report a segment to `on_segment`, and a failed member as a Python warning."""
        if isinstance(event, SegmentEvent) and self.on_segment is not None:
            self.on_segment(event)
        if isinstance(event, WarningEvent):
            warnings.warn(event.message, MemberFailedWarning, stacklevel=2)

    def _sampling(self, overrides: Mapping[str, Any]) -> SamplingParams:
        """The fields overridden by one call's settings. None means unset. Raises `ConfigError` for an unknown key."""
        values = {k: v for k, v in own_options(overrides).items() if v is not None and k not in TRANSPORT_OPTIONS}
        return SamplingParams.on_top(self._settings(), values)

    def _settings(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that this model has."""
        return {f.name: getattr(self, f.name) for f in fields(SamplingParams) if f.name in type(self).model_fields}

    def _traced(self) -> dict[str, Any]:
        """The model's name and sampling as plain JSON, with the keys that trace exporters read."""
        settings = {**self._settings(), "stop": list(self._sampling({}).stops) or None}
        if (grammar := settings.get("grammar")) is not None:
            settings["grammar"] = asdict(grammar)
        return {"model": self._model_name(), **{name: value for name, value in settings.items() if value is not None}}

    def _context_limit(self) -> int | None:
        """The smallest member's context; before the members are loaded, from configurations on this machine."""
        if (remote := self._remote()) is not None:
            return remote.context_limit
        config = self._ensemble()
        loaded = self.engine or ((lease := self._leased(config)) and lease.engine)
        return loaded.context_limit if loaded else stated_context(config)

    @property
    def _chosen_model(self) -> str | None:
        """`model_name` as the user set it, or None."""
        chosen: str | None = self.__dict__["model_name"]
        return chosen

    def _model_name(self) -> str:
        if (remote := self._remote()) is not None:
            return remote.label
        return "demo" if self.members == "demo" else "+".join(self._ensemble().names)

    def _thinks(self) -> bool:
        """Whether a member thinks before it answers, as known without asking a server."""
        remote = self._remote()
        return any(m.thinking for m in self._ensemble().member_configs) if remote is None else remote.thinks

    def _concurrency_of(self, name: str | None = None) -> int:
        """`max_concurrent` of the engine or server's model of this name."""
        remote = self._remote(name)
        return self._ensemble(name).max_concurrent if remote is None else remote.max_concurrent

    def __copy__(self) -> Self:
        copied = super().__copy__()
        copied._leases, copied._remotes = [], {}
        return copied

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        shared = {id(kept_object): kept_object for kept_object in (self.engine, *self._leases, *self._remotes.values())}
        copied = super().__deepcopy__({**(memo or {}), **shared})
        copied._leases, copied._remotes = [], {}
        return copied

    def __getstate__(self) -> dict[Any, Any]:
        bare = self.model_copy(update={"engine": None, "api_key": None, "default_headers": None})
        return super(EnsembleSettings, bare).__getstate__()


def _as_engine(value: Any) -> Any:
    if value is None:
        return None
    from specfuse_shared.serving.engine import EnsembleEngine

    if not isinstance(value, EnsembleEngine):
        raise ConfigError(f"engine must be an EnsembleEngine, not {type(value).__name__}: EnsembleEngine(members)")
    return value
