"""The command in a terminal."""

from __future__ import annotations

import signal
import sys

COMMAND = [sys.executable, "-m", "specfuse_shared"]


def restore_interrupts() -> None:
    """Restore Ctrl-C: tests in the background of a shell, and their subprocesses, would ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
