"""The checks of `specfuse-llm doctor`: versions, devices, and each loaded member or its error; or the placement
plan."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version

import torch
import transformers

from specfuse_shared.config import EnsembleConfig, SamplingParams
from specfuse_shared.errors import MemberLoadError, SpecFuseError
from specfuse_shared.loading.gguf import ollama_models
from specfuse_shared.loading.planning import has_llama_cpp, plan_ensemble
from specfuse_shared.loading.progress import OnLoadProgress
from specfuse_shared.placement.plan import Device, Plan
from specfuse_shared.placement.sizing import find_devices, planned_devices
from specfuse_shared.serving.engine import EnsembleEngine
from specfuse_shared.types import MemberReport

TRIAL, TRIAL_TOKENS = "How do the tides follow the moon?", 48


@dataclass(frozen=True, slots=True)
class Checkup:
    """The results. `problems` has one line for each member that cannot be used."""

    versions: Mapping[str, str]
    devices: tuple[Device, ...]
    members: tuple[MemberReport, ...]
    problems: tuple[str, ...]
    ollama: Mapping[str, int] = field(default_factory=dict)
    """Models in Ollama's store, with their sizes in bytes."""


def examine(config: EnsembleConfig, on_progress: OnLoadProgress | None = None) -> Checkup:
    """Load the ensemble. If that fails, load each member alone to find the faulty ones."""
    try:
        return Checkup(_versions(), find_devices(), *_load(config, on_progress), _ollama())
    except MemberLoadError as error:
        members, problems = _one_by_one(config, on_progress)
        return Checkup(_versions(), find_devices(), members, problems or (str(error),), _ollama())


def predict_plan(config: EnsembleConfig, devices: str | None, answers: int, context: int) -> Plan:
    """The placement of the members, here or on the devices described. Loads nothing."""
    there = planned_devices(devices) if devices else None
    return plan_ensemble(config, there, answers=answers, context=context)


def _one_by_one(
    config: EnsembleConfig, on_progress: OnLoadProgress | None
) -> tuple[tuple[MemberReport, ...], tuple[str, ...]]:
    good: list[MemberReport] = []
    bad: list[str] = []
    for member in config.member_configs:
        try:
            loaded, wrong = _load(replace(config, members=[member], reference=None), on_progress)
            good += loaded
            bad += wrong
        except MemberLoadError as error:
            bad.append(str(error))
    return tuple(good), tuple(bad)


def _load(
    config: EnsembleConfig, on_progress: OnLoadProgress | None
) -> tuple[tuple[MemberReport, ...], tuple[str, ...]]:
    """The loaded members, and the error of a short answer.

    The answer shows which forward passes are replayed. It runs only if a member has captured steps.
    """
    problems: tuple[str, ...] = ()
    with EnsembleEngine(config) as engine:
        engine.load(on_progress)
        if any(report.graphs == "captured" for report in engine.describe()):
            try:
                engine.generate(TRIAL, SamplingParams(max_tokens=TRIAL_TOKENS))
            except SpecFuseError as error:
                problems = (f"a short answer failed: {error}",)
        return engine.describe(), problems


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "llama-cpp-python": version("llama-cpp-python") if has_llama_cpp() else "not installed",
    }


def _ollama() -> dict[str, int]:
    return {model.name: model.size for model in ollama_models()}
