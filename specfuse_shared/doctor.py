"""What `specfuse-llm doctor` finds out: versions, devices, and each member as it loaded or why it did not."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import transformers

from specfuse_shared.config import EnsembleConfig
from specfuse_shared.engine import EnsembleEngine
from specfuse_shared.errors import MemberLoadError
from specfuse_shared.loading import LoadProgress
from specfuse_shared.types import MemberReport

OnProgress = Callable[[LoadProgress], None] | None


@dataclass(frozen=True, slots=True)
class Device:
    """A device that torch can use, and all of its memory."""

    device: str
    name: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Checkup:
    """The findings; `problems` has one line for each member that cannot be used."""

    versions: Mapping[str, str]
    devices: tuple[Device, ...]
    members: tuple[MemberReport, ...]
    problems: tuple[str, ...]


def examine(config: EnsembleConfig, on_progress: OnProgress = None) -> Checkup:
    """Load the ensemble; if that fails, each member by itself, to tell the good from the bad."""
    try:
        return Checkup(_versions(), _devices(), _load(config, on_progress), ())
    except MemberLoadError as error:
        members, problems = _one_by_one(config, on_progress)
        return Checkup(_versions(), _devices(), members, problems or (str(error),))


def _one_by_one(config: EnsembleConfig, on_progress: OnProgress) -> tuple[tuple[MemberReport, ...], tuple[str, ...]]:
    good: list[MemberReport] = []
    bad: list[str] = []
    for member in config.member_configs:
        try:
            good += _load(replace(config, members=[member], reference=None), on_progress)
        except MemberLoadError as error:
            bad.append(str(error))
    return tuple(good), tuple(bad)


def _load(config: EnsembleConfig, on_progress: OnProgress) -> tuple[MemberReport, ...]:
    with EnsembleEngine(config) as engine:
        engine.load(on_progress)
        return engine.describe()


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
    }


def _devices() -> tuple[Device, ...]:
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = [Device("cpu", f"{platform.machine()}, {torch.get_num_threads()} threads", ram)]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append(Device(f"cuda:{index}", facts.name, facts.total_memory))
    if torch.backends.mps.is_available():
        found.append(Device("mps", "Apple GPU", None))
    return tuple(found)
