"""A member's answer is its most frequent sample, in any wording; among equally frequent ones its most certain."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specfuse_shared.comparing import Answer, Question
from specfuse_shared.comparing.equal_compute import best_by_references, chosen
from specfuse_shared.comparing.metrics import final_answer
from tests.comparing.comparisons import answer

NUMBER = Question("How many?", references=["12"])
SHORT = Question("Where?", references=["the sea"])
CHOICE = Question("Which?", references=["this"], choices=["this", "that"])
TEXT = Question("Why?", references=["Light of short waves is scattered much more than others."])


def samples_of(*pairs: tuple[str, float | None]) -> list[Answer]:
    return [answer(text, logprob=logprob) for text, logprob in pairs]


@pytest.mark.parametrize(
    ("question", "text", "final"),
    [
        (NUMBER, "3 and 9 make 1,200.50", "1200.5"),
        (NUMBER, "It is 12.", "12.0"),
        (NUMBER, "I do not know.", None),
        (SHORT, "In the Sea!", "in sea"),
        (SHORT, "A", "A"),
        (SHORT, " ", None),
        (CHOICE, "B, as it seems", "B"),
        (CHOICE, "neither", None),
        (TEXT, "Light of short waves.", None),
    ],
)
def test_the_final_answer_of_a_text(question: Question, text: str, final: str | None) -> None:
    assert final_answer(question, text) == final


def test_large_numbers_that_begin_alike_are_not_the_same() -> None:
    assert final_answer(NUMBER, "12345678") != final_answer(NUMBER, "12345679")


@pytest.mark.parametrize(
    ("question", "samples", "wins"),
    [
        (NUMBER, samples_of(("It is 7", -0.1), ("so 12.", -2.0), ("3 · 4 = 12", -1.0)), "3 · 4 = 12"),
        (SHORT, samples_of(("a bird", -0.1), ("The sea", -3.0), ("the sea.", -2.0)), "the sea."),
        (CHOICE, samples_of(("A", -0.1), ("B", -0.9), ("B", -0.8)), "B"),
    ],
)
def test_the_most_frequent_answer_wins_with_its_most_certain_wording(
    question: Question, samples: Sequence[Answer], wins: str
) -> None:
    assert chosen(question, samples).text == wins


def test_among_equally_frequent_answers_the_higher_mean_log_p_wins() -> None:
    split = samples_of(("7", -0.1), ("12", -0.5), ("7", -1.9), ("12", -0.6))
    assert chosen(NUMBER, split).text == "12", "the means count, not the surest single sample"


def test_samples_without_a_final_answer_do_not_outvote_one_with_an_answer() -> None:
    assert chosen(NUMBER, samples_of(("no idea", -0.1), ("who knows", -0.1), ("12", -3.0))).text == "12"
    assert chosen(NUMBER, samples_of(("no idea", -0.2), ("who knows", -0.1))).text == "who knows"


def test_the_most_certain_open_text_is_chosen_and_never_an_empty_one() -> None:
    assert chosen(TEXT, samples_of(("Blue.", -0.9), ("Waves.", -0.4), ("", None))).text == "Waves."
    assert chosen(TEXT, samples_of(("", None), ("", None))).text == ""


def test_the_ceiling_is_chosen_by_references() -> None:
    samples = samples_of(("a bird", -0.1), ("a bird", -0.1), ("the sea", -5.0))
    assert best_by_references(SHORT, samples).text == "the sea"
    assert chosen(SHORT, samples).text == "a bird"
