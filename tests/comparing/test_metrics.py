"""What the quality benchmark counts as good."""

from __future__ import annotations

from typing import Any

import ifeval
import numpy as np
import pytest
from metrics import STRETCH, coherence, cosines, goes_in_circles, score
from numpy.typing import NDArray

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


@pytest.mark.parametrize(("name", "settings", "answer"), YES, ids=[name for name, _, _ in YES])
def test_every_check_tells_an_answer_that_follows_from_one_that_does_not(
    name: str, settings: dict[str, Any], answer: str
) -> None:
    assert ifeval.followed(answer, [name], [settings])
    assert not ifeval.followed(NO[name], [name], [settings])
    assert not ifeval.followed(" \n", [name], [settings])


def test_every_check_is_tested() -> None:
    assert {name for name, _, _ in YES} == set(ifeval.CHECKS) == set(NO)


def test_every_instruction_has_to_be_followed() -> None:
    both = ["punctuation:no_comma", "startend:quotation"]
    assert ifeval.followed('"Yes"', both, [{}, {}])
    assert not ifeval.followed('"Yes, sir"', both, [{}, {}])


def test_passages_are_scored_by_shared_words_without_articles_and_marks() -> None:
    row = {"task": "rag", "references": ["the Moon", "a satellite"]}
    assert score(row, "Moon.") == {"exact": 100.0, "f1": 100.0, "contains": 100.0}
    assert score(row, "the moon above")["f1"] == pytest.approx(200 / 3)
    assert score({"task": "rag", "references": ["北京"]}, "是北京。")["f1"] == pytest.approx(80.0)


def test_a_passage_answer_contains_a_reference_word_by_word() -> None:
    row = {"task": "rag", "references": ["3 to 9 kg", "nine"]}
    assert score(row, "It weighs from 3 to 9 kg, they say.")["contains"] == 100
    assert score(row, "It weighs from 3 to 90 kg.")["contains"] == 0
    assert score({"task": "rag", "references": ["北京"]}, "首都是北京。")["contains"] == 100


def test_meaning_is_that_of_the_nearest_reference() -> None:
    def encode(texts: list[str]) -> NDArray[np.float32]:
        """Sea, moon, and against both."""
        kinds = {"s": [1.0, 0.0], "m": [0.6, 0.8]}
        return np.array([kinds.get(text[:1], [-1.0, 0.0]) for text in texts], dtype=np.float32)

    found = cosines([["sea", "moon"], ["moon"], ["sea"], ["sea"]], ["moon", "sea", "x", " "], encode)
    assert found == pytest.approx([100.0, 60.0, 0.0, 0.0])


def test_sums_are_scored_by_the_last_number() -> None:
    row = {"task": "math", "references": ["6,000"]}
    assert score(row, "2 times 3000 is $6000.")["exact"] == 100
    assert score(row, "6000 or 7")["exact"] == 0


@pytest.mark.parametrize("task", ["open", "instruct", "rag", "math", "ifeval"])
def test_an_empty_answer_scores_nothing(task: str) -> None:
    row = {"task": task, "references": ["1"], "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    assert set(score(row, "\n").values()) == {0.0}


def test_circles() -> None:
    assert goes_in_circles("He ran fast.\nShe too.\nHe ran fast.\nHe ran fast.")
    assert goes_in_circles("so " + "and on we go " * 3)
    assert not goes_in_circles("- yes\n- yes\n- yes")


def test_coherence_is_of_neighbours_and_of_the_end_with_the_question() -> None:
    def encode(texts: list[str]) -> NDArray[np.float32]:
        """Texts about the sea, texts about the moon."""
        return np.array([[1.0, 0.0] if "sea" in text else [0.0, 1.0] for text in texts], dtype=np.float32)

    sea, moon = "sea " * STRETCH, "moon " * STRETCH
    assert coherence("The sea?", sea + sea + "moon", encode) == {"neighbours": 100.0, "on_topic": 100.0}
    assert coherence("The sea?", sea + sea + moon, encode) == {"neighbours": 50.0, "on_topic": 0.0}
    assert coherence("The sea?", sea, encode) == {}
