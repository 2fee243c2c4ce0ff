"""Suggested ensembles, predicted from the members' own answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specfuse_shared import ConfigError, SpecFuseError
from specfuse_shared.comparing import ENSEMBLE, Suggestion, compare, suggest
from specfuse_shared.comparing.combinations import MAX_LISTED, Beforehand, combination_of, suggestion_of
from specfuse_shared.members.stages import Draft, DraftAlone, Fault, StageRequest
from tests.comparing.fakes import Fakes, Script

ROWS = [{"text": f"question {n}", "references": ["the sea"]} for n in range(40)]


def points(right: int, first: int = 0) -> list[float]:
    """Of forty questions, those from `first` on that are answered well."""
    return [100.0 * (first <= n < first + right) for n in range(40)]


def test_the_parts_of_a_prediction_are_shares_of_the_questions() -> None:
    """20 right and 16 right answers, of which both have 12."""
    result = combination_of({"worse": points(16, first=8), "better": points(20)})
    assert result.best == "better"
    assert result.members == ("worse", "better")
    assert result.gap.mean == pytest.approx(10.0)
    assert result.added.mean == pytest.approx(10.0), "4 of 40 that only the worse one knows"
    assert result.contradicted.mean == pytest.approx(20.0), "8 of 40 on which it contradicts a right better one"
    assert result.predicted.mean == pytest.approx(100 * (12 + 2 / 3 * 12) / 40 - 50), "two of three known ones"
    assert result.predicted.low < result.predicted.mean < result.predicted.high


def test_members_with_equal_answers_gain_nothing() -> None:
    same = combination_of({"one": points(20), "two": points(20)})
    assert (same.gap.mean, same.added.mean, same.contradicted.mean, same.predicted.mean) == (0, 0, 0, 0)


def test_a_member_whose_vote_counts_more_is_followed_more_often() -> None:
    """Of 40 questions both answer 12 right, only the better one 8, and only the worse one 4."""
    both = {"worse": points(16, first=8), "better": points(20)}
    weighted = combination_of(both, beforehand=Beforehand(votes={"worse": 1.0, "better": 9.0}))
    followed = 0.9 + 0.1 / 3, 0.1 + 0.9 / 3
    assert weighted.predicted.mean == pytest.approx(100 * (12 + 8 * followed[0] + 4 * followed[1]) / 40 - 50)
    assert weighted.predicted.mean > combination_of(both).predicted.mean, "it loses fewer answers of the better one"


def test_right_guesses_are_not_counted_as_a_gain() -> None:
    """Two members that guess among four choices are right on different questions, and no vote can recognise these."""
    guessing = {"one": points(10), "two": points(10, first=10)}
    chance = Beforehand(guessed=[25.0] * 40)
    assert combination_of(guessing).predicted.mean == pytest.approx(25 / 3)
    assert combination_of(guessing, beforehand=chance).predicted.mean == pytest.approx(0.0)
    knowing = {"one": points(40), "two": points(10)}
    won = combination_of(knowing, beforehand=chance).predicted.mean - combination_of(knowing).predicted.mean
    assert won == pytest.approx(0.0), "a member that is always right does not guess"
    half = {"one": points(25), "two": points(10, first=30)}  # of 25 right answers, 20 are not guessed
    result = combination_of(half, beforehand=chance).predicted.mean
    assert result == pytest.approx(100 / 40 * (25 / 2 * (1 + 0.8 / 3) + 10 / 2) - 62.5)


def test_close_members_with_different_strengths_are_listed_first_and_distant_ones_last() -> None:
    result = suggestion_of({"good": points(24), "other": points(24, first=12), "twin": points(24), "bad": points(4)})
    sets = [each.members for each in result.combinations]
    assert result.sets == len(sets) == 6 + 4
    assert sets[0] in (("good", "other"), ("other", "twin"), ("good", "other", "twin"))
    assert "bad" in sets[-1]
    predicted = [each.to_best.mean for each in result.combinations]
    assert predicted == pytest.approx(sorted(predicted, reverse=True))


def test_a_gain_is_recommended_where_its_interval_is_above_zero() -> None:
    result = suggestion_of({"one": points(20), "two": points(20, first=20)})
    assert result.recommended is result.combinations[0]
    assert result.headline.startswith("Try one + two: +16.7 [+")
    unsure = suggestion_of({"one": points(20), "two": points(20, first=2)})
    assert unsure.recommended is None
    assert unsure.headline.startswith("These questions cannot show whether one + two are worth a try: +")
    worse = suggestion_of({"one": points(20), "two": points(2)})
    assert worse.headline.startswith("Use one alone: for the most promising ensemble, one + two, -")


def test_few_questions_recommend_nothing() -> None:
    few = suggestion_of({"one": [100.0] * 10 + [0.0] * 9, "two": [0.0] * 9 + [100.0] * 10})
    assert few.recommended is None
    assert few.headline.startswith("Too few questions to say: for one + two, +")


def test_a_pair_of_weaker_members_is_compared_with_the_best_of_all() -> None:
    result = suggestion_of({"best": points(30), "one": points(10), "two": points(10, first=10)})
    weak = next(each for each in result.combinations if each.members == ("one", "two"))
    assert weak.predicted.mean > 0 > weak.to_best.mean


def test_members_more_than_ten_points_apart_get_a_warning() -> None:
    distant = suggestion_of({"one": points(30), "two": points(25)})
    assert distant.warnings == ("one + two: members are 12.5 points apart; published ensembles lost beyond 10",)
    assert not suggestion_of({"one": points(30), "two": points(26)}).warnings, "ten are not above ten"


def test_the_most_promising_sets_of_many_members_are_listed() -> None:
    result = suggestion_of({f"m{n}": points(20, first=n) for n in range(8)})
    assert result.sets == 28 + 56
    assert len(result.combinations) == MAX_LISTED


# ── asking ───────────────────────────────────────────────────────────────────────────────────────

SCRIPT: Script = {
    "one": {f"question {n}": "the sea ." if n < 20 else "a bird ." for n in range(40)},
    "two": {f"question {n}": "a bird ." if n < 20 else "the sea ." for n in range(40)},
    "three": {"": "a bird ."},
}
NAMES = ["one", "two", "three"]


def suggested(fakes: Fakes, **how: object) -> Suggestion:
    return suggest(NAMES, ROWS, make_engine=fakes, **{"timed": 0, **how})


def test_suggesting_runs_each_member_alone_and_no_ensemble() -> None:
    fakes = Fakes(SCRIPT)
    result = suggested(fakes)
    assert [config.names for config in fakes.engines] == [("one",), ("two",), ("three",)]
    assert fakes.opened == 3 * 40
    assert result.rows == 40
    assert result.best == "one"
    assert result.means == {"one": 50.0, "two": 50.0, "three": 0.0}
    assert result.recommended is not None
    assert result.recommended.members == ("one", "two")
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["recommended"] == ["one", "two"]


def test_a_comparison_and_a_suggestion_share_a_run_file(tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"
    first = suggested(Fakes(SCRIPT), run=run, timed=2)
    again = Fakes(SCRIPT)
    assert suggested(again, run=run, timed=2) == first
    assert not again.engines
    fakes = Fakes(SCRIPT)
    result = compare(["one", "two"], ROWS, run=run, make_engine=fakes, timed=2)
    assert fakes.opened == 2 * 40 + 2, "the ensemble alone, and once before its first timed answer"
    assert {result.costs[name].timed for name in ("one", "two", ENSEMBLE)} == {2}
    predicted = result.to_dict()["columns"]["all"]["suggested"]
    pair = next(each for each in first.combinations if each.members == ("one", "two"))
    assert predicted["predicted"] == pair.predicted.to_dict()


def test_a_member_that_fails_is_left_out_by_name() -> None:
    def disturb(request: StageRequest) -> Fault | None:
        drafts = request.member == "three" and isinstance(request.op, (Draft, DraftAlone))
        return Fault("RuntimeError", "out of order") if drafts else None

    result = suggested(Fakes(SCRIPT, disturb=disturb))
    assert list(result.means) == ["one", "two"]
    assert "three has no answer to 40 of 40 questions, and is left out" in result.remarks[0]


def test_impossible_suggestions_are_refused() -> None:
    with pytest.raises(ConfigError, match="two members or more"):
        suggest(["one"], ROWS, make_engine=Fakes(SCRIPT))
    with pytest.raises(ConfigError, match="needs questions with references"):
        suggest(NAMES, ["question 1"], make_engine=Fakes(SCRIPT))

    def disturb(request: StageRequest) -> Fault | None:
        drafts = request.member != "one" and isinstance(request.op, (Draft, DraftAlone))
        return Fault("RuntimeError", "out of order") if drafts else None

    with pytest.raises(SpecFuseError, match="too few answers for a suggestion: two has no answer"):
        suggested(Fakes(SCRIPT, disturb=disturb))
