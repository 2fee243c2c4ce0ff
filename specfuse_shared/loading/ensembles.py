"""The ensemble that a caller means by `members`: a configuration, a list of models, or "demo"."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal

from specfuse_shared.config import DEMO, EnsembleConfig, MemberConfig
from specfuse_shared.loading.demo import demo_members

Models = Sequence[MemberConfig | str] | Literal["demo"]


def config_of(ensemble: EnsembleConfig | Models) -> EnsembleConfig:
    """The configuration. Raises `ConfigError`, and `MemberLoadError` if the demo is not installed."""
    if isinstance(ensemble, EnsembleConfig):
        return ensemble
    return _demo() if ensemble == DEMO else EnsembleConfig(ensemble)


def members_of(models: Models) -> Sequence[MemberConfig | str]:
    """The models as a list. Raises `MemberLoadError` if the demo is not installed."""
    return _demo().members if models == DEMO else models


@cache
def _demo() -> EnsembleConfig:
    """Cached, because looking for the demo's files takes 0.3 s."""
    return EnsembleConfig(demo_members())
