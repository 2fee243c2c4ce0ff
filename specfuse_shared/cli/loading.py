"""An engine for a command, loaded in front of whoever waits, and where a command writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from specfuse_shared.cli import machine_tables, terminal
from specfuse_shared.cli.setup import configure_logging
from specfuse_shared.settings.config import EnsembleConfig

if TYPE_CHECKING:
    from specfuse_shared.serving.engine import EnsembleEngine


@contextmanager
def loaded(config: EnsembleConfig, verbose: bool) -> Iterator[EnsembleEngine]:
    configure_logging(verbose)
    from specfuse_shared.serving.engine import EnsembleEngine

    errors = Console(stderr=True)
    with EnsembleEngine(config) as engine:
        with terminal.loading(errors) as on_progress:
            engine.load(on_progress)
        if verbose:
            machine_tables.show_members(engine.describe(), errors)
        yield engine


def consoles() -> tuple[Console, Console]:
    """The answer goes to stdout; what is said about it joins it on a terminal, else stderr."""
    out = terminal.stdout()
    return out, out if out.is_terminal else terminal.stderr()
