"""Claims that a comparison makes, and claims that it avoids."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from specfuse_shared.comparing import ENSEMBLE, Comparison
from tests.comparing.comparisons import made

GOOD, BAD, HALF = "the sea", "a bird", "the sea bird"


def title(comparison: Comparison, name: str) -> str:
    """The sentence of the verdict about one subject."""
    return next((point.text for point in comparison.verdict.points if point.title == name), "")


def test_better_is_claimed_if_the_interval_is_above_zero() -> None:
    result = made({"one": [GOOD] * 10 + [BAD] * 30, "two": [BAD] * 40, ENSEMBLE: [GOOD] * 30 + [BAD] * 10})
    assert result.verdict.outcome == "better"
    assert result.verdict.headline.startswith(
        "Yes: the ensemble is better than the best member, one, on 40 questions: +50.0 ["
    )
    gap = result.columns["all"].differences[ENSEMBLE]
    assert 0 < gap.low < gap.mean == 50 < gap.high


def test_worse_names_the_member_to_use() -> None:
    result = made({"one": [GOOD] * 40, "two": [BAD] * 40, ENSEMBLE: [GOOD] * 20 + [BAD] * 20})
    assert result.verdict.outcome == "worse"
    assert result.verdict.headline.endswith("Use one alone.")


@pytest.mark.parametrize("ours", [[GOOD] * 21 + [BAD] * 19, [GOOD] * 20 + [BAD] * 20])
def test_nothing_is_claimed_if_the_interval_contains_zero(ours: list[str]) -> None:
    result = made({"one": [BAD] * 20 + [GOOD] * 20, "two": [BAD] * 40, ENSEMBLE: ours})
    assert result.verdict.outcome == "not seen"
    assert "No difference is seen" in result.verdict.headline
    assert any("differences below" in limit for limit in result.verdict.limits)


def test_nothing_is_claimed_of_few_rows_however_clear_they_are() -> None:
    result = made({"one": [BAD] * 19, "two": [BAD] * 19, ENSEMBLE: [GOOD] * 19})
    assert result.verdict.outcome == "too few rows"
    assert not title(result, "Best alone")
    assert not title(result, "Which to drop")
    more = made({"one": [BAD] * 20, "two": [BAD] * 20, ENSEMBLE: [GOOD] * 20})
    assert more.verdict.outcome == "better"


def test_one_row_has_no_interval_and_is_plain_json() -> None:
    result = made({"one": [BAD], "two": [BAD], ENSEMBLE: [GOOD]})
    assert result.verdict.outcome == "too few rows"
    reported = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert reported["columns"]["all"]["differences"][ENSEMBLE]["low"] is None
    assert "<svg" in result.to_html()


def test_without_references_nothing_is_claimed_to_be_better() -> None:
    result = made({"one": [GOOD] * 30, "two": [BAD] * 29 + [GOOD], ENSEMBLE: [GOOD] * 30}, references=None)
    assert result.verdict.outcome == "no references"
    assert result.columns == {}
    assert "share 3 % of their words; to 1 of 30 questions they are the same" in title(result, "Agreement")
    assert "<h2>Points" not in result.to_html()


def test_the_member_to_drop_is_the_one_whose_removal_improves_the_ensemble() -> None:
    texts = {
        "one": [GOOD] * 40,
        "two": [GOOD] * 40,
        "bad": [BAD] * 40,
        ENSEMBLE: [GOOD] * 20 + [BAD] * 20,
        "without one": [BAD] * 40,
        "without two": [GOOD] * 20 + [BAD] * 20,
        "without bad": [GOOD] * 40,
    }
    text = title(made(texts), "Which to drop")
    assert "without bad it is better: +50.0 [" in text
    assert "drop it; without one it is worse: -50.0 [" in text
    assert "without two no difference is seen: +0.0 [+0.0, +0.0]" in text


def test_the_member_to_drop_of_two_is_judged_by_the_other_ones_answers() -> None:
    result = made({"one": [GOOD] * 40, "bad": [BAD] * 40, ENSEMBLE: [GOOD] * 20 + [BAD] * 20})
    assert "without bad it is better" in title(result, "Which to drop")


def test_unmeasured_values_are_reported_as_unknown() -> None:
    result = made({"one": [GOOD] * 40, "two": [BAD] * 40, "three": [BAD] * 40, ENSEMBLE: [GOOD] * 40})
    assert "--leave-one-out" in title(result, "Which to drop")


def test_members_more_than_six_points_apart_are_named() -> None:
    unequal = made({"one": [GOOD] * 40, "two": [BAD] * 40, ENSEMBLE: [GOOD] * 40})
    assert "two is 100.0 [100.0, 100.0] below one" in title(unequal, "Too far apart")
    assert not title(unequal, "Near enough")
    equal = made({"one": [GOOD] * 40, "two": [GOOD] * 40, ENSEMBLE: [GOOD] * 40})
    assert title(equal, "Near enough").startswith("members are within 6 points of the best (at most")
    unsure = made({"one": [GOOD, BAD] * 20, "two": [BAD, GOOD] * 19 + [BAD, BAD], ENSEMBLE: [GOOD] * 40})
    assert "cannot exclude more" in title(unsure, "Near enough")


def test_an_insignificant_lead_of_the_best_alone_is_reported_as_such() -> None:
    close = made({"one": [GOOD, BAD] * 20 + [GOOD], "two": [BAD, GOOD] * 20 + [BAD], ENSEMBLE: [GOOD] * 41})
    assert "not distinguishable from two" in title(close, "Best alone")
    clear = made({"one": [GOOD] * 40, "two": [BAD] * 40, ENSEMBLE: [GOOD] * 40})
    assert "not distinguished" not in title(clear, "Best alone")


def test_the_cost_is_measured_on_single_requests() -> None:
    texts = {"one": [GOOD] * 4, "two": [BAD] * 4, ENSEMBLE: [GOOD] * 4}
    timed = made(texts, alone=True, seconds=3.0, first_seconds=1.0)
    assert title(timed, "Cost") == (
        "an answer takes 3.00 s, 1.0 × one's 3.00 s, first words 1.00 s to 1.00 s (medians of 4); "
        "1.50 forward passes per token to 1.50."
    )
    assert any("of this machine" in limit for limit in timed.verdict.limits)
    together = made(texts, alone=False, seconds=3.0, first_seconds=1.0)
    assert "an answer takes" not in title(together, "Cost")


def test_half_precision_is_reported_to_change_answers_between_runs() -> None:
    result = made({"one": [GOOD] * 4, "two": [BAD] * 4, ENSEMBLE: [GOOD] * 4})
    assert not any("half precision" in limit for limit in result.verdict.limits)
    half = replace(result, in_half=("one",))
    assert any("half precision" in limit for limit in half.verdict.limits)


def test_repetition_is_reported() -> None:
    loop = "so it continues " * 4
    result = made({"one": [GOOD] * 9 + [loop], "two": [GOOD] * 10, ENSEMBLE: [GOOD] * 10})
    assert title(result, "Repetition").endswith("one 10 %, two 0 %, the ensemble 0 %.")


def test_each_kind_has_its_metric_and_its_best_member() -> None:
    references = ["the sea"] * 20 + ["7"] * 20 + ["Light of short waves is scattered much more than others."] * 20
    right = ["the sea"] * 20 + ["It is 7."] * 20 + ["Light of short waves is scattered"] * 20
    result = made({"one": [BAD] * 60, "two": ["8"] * 60, ENSEMBLE: right}, references)
    assert list(result.columns) == ["all", "short: f1", "short: contains", "number: exact", "text: rougeL"]
    assert result.columns["number: exact"].means[ENSEMBLE] == 100
    assert "short (20, F1) +100.0" in title(result, "By kind")
    assert "few to say" not in title(result, "By kind")


def test_scripts_without_spaces_are_compared_by_characters() -> None:
    reference = "Радуга появляется, когда солнечный свет встречает капли дождя в воздухе."
    result = made({"one": [reference] * 2, "two": ["Не знаю."] * 2, ENSEMBLE: [reference] * 2}, reference)
    assert list(result.columns) == ["all", "text: chrf"]
    assert result.columns["text: chrf"].means["one"] == pytest.approx(100)
    assert result.columns["text: chrf"].means["two"] < 20


def test_questions_about_one_passage_are_resampled_together() -> None:
    result = made({"one": [GOOD] * 4, "two": [BAD] * 4, ENSEMBLE: [GOOD] * 4})
    assert not any("passage" in limit for limit in result.verdict.limits)
    passage = [type(q)(q.text, q.id, q.references, "It is the sea.") for q in result.questions]
    shared = Comparison(tuple(passage), result.askers, result.answers, result.weights)
    assert any("share a passage" in limit for limit in shared.verdict.limits)
