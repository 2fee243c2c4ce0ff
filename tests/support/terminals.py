"""The command in a terminal."""

from __future__ import annotations

import signal
import sys

COMMAND = [sys.executable, "-m", "specfuse_shared"]


def hear_interrupts() -> None:
    """A shell that runs the tests in the background makes them and their subprocesses ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
