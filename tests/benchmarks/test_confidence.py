"""AUROC of data with a known result."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from predictions import agreements, auroc, interval, stored_measures, table_of

from specfuse_shared import EnsembleConfig
from specfuse_shared.comparing import Answer, Question
from specfuse_shared.comparing.run.run_file import RunFile, answer_key, sample_key
from specfuse_shared.comparing.run.sampling import TEMPERATURE
from tests.comparing.comparisons import answer
from tests.support.explained import differing


def test_auroc_is_the_probability_that_a_right_answer_has_the_higher_value() -> None:
    assert auroc([0.9, 0.8], [0.1, 0.2]) == 1
    assert auroc([0.1], [0.9]) == 0
    assert auroc([0.5, 0.5], [0.5]) == 0.5
    assert auroc([0.9, 0.1], [0.5]) == 0.5


def test_the_interval_contains_the_auroc() -> None:
    numbers = [0.1 * n for n in range(20)]
    right = [n % 3 > 0 or n > 12 for n in range(20)]
    low, high = interval(numbers, right)
    result = auroc([n for n, r in zip(numbers, right, strict=True) if r], [0.0, 0.3, 0.6, 0.9, 1.2])
    assert low <= result <= high


def test_rows_without_a_value_do_not_count() -> None:
    results = [(True, {"a": 0.9}), (False, {"a": 0.1}), (True, {"a": None}), (False, {"a": 0.2}), (True, {"a": 0.8})]
    [line] = table_of(results)
    assert (line["rows"], line["right"]) == (4, 2)
    assert line["auroc"] == pytest.approx(1)


def test_auroc_is_none_if_all_answers_are_right() -> None:
    [line] = table_of([(True, {"a": 0.9}), (True, {"a": 0.1})])
    assert (line["rows"], line["auroc"], line["low"], line["high"]) == (2, None, None, None)


def test_agreement_on_numbers_names_and_the_last_number_is_read_from_the_rounds() -> None:
    request = Question("How many?", references=["7"])
    drafts = {"b": "So 3 of Ann and 5 leave 7", "c": "So 2 and then they leave 8"}
    result = differing([("So 2 of Ann and 5 leave 7.", drafts)], {"a": 0.5, "b": 0.3, "c": 0.2})
    report = agreements(request, Answer.of(result))
    assert report["agreement, numbers and names"] == pytest.approx(0.7)
    assert report["agreement, last number"] == pytest.approx(0.8)
    assert 0 < (report["agreement"] or 0) < 1
    wrong = Answer.of(differing([("So 7.", {"b": "So 8."})], {"a": 0.75, "b": 0.25}))
    assert agreements(request, wrong)["agreement, last number"] == pytest.approx(0.75)
    alone = Answer.of(differing([("So 7.", {})], {"a": 1.0}))
    assert agreements(request, alone)["agreement, last number"] is None


def test_a_comparison_file_gives_the_measures_without_running_a_model(tmp_path: Path) -> None:
    """Agreement, words in common of the members' answers, and the samples of one member."""
    request, file = Question("How many?", id="q", references=["7"]), tmp_path / "compare.jsonl"
    config = EnsembleConfig(["a", "b"])
    fused = Answer.of(differing([("So 7.", {"b": "So 8."})], {"a": 0.75, "b": 0.25}))
    with RunFile(file) as run:
        run.add_answer(answer_key(config, request, None), fused, "the ensemble", "q")
        for name, text in (("a", "So 7."), ("b", "So 8.")):
            run.add_answer(answer_key(config.only([name]), request, None), answer(text), name, "q")
        for seed, text in enumerate(("7", "It is 7.", "8", "none"), 1):
            run.add(sample_key(config.only(["a"]), request, None, TEMPERATURE, seed), asdict(answer(text)))
    with RunFile(file) as run:
        result = stored_measures(run, config, request)
        assert stored_measures(run, config, Question("Who?", id="q2", references=["7"])) is None
    assert result is not None
    right, report = result
    assert right
    assert report["agreement, last number"] == pytest.approx(0.75)
    assert 0 < (report["agreement"] or 0) < 1
    assert report["members alone, words in common"] == pytest.approx(0.5)
    assert report["samples of a with this answer"] == 0.5
    assert report["samples of b with this answer"] is None
