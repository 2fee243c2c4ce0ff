"""Whether the files that members name are there, before anything is imported or fetched.

Which installed libraries are outside the versions that this release was tested with.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from specfuse_shared.config import OLLAMA, EnsembleConfig, MemberConfig
from specfuse_shared.errors import MemberLoadError

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_EXPECTED = 'expected a hub id ("Qwen/Qwen3-8B"), a folder with a config.json, a .gguf file, or "ollama:NAME"'


def check_sources(config: EnsembleConfig) -> None:
    """Raises `MemberLoadError` for a member of this machine whose file or folder cannot be one of a model."""
    if config.runtime == "local":
        for member in config.member_configs:
            if member.server is None and not member.model.startswith(OLLAMA):
                _check_source(member)


def _check_source(member: MemberConfig) -> None:
    path, problem = Path(member.model), ""
    if member.gguf_file is not None:
        return
    if path.is_dir():
        problem = _problem_of_folder(path)
    elif path.is_file():
        problem = "" if path.suffix == ".gguf" else f"{path} is a file, but no .gguf file"
    elif path.suffix == ".gguf":
        problem = f"there is no GGUF file {path}{_near(path)}"
    elif not _HUB_ID.fullmatch(member.model) or member.model.startswith("."):
        problem = f"there is no file or folder {path}{_near(path)}"
    if problem:
        raise MemberLoadError(f"member {member.label!r}: {problem}: {_EXPECTED}")


def _problem_of_folder(folder: Path) -> str:
    """The reason why a folder contains no model; empty if it may contain one."""
    if (folder / "config.json").is_file():
        return ""
    if files := sorted(path.name for path in folder.glob("*.gguf")):
        return f"{folder} holds GGUF files: name one of them, such as {folder / files[0]}"
    inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
    return f"{folder} has no config.json" + (f" (its folder {inside[0]!r} has one)" if inside else "")


def _near(path: Path) -> str:
    """The existing name that is most similar to a missing file or folder."""
    try:
        names: Sequence[str] = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return "" if path.parent.is_dir() else f", nor a folder {path.parent}"
    similar = difflib.get_close_matches(path.name, names, 1)
    return f" (there is {similar[0]!r})" if similar else ""


_DISTRIBUTION = "specfuse-llm"
_WATCHED = ("torch", "transformers", "accelerate")
"""Libraries whose internals the engine relies on."""


@cache
def untested_versions() -> str:
    """A sentence with installed versions outside this package's bounds, and the command to install others; or ""."""
    from packaging.requirements import Requirement

    try:
        bounds = [Requirement(text) for text in requires(_DISTRIBUTION) or ()]
    except PackageNotFoundError:  # run from a folder that was never installed
        return ""
    outside = []
    for bound in bounds:
        if bound.name in _WATCHED and bound.marker is None:
            installed = version(bound.name)
            if not bound.specifier.contains(installed, prereleases=True):
                outside.append((f"{bound.name} {installed}", str(bound)))
    if not outside:
        return ""
    names = " and ".join(name for name, _ in outside)
    requirements = " ".join(f"'{text}'" for _, text in outside)
    return f"{names} is not a version that this release was tested with: pip install {requirements}"
