"""Scores of good and of bad answers."""

from __future__ import annotations

from typing import Any

import pytest

from specfuse_shared import ConfigError
from specfuse_shared.comparing import Question
from specfuse_shared.comparing.instructions import CHECKS, check_instruction, followed
from specfuse_shared.comparing.metrics import agreement, is_looping, score

YES: list[tuple[str, dict[str, Any], str]] = [
    ("keywords:existence", {"keywords": ["sea", "Moon"]}, "The moon pulls the sea."),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2, "relation": "at least"}, "Sea and sea."),
    ("keywords:forbidden_words", {"forbidden_words": ["sea"]}, "The season is over."),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 3, "let_relation": "less than"}, "A map"),
    ("language:response_language", {"language": "de"}, "Der Himmel ist heute sehr blau und die Sonne scheint."),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two!"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "First.\n***\nSecond."),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "Two words."),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "So.\n\nThen it rained.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "Dear [name], from [me]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\n\nP.S. Write soon."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two"),
    ("detectable_format:constrained_response", {}, "My answer is maybe."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and **two**"),
    ("detectable_format:multiple_sections", {"section_spliter": "Part", "num_sections": 2}, "Part 1\na\nPart 2\nb"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```'),
    ("detectable_format:title", {}, "<<A title>>\nText."),
    ("combination:two_responses", {}, "One.\n******\nTwo."),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "Say it. It."),
    ("startend:end_checker", {"end_phrase": "The end."}, "Once. The end."),
    ("startend:quotation", {}, '"Quoted."'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"}, "ONE word"),
    ("change_case:english_capital", {}, "THE SKY IS BLUE TODAY AND THE SUN IS OUT."),
    ("change_case:english_lowercase", {}, "the sky is blue today and the sun is out."),
    ("punctuation:no_comma", {}, "No such mark."),
]
NO = {
    "keywords:existence": "The moon.",
    "keywords:frequency": "Sea.",
    "keywords:forbidden_words": "The Sea.",
    "keywords:letter_frequency": "Banana",
    "language:response_language": "The sky is very blue today and the sun is out.",
    "length_constraints:number_sentences": "One.",
    "length_constraints:number_paragraphs": "First.\nSecond.",
    "length_constraints:number_words": "These are many words.",
    "length_constraints:nth_paragraph_first_word": "Then.\n\nSo it rained.",
    "detectable_content:number_placeholders": "Dear [name]",
    "detectable_content:postscript": "Bye. See you.",
    "detectable_format:number_bullet_lists": "* one",
    "detectable_format:constrained_response": "Maybe.",
    "detectable_format:number_highlighted_sections": "*one*",
    "detectable_format:multiple_sections": "Part 1",
    "detectable_format:json_format": "{a: 1}",
    "detectable_format:title": "A title",
    "combination:two_responses": "One.\n******\nOne.",
    "combination:repeat_prompt": "It.",
    "startend:end_checker": "The end. Or is it?",
    "startend:quotation": 'He said "no"',
    "change_case:capital_word_frequency": "TWO WORDS",
    "change_case:english_capital": "The sky is blue today and the sun is out.",
    "change_case:english_lowercase": "The sky is blue today.",
    "punctuation:no_comma": "One, two.",
}


def short(*references: str) -> Question:
    return Question("What?", references=references, kind="short")


@pytest.mark.parametrize(("name", "settings", "answer"), YES, ids=[name for name, _, _ in YES])
def test_every_check_separates_answers_that_follow_the_instruction_from_others(
    name: str, settings: dict[str, Any], answer: str
) -> None:
    instruction = {"name": name, **settings}
    check_instruction(instruction)
    assert followed(answer, [instruction])
    assert not followed(NO[name], [instruction])
    assert not followed(" \n", [instruction])


def test_every_check_is_tested() -> None:
    assert {name for name, _, _ in YES} == set(CHECKS) == set(NO)


def test_every_instruction_has_to_be_followed() -> None:
    both = [{"name": "punctuation:no_comma"}, {"name": "startend:quotation", "unset": None}]
    assert followed('"Yes"', both)
    assert not followed('"Yes, sir"', both)


def test_an_instruction_that_cannot_be_checked_is_named() -> None:
    for wrong in (
        {"name": "punctuation:no_comma", "most": 1},
        {"names": "x"},
        "no_comma",
        {"name": "keywords:existence"},
    ):
        with pytest.raises(ConfigError, match="instruction"):
            check_instruction(wrong)


def test_passages_are_scored_by_shared_words_without_articles_and_marks() -> None:
    row = short("the Moon", "a satellite")
    assert score(row, "Moon.") == {"f1": 100.0, "contains": 100.0}
    assert score(row, "the moon above")["f1"] == pytest.approx(200 / 3)
    assert score(short("北京"), "是北京。")["f1"] == pytest.approx(80.0)


def test_a_passage_answer_contains_a_reference_word_by_word() -> None:
    row = short("3 to 9 kg", "nine")
    assert score(row, "It weighs from 3 to 9 kg, they say.")["contains"] == 100
    assert score(row, "It weighs from 3 to 90 kg.")["contains"] == 0
    assert score(short("北京"), "首都是北京。")["contains"] == 100


def test_number_answers_are_scored_by_the_last_number() -> None:
    row = Question("How many?", references=["6,000"])
    assert row.kind == "number"
    assert score(row, "2 times 3000 is $6000.")["exact"] == 100
    assert score(row, "6000 or 7")["exact"] == 0


def test_a_choice_is_the_first_separate_letter() -> None:
    row = Question("Which?", choices=["a cat", "a dog"], references=["a dog"])
    assert [score(row, text)["right"] for text in ("B", "B. a dog", "The answer is B", "A", "dog", "AB")] == [
        *(100.0, 100.0, 100.0, 0.0, 0.0, 0.0)
    ]


def test_running_text_is_scored_by_its_longest_common_subsequence_with_the_nearest_reference() -> None:
    row = Question("Why?", references=["the cat sat on the mat by the door", "a bird sings"], kind="text")
    assert score(row, "a bird sings") == {"rougeL": 100.0}
    assert score(row, "the cat sat")["rougeL"] == pytest.approx(50.0)
    assert score(row, "nothing of it")["rougeL"] == 0.0


@pytest.mark.parametrize(
    "row",
    [
        Question("x", references=["one two three four five six seven"]),
        Question("x", references=["семь слов стоят в этом ответе тут"]),
        Question("x", references=["one"]),
        Question("x", references=["1"]),
        Question("x", choices=["a", "b"], references=["a"]),
        Question("x", instructions=[{"name": "punctuation:no_comma"}]),
    ],
    ids=lambda row: f"{row.kind}-{row.references[:1]}",
)
def test_an_empty_answer_scores_nothing(row: Question) -> None:
    assert set(score(row, "\n").values()) == {0.0}


def test_a_question_without_references_is_not_scored() -> None:
    assert score(Question("Why?"), "Because.") == {}


def test_agreement_counts_shared_words() -> None:
    assert agreement("The sea.", "sea") == 100.0
    assert agreement("", "") == 100.0
    assert agreement("a bird", "the sea") == 0.0
    assert agreement("blue sea", "sea") == pytest.approx(200 / 3)


def test_repetition_loops() -> None:
    assert is_looping("He ran fast.\nShe too.\nHe ran fast.\nHe ran fast.")
    assert is_looping("so " + "and on we go " * 3)
    assert not is_looping("- yes\n- yes\n- yes")


@pytest.mark.parametrize("reference", ["A", "the", "!", "B"])
def test_a_reference_of_an_article_or_a_punctuation_mark_can_be_matched(reference: str) -> None:
    question = Question("Pick one.", references=[reference], kind="short")
    assert score(question, reference) == {"f1": 100.0, "contains": 100.0}
    assert score(question, "C") == {"f1": 0.0, "contains": 0.0}


@pytest.mark.parametrize(
    ("reference", "answer", "right"),
    [
        ("-3", "It is \u22123.", True),
        ("0.5", "So it is .5", True),
        ("35", "It is 3,5", False),
        ("1200", "All in all $1,200.00.", True),
        ("1,200", "1200", True),
        ("1234", "1,234.", True),
    ],
)
def test_numbers_are_read_as_they_are_written(reference: str, answer: str, right: bool) -> None:
    assert score(Question("How many?", references=[reference], kind="number"), answer) == {"exact": 100.0 * right}


def test_a_decimal_comma_is_no_number_of_a_question() -> None:
    assert Question("How much?", references=["3,5"]).kind == "short"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "length_constraints:number_words", "num_words": 3, "relation": "at most"}, "the relation"),
        ({"name": "keywords:existence", "keywords": "apple"}, "keywords must be a list"),
        ({"name": "keywords:forbidden_words", "forbidden_words": "apple"}, "forbidden_words must be a list"),
    ],
)
def test_an_ambiguous_instruction_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Question("Write.", instructions=[settings])
