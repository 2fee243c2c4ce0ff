"""The format of scores."""

from __future__ import annotations

import pytest

from specfuse_shared.report.html import number


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "–"),
        (0.0, "0.000"),
        (1.0, "1.000"),
        (0.12345, "0.123"),
        (0.0005, "0.001"),
        (0.00049, "5e-04"),
        (3e-9, "3e-09"),
    ],
)
def test_a_small_score_is_not_shown_as_zero(value: float | None, expected: str) -> None:
    assert number(value) == expected
