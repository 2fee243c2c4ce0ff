"""Files that commands write: whether they can be is found out before any model is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

from specfuse_shared.cli import terminal
from specfuse_shared.errors import ConfigError, SpecFuseError


def check_writable(path: Path, option: str) -> None:
    """Raises `ConfigError` for a file that could not be written. Changes none."""
    try:
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        hint = "name a file in a folder that exists and that you may write to"
        raise ConfigError(f"{option} cannot be written to {path} ({error.strerror}): {hint}") from error


def write_report(path: Path, html: str, what: str = "report") -> None:
    """Raises `SpecFuseError` where it cannot be written after all."""
    try:
        path.write_text(html, "utf-8", errors="xmlcharrefreplace")
    except OSError as error:
        raise SpecFuseError(f"the {what} was not written to {path}: {error.strerror}") from error
    print(f"{what}: {terminal.visible(str(path))}", file=sys.stderr)
