"""What counts as going in circles."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specfuse_shared import EnsembleEngine, Grammar, SamplingParams, UnfinishedValueError
from specfuse_shared.frameworks.records import check_whole, finish_reason
from specfuse_shared.fusion.repetition import ends_in_circle, is_stuck, repeats
from tests.support.serving import reciting


@pytest.mark.parametrize(
    ("answer", "segment"),
    [
        ("the sea is blue and the sea is blue and", " the sea is blue and"),
        ("I am not sure.\nI am not sure.\n", "I am not sure."),
        ("- Web Design\n- Art\n- Web Design\n- Film\n", "- Web"),
        ("the sea is blue and so it goes on,", " the sea is blue and so it goes on,"),
        ("I am not sure.\n\nNo.\nI am not sure.\nYes.\n", "I am not"),
    ],
)
def test_a_stretch_thrice_in_a_row_and_a_line_for_the_third_time_repeat(answer: str, segment: str) -> None:
    assert repeats(answer, segment)


@pytest.mark.parametrize(
    ("answer", "segment"),
    [
        ("", ""),
        ("the sea is blue and", " the sea is blue and"),
        ("- The sea\n- The moon\n", "- The"),
        ("| a | b |\n|---|---|\n|---|---|\n", "|---|---|"),
        ("yes yes", " yes yes"),
        ("I am not sure.\nI am not sure.\n", "But I can"),
        ("I am not sure.\nI am not sure.\n", "\n"),
    ],
)
def test_less_than_that_is_none(answer: str, segment: str) -> None:
    assert not repeats(answer, segment)


def test_the_circle_has_to_be_at_the_end() -> None:
    assert ends_in_circle(["x", "a", "b", "c", "a", "b", "c", "a", "b", "c"])
    assert not ends_in_circle(["a", "b", "c", "a", "b", "c", "a", "b", "c", "x"])


LONG = "I would like to thank you for your work.\n\n"
ITEMS = "* Chicken and Steak\n* Salmon and Shrimp\n* Chicken and Steak\n* Chicken and Shrimp\n"


@pytest.mark.parametrize(
    ("answer", "segment"),
    [
        ("I am not sure.\nI am not sure.\nI am", " not sure."),
        ("It is yeast" + " yeast" * 10, " Yeast"),
        (f"Dear Ann,\n\n{LONG}{LONG}I", " would like to"),
        (f"Dear Ann,\n\n{LONG}{LONG}", "I would like"),
        ("- Business Administration\n- Business Administration\n- Business", " Administration\n"),
        (ITEMS, "* Chicken and Steak\n* Ham"),
        ("https://example.com/\n\nhttps://example.com/\n\n", "https://example.com/"),
    ],
)
def test_an_answer_is_stuck_that_says_again_what_it_said(answer: str, segment: str) -> None:
    assert is_stuck(answer, segment)
    assert repeats(answer, segment)


@pytest.mark.parametrize(
    ("answer", "segment"),
    [
        ("", ""),
        ("I am not sure.\nI am not sure.\n", "I am"),
        ("x = [0, 0, 0, 0, 0, 0,", " 0, 0, 0,"),
        ("row row row row row row", " row row row"),
        (f"Dear Ann,\n\n{LONG}{LONG}", "I would say"),
        (f"Dear Ann,\n\n{LONG}", "I would like to thank you"),
        (ITEMS, "* Chicken and"),
        (
            "Monday\n- Cardio training\nTuesday\n- Rest\nWednesday\n- Cardio training\nThursday\n- Rest\nFriday\n",
            "- Cardio training",
        ),
        ("```\nplot.show(figure)\nplot.show(figure)\n", "plot.show(figure)\n"),
        ("| | | |\n| | | |\n", "| | | |\n"),
    ],
)
def test_what_may_belong_there_does_not_end_an_answer(answer: str, segment: str) -> None:
    assert not is_stuck(answer, segment)


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def test_a_value_that_goes_in_circles_is_closed(tmp_path: Path) -> None:
    config = replace(reciting(tmp_path, endless=True), repetition_guard=True)
    params = SamplingParams(max_tokens=400, grammar=Grammar.json_schema(SCHEMA))
    with EnsembleEngine(config) as engine:
        result = engine.generate("Speak.", params)
        alone = engine.generate("Speak.", params, members=["ann"])
        with EnsembleEngine(replace(config, repetition_guard=False)) as unguarded:
            plain = unguarded.generate("Speak.", params)
    assert result.finish_reason == "repetition"
    assert 1 < json.loads(result.text)["a"].count("people sleep") < 4
    assert result.closing, "what closed it is known, so that half a call is not carried out"
    assert finish_reason(result, called=True) == "length"
    with pytest.raises(UnfinishedValueError, match="went in circles"):
        check_whole(result)
    assert result.usage.completion_tokens < 100
    assert plain.finish_reason == alone.finish_reason == "length", "the guard is of shared answers"
