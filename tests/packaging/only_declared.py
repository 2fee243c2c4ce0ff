"""Runs code as if only some distributions were installed: `only_declared.py NAMES_AS_JSON FOLDER CODE`.

Only FOLDER (an unpacked wheel), the standard library and the named distributions are importable. Everything else,
including the source tree of an editable install, is neither importable nor visible to importlib.metadata.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder, packages_distributions
from pathlib import Path
from types import ModuleType


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class OnlyDeclared(DistributionFinder):
    """The normal path finder, without the distributions that are not declared."""

    def __init__(self, declared: set[str], folder: Path) -> None:
        self.declared, self.folder = declared, folder
        self.owners = {name: {normal(o) for o in owners} for name, owners in packages_distributions().items()}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        if (self.folder / top).is_dir():
            return PathFinder.find_spec(fullname, path or [str(self.folder)], target)
        if self.owners.get(top) and not self.owners[top] & self.declared:
            return None
        return PathFinder.find_spec(fullname, path, target)

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        result = PathFinder.find_distributions(context or DistributionFinder.Context())
        return (d for d in result if normal(d.metadata["Name"]) in self.declared)


if __name__ == "__main__":
    declared, folder, code = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    sys.path.insert(0, str(folder))
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, OnlyDeclared({*declared, "specfuse-llm"}, folder)]
    exec(code, {"__name__": "__main__"})
