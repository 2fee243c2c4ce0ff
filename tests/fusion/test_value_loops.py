"""Which texts count as a loop within a value, and where the value is closed."""

from __future__ import annotations

import json

import pytest

from specfuse_shared.fusion.repetition import ITEM_TIMES, PLAIN_ITEM_TIMES, ValueLoop, loop_of
from specfuse_shared.text.tool_calls import CALL_OPEN


def closed(answer: str, segment: str) -> str | None:
    """The value up to the point where a loop is closed; None without one."""
    loop = loop_of(answer, segment)
    return None if loop is None or not loop.closer else answer + loop.kept + loop.closer


@pytest.mark.parametrize(
    ("answer", "segment", "value"),
    [
        ('{"tools": [', '"clock", "clock", "clock", "clock", "cl', '{"tools": ["clock"]'),
        ('{"tools": ["clock", "clo', 'ck", "clock", "clock", "cl', '{"tools": ["clock", "clock"]'),
        ('{"tools": ["clock", "clock", "clock"', ', "clock", "cl', '{"tools": ["clock", "clock", "clock"]'),
        ("", '["red", "blue", "red", "blue", "red", "blue", "r', '["red", "blue"]'),
        ("", '{"a": "bob", "a": "bob", "a": "bob", "a": "bob", ', '{"a": "bob"}'),
        (
            '[{"name": "Ada"}, ',
            '{"name": "Bob"}, {"name": "Bob"}, {"name": "Bob"}, {"name": "Bob"}, {"',
            '[{"name": "Ada"}, {"name": "Bob"}]',
        ),
        ("", '{"wish": ": quiet room, quiet room, quiet room, quiet room, qu', '{"wish": ": quiet room"'),
        (
            '{"wish": "a bathroom, quiet room, quiet',
            " room, quiet room, quiet room, quiet",
            '{"wish": "a bathroom, quiet room, quiet room"',
        ),
        ("", '["I am not sure. I am not sure. I am not sure. I', '["I am not sure."'),
        ("", '{"x": "the sea is blue and the sea is blue and the sea is blue and', '{"x": "the sea is blue and"'),
        ("", '{"x": "' + "line\\n" * 9, '{"x": "line"'),
        ("", '{"x": "' + "no " * 9, '{"x": "no"'),
        (
            f'{CALL_OPEN}{{"name": "f", "arguments": {{"q": [',
            '"clock", "clock", "clock", "clock", ',
            f'{CALL_OPEN}{{"name": "f", "arguments": {{"q": ["clock"]',
        ),
        ("", "[" + "0, " * PLAIN_ITEM_TIMES, "[0]"),
    ],
)
def test_a_loop_is_closed_after_its_first_copy_and_never_before_streamed_text(
    answer: str, segment: str, value: str
) -> None:
    assert closed(answer, segment) == value


@pytest.mark.parametrize(
    "text",
    [
        "[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ",
        "[true, true, true, true, true, false, ",
        "[[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], ",
        '["X", "", "X", "", "X", "", "X", "", ',
        '["positive", "positive", "neutral", "positive", "positive", ',
        '["positive", "positive", "positive", "neu',
        '[{"day": 1, "open": true}, {"day": 2, "open": true}, {"day": 3, "open": true}, {"day": 4, "open": true}, ',
        '{"a": ["red", "red", "red", "red"], "b": ["r',
        '{"a": "no, no, no, no"',
        '{"a": "New York, New York, New',
        '{"hash": "0x00000000000000000000000000000000000000000000000000000000',
        '{"line": "----------------------------------------------------------',
        '{"aaaa": "ha ha ha',
        '{"a": "the bird, the cat, the dog, the cow',
        "the sea is blue and the sea is blue and the sea is blue and the",
        "",
        '{"',
    ],
)
def test_common_repetition_in_values_is_no_loop(text: str) -> None:
    for size in range(len(text)):
        assert closed(text[:size], text[size:]) is None


def test_a_list_can_end_or_continue_before_a_repeated_item() -> None:
    text = '["red", "red", '
    assert loop_of(text, '"red", "r') == ValueLoop('"red"', '"red"', "")
    assert loop_of(text, '"red"]') is None
    assert loop_of(text, '"red", "blue"') is None


def test_no_text_raises_an_error_and_the_result_is_a_prefix_of_the_segment() -> None:
    texts = ['[{"a\\', '{"a": "\\u00', '"""""""', "]]]}}}", '[,,,,,,"a', '{"a": "' + "\\u00e4\\n " * 12, "[" * 500]
    for text in texts:
        for size in range(0, len(text), 3):
            loop = loop_of(text[:size], text[size:])
            assert loop is None or text[size:].startswith(loop.kept)


@pytest.mark.parametrize("item", ["clock", "a quiet room", "Grüße\\n", '\\"never\\"'])
def test_few_equal_items_remain_for_any_segmentation_of_a_list(item: str) -> None:
    whole = "[" + f'"{item}", ' * 20
    for length in (15, 25, 60):
        answer, places = "", 0
        while (value := closed(answer, whole[len(answer) : len(answer) + length])) is None:
            loop = loop_of(answer, whole[len(answer) : len(answer) + length])
            answer += loop.kept if loop is not None else whole[len(answer) : len(answer) + length]
            places += 1
            assert places < 100
        assert json.loads(value) == [json.loads(f'"{item}"')] * len(json.loads(value))
        assert len(json.loads(value)) < ITEM_TIMES
