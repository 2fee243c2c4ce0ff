"""A member of the tiny engine, and a second runner for it with captured steps."""

from __future__ import annotations

import pytest

from specfuse_shared import EnsembleEngine
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.runtime.model_runner import ModelRunner
from tests.support.against_naive import local_members
from tests.support.captured import paged_runner
from tests.support.graphs_without_gpu import Driver


@pytest.fixture
def member(driver: Driver, tiny_engine: EnsembleEngine) -> LocalMember:
    return local_members(tiny_engine)[0]


@pytest.fixture
def runner(driver: Driver, member: LocalMember) -> ModelRunner:
    return paged_runner(member.runner.model, member.runner)
