"""Intervals of paired differences and of shares, and the smallest difference that a number of rows can show."""

from __future__ import annotations

import numpy as np
import pytest

from specfuse_shared.comparing.intervals import POWER, difference, least_seen, share


def test_intervals_are_of_paired_differences() -> None:
    same = difference([5.0, 6.0], [5.0, 6.0])
    assert (same.mean, same.low, same.high) == (0.0, 0.0, 0.0)
    gap = difference([10.0 * n + 1 for n in range(30)], [10.0 * n for n in range(30)])
    assert gap.low == pytest.approx(1.0) == gap.high
    wide = difference([float(n % 2) for n in range(40)], [0.0] * 40)
    assert 0.2 < wide.low < wide.mean == 0.5 < wide.high < 0.8


def test_the_smallest_visible_difference_is_seen_in_four_of_five_samples() -> None:
    """A simulation: at this true difference, 80 % of the intervals exclude zero."""
    dice, n = np.random.default_rng(1), 50
    smallest = least_seen(dice.normal(0, 7, 100_000)) * np.sqrt(100_000 / n)
    samples = dice.normal(smallest, 7, (2000, n))
    result = samples.mean(axis=1) - 1.96 * samples.std(axis=1, ddof=1) / np.sqrt(n) > 0
    assert result.mean() == pytest.approx(POWER, abs=0.03)


def test_a_single_row_has_no_smallest_visible_difference() -> None:
    one = difference([1.0], [0.0])
    assert (one.low, one.high, one.above) == (-np.inf, np.inf, False)
    assert one.to_dict()["high"] is None


def test_many_rows_are_resampled_in_chunks() -> None:
    gap = difference([float(n % 3) for n in range(5000)], [0.0] * 5000)
    assert gap.low < 1.0 < gap.high
    assert gap.high - gap.low == pytest.approx(2 * 1.96 * 0.8165 / 5000**0.5, rel=0.1)


def test_a_share_has_wilsons_interval() -> None:
    half = share(10, 20)
    assert half.mean == 50.0
    assert (half.low, half.high) == (pytest.approx(29.9, abs=0.1), pytest.approx(70.1, abs=0.1))
    assert (share(0, 0).low, share(0, 0).high) == (0.0, 100.0)
