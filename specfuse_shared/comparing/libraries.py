"""The libraries of the extra "compare", imported on use, so that the engine does not need them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from specfuse_shared.errors import MissingExtraError

NEEDED = ("langdetect", "llguidance", "nltk", "rouge_score", "scipy", "tomlkit")


def library(name: str) -> Any:
    """A module of the extra. Raises `MissingExtraError` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in NEEDED:
            raise
        raise MissingExtraError("comparing answers", "compare") from error


def check_libraries() -> None:
    """Raises `MissingExtraError` if one of the libraries is not installed."""
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError("comparing answers", "compare")
