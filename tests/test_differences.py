"""Differences between answers: numbers and names first, then longer words."""

from __future__ import annotations

import pytest

from specfuse_shared.agreement import differences_of


def differences_between(*texts: str) -> list[list[tuple[str, str]]]:
    return [
        [(text[result.start : result.end], result.kind) for result in differences]
        for text, differences in zip(texts, differences_of(texts), strict=True)
    ]


def test_missing_numbers_and_names_are_distinguished_from_words() -> None:
    first, second = differences_between(
        "The moon landing was on July 20, 1969, by Neil Armstrong.", "The Moon landing was on July 21, 1969 with crew."
    )
    assert first == [("20", "number"), ("Neil", "name"), ("Armstrong", "name")]
    assert second == [("21", "number"), ("with", "word"), ("crew", "word")]


def test_a_difference_to_one_of_several_answers_counts() -> None:
    assert differences_between("Lisbon.", "lisbon!", "It is Porto") == [
        [("Lisbon", "word")],
        [("lisbon", "word")],
        [("Porto", "name")],
    ]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("1,969 ships", "1969 ships"),
        ("SHIPS SAIL", "ships sail"),
        ("a b c", "d e f"),
        ("", ""),
        ("...", "!"),
        ("x", "x"),
    ],
)
def test_other_letter_forms_are_no_difference(one: str, two: str) -> None:
    assert differences_between(one, two) == [[], []]


def test_a_capital_at_the_beginning_of_a_sentence_makes_no_name() -> None:
    [[*first], _] = differences_between("Ships sail. Harbours wait: NASA and McDonald know; I'm sure I do.", "")
    assert [text for text, kind in first if kind == "name"] == ["NASA", "McDonald"]
    [[*first], _] = differences_between("- Ships\n2. Harbours\n“Boats", "")
    assert [kind for _, kind in first] == ["word", "number", "word", "word"]


def test_a_quoted_text_is_a_name_if_it_is_long_enough() -> None:
    [[*first], _] = differences_between('They read "the white whale" and “dune”, not «war of hosts» or "at', "")
    assert [text for text, kind in first if kind == "name"] == ["white", "whale", "dune", "hosts"]
    assert ("They", "word") in first


def test_a_sign_is_part_of_a_number_and_marks_within_a_word_are_ignored() -> None:
    assert differences_between("It is -5 °C.", "It is 5 °C.") == [[("-5", "number")], [("5", "number")]]
    assert differences_between("−5, 1914-1918", "-5, 1914-1918") == [[], []]
    assert differences_between("U.S. e-mail, it's", "US email its") == [[], []]


def test_other_scripts_have_numbers_and_words_and_no_names() -> None:
    assert differences_between("東京タワー 333 m", "東京タワー 332 m") == [[("333", "number")], [("332", "number")]]
    assert differences_between("Москва стоит", "Город Киев стоит")[1][-1] == ("Киев", "name")


def test_a_single_text_has_no_differences() -> None:
    assert differences_of(["Alone 1"]) == [()]
    assert differences_of([]) == []
