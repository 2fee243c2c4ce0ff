"""The ensemble of a model as its fields hold it: members or a configuration, checked, and as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, PlainValidator

from specfuse_shared.errors import ConfigError
from specfuse_shared.frameworks.local_paths import found, without_paths
from specfuse_shared.loading.config_files import plain, plain_config, read_ensemble
from specfuse_shared.loading.demo import demo_members
from specfuse_shared.settings.config import DEMO, EnsembleConfig
from specfuse_shared.settings.member_config import MemberConfig

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
    """The settings of a model that was given as `model=…`, one or a list, as models of one provider take it."""
    members = list(model) if isinstance(model, list | tuple) else [model]
    return {**{k: v for k, v in values.items() if k not in ("model", "model_name")}, "members": members}


def config_of(ensemble: Members | EnsembleConfig | Mapping[str, Any]) -> EnsembleConfig:
    """The configuration that `members`, `config` or a dictionary of one stand for. Raises `ConfigError`."""
    if isinstance(ensemble, Mapping):
        ensemble = named_config(ensemble)
    if isinstance(ensemble, EnsembleConfig):
        return ensemble
    members = _as_members(ensemble)
    return _demo_config() if members == DEMO else EnsembleConfig(members or ())


@cache
def _demo_config() -> EnsembleConfig:
    return EnsembleConfig(demo_members())


def _as_members(value: Any) -> Members:
    if value is None or value == DEMO:
        return DEMO if value else None
    if isinstance(value, (str, MemberConfig, Mapping)) or not isinstance(value, Sequence):
        hint = f"[{value!r}] is an ensemble of one" if isinstance(value, str) else f"give {SOURCES}"
        raise ConfigError(f"members is {value!r}: it is a list of models, {hint}")
    return EnsembleConfig([_as_member(member) for member in value]).member_configs


def _as_member(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return found(value) if isinstance(value, str) else value
    return MemberConfig.from_dict({k: found(v) if isinstance(v, str) else v for k, v in value.items()})


def named_config(value: Any) -> EnsembleConfig | None:
    """The configuration that `config` stands for: itself, one as plain JSON, or a TOML file of one."""
    if isinstance(value, Mapping):
        return EnsembleConfig.from_dict({**value, "members": _as_members(value.get("members"))})
    if isinstance(value, (str, Path)):
        return read_ensemble(value)
    if value is None or isinstance(value, EnsembleConfig):
        return value
    raise ConfigError(f"config must be an EnsembleConfig or a TOML file, not {type(value).__name__}")
