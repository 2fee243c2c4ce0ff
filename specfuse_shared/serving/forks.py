"""What processes that are forked from one with an engine must know."""

from __future__ import annotations

import os
from functools import cache, partial

import torch


@cache
def limit_threads_after_fork() -> None:
    """Let processes that are forked from this one compute with one thread each.

    The threads that OpenMP keeps do not survive a fork, and the next one to ask for them would wait for ever.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))
