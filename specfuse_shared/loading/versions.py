"""Which installed libraries are outside the versions that this release was tested with."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

_DISTRIBUTION = "specfuse-llm"
_WATCHED = ("torch", "transformers", "accelerate")
"""Libraries whose internals the engine relies on."""


@cache
def untested_versions() -> str:
    """A sentence that names installed versions outside the bounds of this package, and what to install; or ""."""
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
    wanted = " ".join(f"'{text}'" for _, text in outside)
    return f"{names} is not a version that this release was tested with: pip install {wanted}"
