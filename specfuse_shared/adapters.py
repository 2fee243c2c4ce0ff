"""What both framework adapters share: the settings of an ensemble, its engine, and records as plain JSON.

Needs pydantic, which both frameworks bring along. The engine never imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, PrivateAttr, model_validator

from specfuse_shared.config import EnsembleConfig, MemberConfig, SamplingParams
from specfuse_shared.errors import ConfigError
from specfuse_shared.events import SegmentEvent
from specfuse_shared.loading.demo import demo_members
from specfuse_shared.members.base import Member
from specfuse_shared.results import EnsembleResult
from specfuse_shared.serving.engine import EnsembleEngine
from specfuse_shared.serving.leases import EngineLease, lease_engine
from specfuse_shared.types import Candidate, RoundRecord, Usage

Members = Literal["demo"] | Sequence[str | MemberConfig] | None
OnSegment = Callable[[SegmentEvent], None]

_SAMPLING = SamplingParams()
_SOURCES = 'members="demo", a list of hub ids, folders or MemberConfigs; config=EnsembleConfig(...); or engine='


class EnsembleSettings(BaseModel):
    """The fields of a chat model over an ensemble; exactly one of `members`, `config` and `engine` is given.

    Construction loads nothing. Copies share the engine; pickles and dictionaries carry its configuration instead.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, use_attribute_docstrings=True)

    members: Annotated[
        Members,
        PlainValidator(lambda value: _as_members(value)),
        PlainSerializer(lambda value: _plain(value)),
    ] = None
    """Who answers: "demo" (two small packaged models), or hub ids, folders, GGUF files and `MemberConfig`s."""
    config: Annotated[
        EnsembleConfig | None,
        PlainValidator(lambda value: _as_config(value)),
        PlainSerializer(lambda value: value and plain_config(value)),
    ] = None
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
    on_segment: OnSegment | None = Field(default=None, exclude=True, repr=False)
    """Called with each verified segment before it is streamed, in the thread that runs the answer."""

    _leases: list[EngineLease] = PrivateAttr(default_factory=list)

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
        """The engine given, where it has this configuration, else the one that this process shares."""
        if self.engine is not None and self.engine.config == config:
            return self.engine
        held = next((lease for lease in self._leases if lease.engine.config == config), None)
        if held is None or held.engine.closed:
            self._leases = [lease for lease in self._leases if lease is not held]
            self._leases.append(held := lease_engine(config))
        return held.engine

    def _reference_member(self) -> Member:
        """The member whose tokens are counted; loads the engine on first use."""
        engine = self._resolve_engine().load()
        return next(m for m in engine._members if m.name == engine.config.reference_name)

    def close(self) -> None:
        """Let go of the shared engine; the last model that does frees its memory. An `engine` given stays open."""
        for lease in self._leases:
            lease.close()
        self._leases = []

    def _sampling(self, overrides: Mapping[str, Any]) -> SamplingParams:
        """The fields with one call's settings on top; None means "as in the field", an unknown key is refused."""
        return SamplingParams.from_dict({**self._settings(), **{k: v for k, v in overrides.items() if v is not None}})

    def _settings(self) -> dict[str, Any]:
        """The sampling of this model; what belongs to a single request (tools, a grammar) has no field here."""
        return {f.name: getattr(self, f.name) for f in fields(SamplingParams) if f.name in type(self).model_fields}

    def _identity(self) -> dict[str, Any]:
        """Everything that decides an answer besides the messages, as plain JSON."""
        sampling = {**self._settings(), "stop": list(self._sampling({}).stops)}
        return {"ensemble": self._plain_ensemble(self._ensemble()), "sampling": _plain(sampling)}

    @staticmethod
    def _plain_ensemble(config: EnsembleConfig) -> dict[str, Any]:
        return plain_config(config, changed=False)

    def _context_limit(self) -> int | None:
        """Of the smallest member; before the engine is loaded, only what the configuration says."""
        loaded = self._resolve_engine()._members
        stated = [m.context_limit for m in loaded] or [m.max_context for m in self._ensemble().member_configs]
        return min((limit for limit in stated if limit), default=None)

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


def config_of(ensemble: Members | EnsembleConfig) -> EnsembleConfig:
    """The configuration that `members` or `config` stand for. Raises `ConfigError`."""
    if isinstance(ensemble, EnsembleConfig):
        return ensemble
    members = _as_members(ensemble)
    return _demo_config() if members == "demo" else EnsembleConfig(members or ())


@cache
def _demo_config() -> EnsembleConfig:
    return EnsembleConfig(demo_members())


# ── records as plain JSON ────────────────────────────────────────────────────────────────────────


def segment_record(event: SegmentEvent) -> dict[str, Any]:
    """Who wrote a segment and how it was judged. `start`/`end` are its character offsets in the answer.

    No key is named `index`: LangChain would merge list items by it. Text that was only held back, and is
    released at the end, has no round of its own: its `round` and `member` are None.
    """
    place = {"start": event.start, "end": event.end}
    record = event.record
    if record is None:
        return {"round": None, "member": None, "scores": {}, "weights": {}, "tokens": 0, **place}
    won = _winner(record)
    return {
        "round": record.index,
        "member": record.winner,
        "scores": dict(won.scores),
        "weights": dict(record.weights),
        "tokens": won.tokens,
        **place,
    }


def candidate_records(event: SegmentEvent) -> list[dict[str, Any]]:
    """All candidates of a segment's round, the winner among them."""
    return [{**asdict(c), "drafters": list(c.drafters)} for c in (event.record.candidates if event.record else ())]


def usage_record(usage: Usage) -> dict[str, int]:
    """Token counts of the reference member."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def ledger(result: EnsembleResult) -> dict[str, Any]:
    """The whole result but its text, with each member's part in it, as plain JSON: lists, no tuples."""
    told = {key: value for key, value in result.to_dict().items() if key != "text"}
    plain: dict[str, Any] = _plain({**told, "summary": [asdict(member) for member in result.summary()]})
    return plain


def plain_config(config: EnsembleConfig | MemberConfig, *, changed: bool = True) -> dict[str, Any]:
    """The settings (those that differ from their defaults) as plain JSON; a policy object appears as its repr."""
    chosen = [f.name for f in fields(config) if not changed or getattr(config, f.name) != f.default]
    return {name: _plain(getattr(config, name), changed) for name in chosen}


def _plain(value: Any, changed: bool = True) -> Any:
    if isinstance(value, MemberConfig):
        return plain_config(value, changed=changed)
    if isinstance(value, Mapping):
        return {str(k): _plain(v, changed) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v, changed) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def _winner(record: RoundRecord) -> Candidate:
    return next(c for c in record.candidates if record.winner in c.drafters)


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
