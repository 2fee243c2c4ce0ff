"""An engine for a command, loaded in front of whoever waits, and where a command writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from specfuse_shared.cli import machine_tables, terminal
from specfuse_shared.cli.setup import configure_logging, skip_retries_offline
from specfuse_shared.loading.sources import check_sources
from specfuse_shared.settings.config import EnsembleConfig

if TYPE_CHECKING:
    from specfuse_shared.serving.engine import EnsembleEngine


@contextmanager
def loaded(config: EnsembleConfig, verbose: bool) -> Iterator[EnsembleEngine]:
    configure_logging(verbose)
    check_sources(config)
    skip_retries_offline()
    errors = Console(stderr=True)
    with ExitStack() as stack:
        with terminal.loading(errors) as on_progress:
            from specfuse_shared.serving.engine import EnsembleEngine  # seconds of torch, behind the spinner

            engine = stack.enter_context(EnsembleEngine(config))
            engine.load(on_progress)
        if verbose:
            machine_tables.show_members(engine.describe(), errors)
        yield engine


def consoles() -> tuple[Console, Console]:
    """The answer goes to stdout; what is said about it joins it on a terminal, else stderr."""
    out = terminal.stdout()
    return out, out if out.is_terminal else terminal.stderr()
