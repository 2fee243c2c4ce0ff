"""Engines shared by the whole test run: the real demo ensemble, loaded once per number format."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specfuse_shared import EnsembleConfig, EnsembleEngine, demo_members
from tests.engine.comparing import FAULT_ROW
from tests.engine.tiny import pair_config, save_pair


@pytest.fixture(scope="session")
def demo_engine() -> Iterator[EnsembleEngine]:
    """The demo ensemble, with a short first segment, so that short answers have several; and a prompt is read anew each
    time: else bf16 would let the same question have two answers, as what was read in other pieces is rounded in other
    places."""
    with EnsembleEngine(EnsembleConfig(demo_members(), first_segment_tokens=5, reuse_prefixes=False)) as engine:
        yield engine.load()


@pytest.fixture(scope="session")
def exact_engine() -> Iterator[EnsembleEngine]:
    """The demo ensemble in float32, for comparisons with the naive round."""
    with EnsembleEngine(EnsembleConfig(demo_members(dtype="float32"), first_segment_tokens=None)) as engine:
        yield engine.load()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of injected faults; here, because a run on several processes reads no other conftest in time."""
    reports = [report for report in terminalreporter.stats.get("", ()) if report.when == "teardown"]
    rows = [row for report in reports for name, row in report.user_properties if name == FAULT_ROW]
    for row in [("injected", "stage", "into", "what happened"), *rows] if rows else ():
        terminalreporter.write_line("{:<14} {:<8} {:<12} {}".format(*row))


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnsembleEngine]:
    """Two tiny members of different make: a byte-level chat model and a metaspace base model."""
    with EnsembleEngine(pair_config(save_pair(tmp_path_factory))) as engine:
        yield engine.load()
