"""What processes that are forked from one with an engine must know."""

from __future__ import annotations

import os
from functools import cache, partial

import torch

FORKED = (
    "this engine belongs to the process that this one was forked from: make a new one here, or let ChatSpecFuse, "
    "SpecFuseLLM or lease_engine find one (they do so by themselves)"
)


@cache
def limit_threads_after_fork() -> None:
    """Let processes that are forked from this one compute with one thread each.

    The threads that OpenMP keeps do not survive a fork, and the next one to ask for them would wait for ever.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))
