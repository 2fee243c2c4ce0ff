"""Rank correlation between predictions from members alone and the gains of ensembles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from predictions import app, correlations, outcomes_of, rank_correlation
from typer.testing import CliRunner

from specfuse_shared.comparing import ENSEMBLE
from tests.comparing.comparisons import made

GOOD, BAD = "the sea", "a bird"


def answers(right: int, first: int = 0) -> list[str]:
    """24 answers, of which `right` are right, from index `first`."""
    return [GOOD if first <= n < first + right else BAD for n in range(24)]


def comparison(second: list[str], gain: int) -> Any:
    """A comparison with a member that is right 12 times; the ensemble is right `gain` times more often."""
    return json.loads(json.dumps(made({"one": answers(12), "two": second, ENSEMBLE: answers(12 + gain)}).to_dict()))


def test_equal_orders_correlate_by_one_and_opposite_orders_by_minus_one() -> None:
    assert rank_correlation([1.0, 2.0, 3.0, 9.0], [0.1, 0.2, 0.3, 0.4]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0, 3.0, 9.0], [4.0, 3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) is None, "too few"
    assert rank_correlation([1.0] * 4, [1.0, 2.0, 3.0, 4.0]) is None


def test_predictions_are_listed_with_gains(tmp_path: Path) -> None:
    runs = [comparison(answers(12, 12), 6), comparison(answers(12, 6), 3), comparison(answers(12), 0)]
    runs.append(comparison(answers(4), -2))
    outcomes = [each for run in runs for each in outcomes_of(run)]
    assert [each.group for each in outcomes] == ["short"] * 4
    assert [round(each.gained) for each in outcomes] == [25, 12, 0, -8]
    assert [round(each.predicted, 1) for each in outcomes] == [16.7, 8.3, 0.0, -11.1]
    assert correlations(outcomes)["predicted"] == pytest.approx(1.0)
    for n, run in enumerate(runs):
        (tmp_path / f"{n}.json").write_text(json.dumps(run))
    printed = CliRunner().invoke(app, ["suggested", *(str(tmp_path / f"{n}.json") for n in range(4))])
    assert printed.exit_code == 0
    assert "one + two" in printed.output
    assert "every group, 4 ensembles: rank correlation with the gain: predicted +1.00" in printed.output
