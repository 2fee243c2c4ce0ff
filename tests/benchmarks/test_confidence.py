"""AUROC: what it must be where the answer is known."""

from __future__ import annotations

import pytest
from confidence import auroc, interval, table_of


def test_it_is_the_chance_that_a_right_answer_has_the_higher_number() -> None:
    assert auroc([0.9, 0.8], [0.1, 0.2]) == 1
    assert auroc([0.1], [0.9]) == 0
    assert auroc([0.5, 0.5], [0.5]) == 0.5
    assert auroc([0.9, 0.1], [0.5]) == 0.5


def test_its_interval_holds_it() -> None:
    numbers = [0.1 * n for n in range(20)]
    right = [n % 3 > 0 or n > 12 for n in range(20)]
    low, high = interval(numbers, right)
    found = auroc([n for n, r in zip(numbers, right, strict=True) if r], [0.0, 0.3, 0.6, 0.9, 1.2])
    assert low <= found <= high


def test_rows_without_a_number_do_not_count() -> None:
    found = [(True, {"a": 0.9}), (False, {"a": 0.1}), (True, {"a": None}), (False, {"a": 0.2}), (True, {"a": 0.8})]
    [line] = table_of(found)
    assert (line["rows"], line["right"]) == (4, 2)
    assert line["auroc"] == pytest.approx(1)
