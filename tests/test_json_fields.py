"""The fields of JSON in a text that may be cut or broken, and of texts that continue it differently."""

from __future__ import annotations

import json

import pytest

from specfuse_shared.json_fields import DEEPEST, JsonText


def fields_in(text: str) -> dict[str, str]:
    return {field.path: text[field.start : field.end] for field in JsonText(text).fields}


def after(text: str, at: int, draft: str) -> list[tuple[str, str, bool]]:
    return [(field.path, reply, field.whole) for field, reply in JsonText(text).fields_after(at, draft)]


def test_each_value_has_its_path() -> None:
    value = {"a": {"b c": [1, [True, None]], 'q"': "x"}, "é": -1.5e3, "": []}
    text = json.dumps(value, ensure_ascii=False)
    assert fields_in(text) == {
        '$.a["b c"][0]': "1",
        '$.a["b c"][1][0]': "true",
        '$.a["b c"][1][1]': "null",
        '$.a["q\\""]': '"x"',
        "$.é": "-1500.0",
    }
    assert fields_in(json.dumps(value, indent=2)).keys() == fields_in(text).keys()
    assert fields_in(' \n["a", 2]') == {"$[0]": '"a"', "$[1]": "2"}


def test_json_is_found_anywhere_except_in_prose_with_braces() -> None:
    assert fields_in('Here:\n```json\n{"a": 1}\n```') == {"$.a": "1"}
    assert fields_in("Water [1] is {x | x > 0} wet [2].") == {}
    assert [field.value for field in JsonText('{"a": 1} and {"a": 2}').fields] == [0, 1]
    assert JsonText('{"a": 1} and {"a": 2').whole_values == 1


@pytest.mark.parametrize("text", ['{"a": "b', '{"a": "b\\', '{"a": "b\\"', '{"a": "\\u00'])
def test_a_truncated_string_is_an_incomplete_field(text: str) -> None:
    [field] = JsonText(text).fields
    assert (field.path, field.whole) == ("$.a", False)


def test_too_deeply_nested_json_ends_the_parsing() -> None:
    assert len(fields_in('{"a":' * (DEEPEST - 1) + "1")) == 0 + 1
    assert fields_in('{"a":' * DEEPEST + '{"b": 1') == {}
    assert fields_in('{"a":' * 100_000) == {}


def test_another_text_can_continue_at_any_position() -> None:
    text = '{"city": "Oslo", "n": 12, "ok": true}'
    assert after(text, text.index("slo"), 'tta", "n": 3}') == [("$.city", '"Otta"', True), ("$.n", "3", True)]
    assert after(text, text.index("2,"), "5") == [("$.n", "15", False)]
    assert after(text, text.index(', "ok'), "7, ") == [("$.n", "127", True)]
    assert after(text, text.index("true"), "fal") == [("$.ok", "fal", False)]
    assert after(text, text.index('ok"'), 'new": [1') == [("$.new[0]", "1", False)]
    assert after(text, 0, '["x"]') == [("$[0]", '"x"', True)]
    assert after("", 0, '{"a": 1}') == [("$.a", "1", True)]
    assert after('{"a"]', 5, '"x"') == []


def test_only_the_new_part_of_a_long_string_is_read() -> None:
    text = '{"a": "' + "word " * 100 + 'end \\"of\\" it", "b": 1}'
    at = text.index("end")
    assert after(text, at, 'stop", "b": 2,') == [("$.a", 'stop"', True), ("$.b", "2", True)]
    escaped = text.index('"of') - 1
    assert after(
        text,
        escaped + 1,
        '"so',
    ) == [("$.a", '\\"so', False)]
