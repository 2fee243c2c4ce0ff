"""An extension of griffe, which mkdocs uses: classes of settings show their constructor, as other dataclasses do."""

from __future__ import annotations

from typing import Any

import griffe

_VALIDATED = "specfuse_shared.validation.validated"


class SettingsSignatures(griffe.Extension):  # type: ignore[misc]
    """Makes griffe read `@validated` as `@dataclass`."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        if any(decorator.callable_path == _VALIDATED for decorator in cls.decorators):
            known = griffe.ExprName("dataclasses.dataclass")
            cls.decorators.append(griffe.Decorator(known, lineno=None, endlineno=None))
