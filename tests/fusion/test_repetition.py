"""Which texts count as a repetition loop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specfuse_shared import (
    ClosedValueWarning,
    EnsembleEngine,
    EnsembleResult,
    FinishReason,
    Grammar,
    SamplingParams,
    Tool,
    UnfinishedValueError,
    Usage,
)
from specfuse_shared.frameworks.records import check_whole, finish_reason, is_closed_nearby
from specfuse_shared.fusion import repetition
from specfuse_shared.fusion.repetition import ends_in_loop, is_stuck, repeats
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
def test_text_three_times_in_a_row_and_a_line_for_the_third_time_are_repetitions(answer: str, segment: str) -> None:
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
def test_fewer_repetitions_are_allowed(answer: str, segment: str) -> None:
    assert not repeats(answer, segment)


def test_the_repetition_has_to_be_at_the_end() -> None:
    assert ends_in_loop(["x", "a", "b", "c", "a", "b", "c", "a", "b", "c"])
    assert not ends_in_loop(["a", "b", "c", "a", "b", "c", "a", "b", "c", "x"])


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
def test_a_repetition_loop_is_detected(answer: str, segment: str) -> None:
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
def test_legitimate_repetition_does_not_end_an_answer(answer: str, segment: str) -> None:
    assert not is_stuck(answer, segment)


def schema_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


TEXT = {"type": "string"}


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnsembleEngine]:
    """Members that repeat the same words without end, also within a string."""
    config = replace(reciting(tmp_path_factory.mktemp("endless"), endless=True), repetition_guard=True)
    with EnsembleEngine(config) as engine:
        yield engine


def test_a_repetitive_value_is_closed_after_its_first_copy(endless: EnsembleEngine) -> None:
    params = SamplingParams(max_tokens=400, grammar=Grammar.json_schema(schema_of(a=TEXT)))
    result = endless.generate("Speak.", params)
    assert result.finish_reason == "repetition"
    assert 1 <= json.loads(result.text)["a"].count("people sleep") < 3
    assert result.loops
    assert all("people sleep" in loop for loop in result.loops)
    assert result.usage.completion_tokens < 100
    assert finish_reason(result) == "stop", "the value is whole"
    assert "".join(round.text for round in result.rounds) == result.text


def test_a_repetition_loop_is_an_error_that_names_it_only_if_strict(endless: EnsembleEngine) -> None:
    params = SamplingParams(max_tokens=400, grammar=Grammar.json_schema(schema_of(a=TEXT)))
    result = endless.generate("Speak.", params)
    with pytest.raises(UnfinishedValueError, match=r"repeated itself \('.*people sleep.* again and again\)"):
        check_whole(result)
    with pytest.warns(ClosedValueWarning, match="people sleep"):
        check_whole(result, may_close=True)


def test_a_value_continues_after_a_closed_string(endless: EnsembleEngine) -> None:
    schema = schema_of(a=TEXT, b={"enum": ["tide", "moon"]}, c=TEXT)
    result = endless.generate("Speak.", SamplingParams(max_tokens=400, grammar=Grammar.json_schema(schema)))
    value = json.loads(result.text)
    assert value["b"] in ("tide", "moon")
    assert value["c"].count("people sleep") in (1, 2)
    assert len(result.loops) == 2
    assert result.finish_reason == "repetition"


def test_a_string_that_cannot_end_at_the_loop_continues(endless: EnsembleEngine) -> None:
    schema = schema_of(a={**TEXT, "minLength": 260})
    result = endless.generate("Speak.", SamplingParams(max_tokens=500, grammar=Grammar.json_schema(schema)))
    assert len(json.loads(result.text)["a"]) >= 260


def test_a_repetition_loop_that_cannot_be_closed_is_an_error_that_names_it(endless: EnsembleEngine) -> None:
    schema = schema_of(a={**TEXT, "pattern": "sleep near harbours!$"})
    with pytest.raises(UnfinishedValueError, match=r"the answer repeated .*people sleep"):
        endless.generate("Speak.", SamplingParams(max_tokens=200, grammar=Grammar.json_schema(schema)))


def test_a_repetitive_call_is_closed_completely(endless: EnsembleEngine) -> None:
    tool = Tool("say", "", schema_of(a=TEXT, b=TEXT))
    result = endless.generate("Speak.", SamplingParams(max_tokens=400), tools=[tool], tool_choice="any")
    assert result.closing.startswith('"')
    assert result.closing.endswith("</tool_call>")
    assert json.loads(result.text.removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"]["b"] == ""
    assert finish_reason(result, called=True) == "length"
    assert not is_closed_nearby(result, called=True), "b is invented"


def test_the_repetition_guard_applies_to_shared_answers(endless: EnsembleEngine, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=120, grammar=Grammar.json_schema(schema_of(a=TEXT)))
    alone = endless.generate("Speak.", params, members=["ann"])
    with EnsembleEngine(replace(endless.config, repetition_guard=False)) as unguarded:
        plain = unguarded.generate("Speak.", params)
    assert plain.finish_reason == alone.finish_reason == "length"
    assert plain.loops == alone.loops == ()


@pytest.mark.parametrize(
    ("text", "closing", "is_near"),
    [
        ('{"a": "x"}', '"}', True),
        ('{"a": ["x"]}', "]}", True),
        ('{"a": "x", "b": ""}', '", "b": ""}', False),
        ('{"n": 12}', "}", False),
        ('{"n": "12"}', '"}', True),
        ('{"n": 12}', "", True),
    ],
)
def test_closing_brackets_and_quotes_invents_nothing_except_a_partial_number(
    text: str, closing: str, is_near: bool
) -> None:
    usage = Usage(1, 2, "a")
    result = EnsembleResult(text, FinishReason.LENGTH, None, usage, (), ("a",), None, 0, None, 0, closing=closing)
    assert is_closed_nearby(result) is is_near
    if is_near:
        with pytest.warns(ClosedValueWarning, match="reached max_tokens after 2 tokens"):
            check_whole(result, may_close=True)
    else:
        with pytest.raises(UnfinishedValueError, match="max_tokens cut"):
            check_whole(result, may_close=True)


@pytest.mark.parametrize(
    "text",
    [
        r'{"a": ["x\"y", "z\\", 1, [2, {"b": "c, ]d"}, "open \u00e9 and',
        '["one", "two", {"three": 4}, "',
        '[[], [[]], "a\\',
    ],
)
def test_an_answer_is_scanned_once_for_all_candidates(text: str) -> None:
    """The scan that resumes after the answer finds the same open parts, wherever the answer ends."""
    for cut in range(len(text) + 1):
        assert repetition._open_parts(text[:cut], text, 0) == repetition._scan(text, 0, [])
