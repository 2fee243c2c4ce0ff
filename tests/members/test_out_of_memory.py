"""Memory that runs out anywhere in an answer: it continues with the same words, and all memory is freed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specfuse_shared import EnsembleConfig, EnsembleEngine, Message, SamplingParams
from specfuse_shared.members.local.member import LocalMember
from tests.support.against_naive import local_members, open_session
from tests.support.graphs_without_gpu import Driver, driver

pytestmark = pytest.mark.slow

__all__ = ["driver"]
MESSAGES = [Message("user", "How do the tides follow the moon? " * 5)]
PARAMS = SamplingParams(max_tokens=24)
LARGE = 4096
"""Minimum bytes of a counted allocation; an allocator has memory for smaller tensors in reserve."""


class Allocations(TorchDispatchMode):
    """Counts larger allocations, and makes number `failing` fail."""

    def __init__(self, failing: int | None = None) -> None:
        super().__init__()
        self.count, self.failing = 0, failing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.untyped_storage()._cdata not in inputs and made.nbytes >= LARGE:
                self.count += 1
                if self.count == self.failing:
                    raise torch.OutOfMemoryError("injected: out of memory")
        return result


def answer(config: EnsembleConfig, members: list[LocalMember], failing: int | None) -> tuple[str, int]:
    """The text of an answer, and its number of allocations."""
    session = open_session(config, members, MESSAGES, PARAMS)
    with Allocations(failing) as counted:
        for _ in session.events():
            pass
    session.release()
    assert failing is None or counted.count >= failing
    return session.text, counted.count


@contextmanager
def loaded(tiny_engine: EnsembleEngine, **settings: Any) -> Iterator[tuple[EnsembleConfig, list[LocalMember]]]:
    with EnsembleEngine(replace(tiny_engine.config, **settings)) as engine:
        members = local_members(engine)
        answer(engine.config, members, None)
        yield engine.config, members


@pytest.mark.parametrize("execution", ["dynamic", "paged"])
def test_an_answer_survives_out_of_memory_anywhere(driver: Driver, tiny_engine: EnsembleEngine, execution: str) -> None:
    with loaded(tiny_engine, execution=execution, reuse_prefixes=False) as (config, members):
        expected, count = answer(config, members, None)
        for failing in (*range(1, 12), *range(12, count, max(1, count // 8))):
            for member in members:
                member.runner.free_spare()
                member.runner.drop_steps()
            assert answer(config, members, failing)[0] == expected, f"number {failing} of {count}"
            assert not driver.freed
            assert not driver.allocating
        assert {member.report.graphs == "captured" for member in members} == {execution != "dynamic"}


def test_out_of_memory_with_a_reused_prefix_drops_only_the_prefix(tiny_engine: EnsembleEngine) -> None:
    with loaded(tiny_engine, execution="dynamic") as (config, members):
        expected, _ = answer(config, members, None)
        for failing in range(1, 12):
            answer(config, members, None)
            assert all(member.runner.prefixes.memory_bytes for member in members), "a cached prefix exists"
            assert answer(config, members, failing)[0] == expected, f"number {failing}"
