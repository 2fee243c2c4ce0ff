"""A blind vote: the content of the page, and the import of the votes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specfuse_shared import ConfigError
from specfuse_shared.comparing import ENSEMBLE, Question, votes_on
from specfuse_shared.comparing.pages.voting import Pair, Votes, pairs_of
from tests.comparing.comparisons import made

TEXTS = {
    "one": [f"one says {n}" for n in range(40)],
    "two": [f"two says {n}" for n in range(40)],
    ENSEMBLE: [f"all say {n}" for n in range(39)] + ["one says 39"],
}


def all_for(pairs: list[Pair], ours: int) -> dict[str, str]:
    """Votes for the ensemble in the first pairs, and against it in the others."""
    opposite = {"left": "right", "right": "left"}
    return {pair.key: pair.ours if n < ours else opposite[pair.ours] for n, pair in enumerate(pairs)}


def test_only_differing_answers_are_voted_on_and_sides_reveal_nothing() -> None:
    pairs = pairs_of(made(TEXTS, references=None))
    assert len(pairs) == 39
    on_the_left = sum(pair.left.startswith("all") for pair in pairs)
    assert 8 < on_the_left < 31
    assert all((pair.left if pair.ours == "left" else pair.right).startswith("all") for pair in pairs)
    assert [pair.question for pair in pairs] != sorted(pair.question for pair in pairs)


def test_the_page_names_no_member_before_the_result_is_requested() -> None:
    page = made(TEXTS, references=None).to_voting_page()
    text = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "the ensemble" not in text
    assert ">one<" not in text


def test_text_of_models_ends_no_script(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--"
    page = made({**TEXTS, ENSEMBLE: [evil] * 40}, references=None).to_voting_page()
    assert "alert(1)</script>" not in page
    assert page.count("<script") == 4
    file = tmp_path / "vote.html"
    file.write_text(page, "utf-8")
    assert votes_on(file) == {}


def test_votes_decide_without_references() -> None:
    result = made(TEXTS, references=None)
    pairs = pairs_of(result)
    won = result.with_votes(all_for(pairs, 30))
    assert won.votes == Votes("one", 30, 9)
    assert won.verdict.outcome == "better"
    assert won.verdict.headline.startswith("Yes: people prefer the ensemble to one: it won 77 % [62, 87] of 39 votes")
    assert result.with_votes(all_for(pairs, 5)).verdict.outcome == "worse"
    assert result.with_votes(all_for(pairs, 20)).verdict.outcome == "not seen"
    few = result.with_votes(dict(list(all_for(pairs, 19).items())[:19]))
    assert few.verdict.outcome == "no references"
    assert "Votes" in {point.title for point in few.verdict.points}


def test_votes_are_shown_with_references_and_do_not_replace_them() -> None:
    result = made(TEXTS, references="nothing of the kind")
    voted = result.with_votes(all_for(pairs_of(result), 39))
    assert voted.verdict.outcome == result.verdict.outcome == "not seen"
    assert voted.verdict.points[0].title == "Votes"
    assert json.loads(json.dumps(voted.to_dict()))["votes"]["ours"] == 39


def test_ties_count_for_neither_side() -> None:
    result = made(TEXTS, references=None)
    votes = {pair.key: "equal" for pair in pairs_of(result)}
    assert result.with_votes(votes).votes == Votes("one", 0, 0, 39)
    assert result.with_votes(votes).verdict.outcome == "no references"


def test_votes_against_another_member_are_known_by_their_answers() -> None:
    result = made(TEXTS, references=None)
    votes = all_for(pairs_of(result, "two"), 10)
    assert result.with_votes(votes).votes == Votes("two", 10, 30)
    stray = result.with_votes({**votes, "0" * 24: "left"})
    assert stray.remarks == ("1 of 41 votes are on other answers and do not count",)
    with pytest.raises(ConfigError, match="did you mean 'two'"):
        result.to_voting_page("tow")


def test_a_new_page_keeps_the_votes_of_an_older_one(tmp_path: Path) -> None:
    result = made(TEXTS, references=None)
    votes = all_for(pairs_of(result), 3)
    file = tmp_path / "vote.html"
    file.write_text(result.to_voting_page(votes={**votes, "gone": "left"}), "utf-8")
    assert votes_on(file) == votes


def test_answers_that_are_all_the_same_cannot_be_voted_on() -> None:
    with pytest.raises(ConfigError, match="nothing to vote on"):
        made({"one": ["a"] * 3, "two": ["b"] * 3, ENSEMBLE: ["a"] * 3}, references=None).to_voting_page()


@pytest.mark.parametrize(
    "text",
    [
        "a thesis",
        '<script type="application/json" id="votes">{"a": "up"}</script>',
        '<script type="application/json" id="votes">[]</script>',
        '<script type="application/json" id="votes">{</script>',
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "page.html").write_text(text)
    with pytest.raises(ConfigError, match=r"page\.html is not a voting page"):
        votes_on(tmp_path / "page.html")
    with pytest.raises(ConfigError, match="cannot be read"):
        votes_on(tmp_path)


def test_choices_are_listed_with_the_letters_of_the_answers() -> None:
    question = Question("Pick.", choices=["red", "blue"], references=["blue"])
    assert question.asked == "Pick.\nA. red\nB. blue"
    assert question.asked in question.prompt
