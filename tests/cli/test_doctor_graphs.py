"""`specfuse-llm doctor` reports how forward passes of a short answer ran: replayed, as packed steps, or dynamic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from specfuse_shared import EnsembleEngine
from specfuse_shared.cli.doctor import examine
from specfuse_shared.cli.terminal import show_checkup
from specfuse_shared.report.html import UNKNOWN
from tests.support.graphs_without_gpu import Driver, driver

__all__ = ["driver"]


def doctor_output(engine: EnsembleEngine, execution: str) -> str:
    out = Console(record=True, width=160)
    checkup = examine(replace(engine.config, execution=execution))
    assert not checkup.problems
    show_checkup(checkup, out)
    return next(line for line in out.export_text().splitlines() if line.startswith("forward passes"))


def test_captured_steps_are_counted_as_replayed(driver: Driver, tiny_engine: EnsembleEngine) -> None:
    line = doctor_output(tiny_engine, "paged")
    assert line.count("replayed") == line.count("packed") == 2
    assert "dynamic" not in line
    assert driver.replays > 10


def test_doctor_runs_no_answer_without_captured_steps(tiny_engine: EnsembleEngine) -> None:
    assert doctor_output(tiny_engine, "paged").split() == ["forward", "passes", UNKNOWN, UNKNOWN]


def test_a_short_answer_that_fails_is_a_problem(
    driver: Driver, tiny_engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specfuse_shared.cli.doctor.TRIAL", "tides " * 2000)
    checkup = examine(replace(tiny_engine.config, execution="paged"))
    assert len(checkup.members) == 2
    assert "a short answer failed" in checkup.problems[0]
