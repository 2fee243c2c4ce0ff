"""Schemas as other libraries write them: all are accepted, with their values and no others."""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from specfuse_shared import Grammar, Tool
from specfuse_shared.errors import GrammarError
from specfuse_shared.text.grammars.guidance import byte_vocabulary
from specfuse_shared.text.grammars.patterns import readable_patterns
from specfuse_shared.text.tool_calls import ToolUse
from tests.support.foreign_schemas import FOREIGN, KEYWORDS, Foreign

PAGE = Path(__file__).parents[2] / "docs" / "schemas.md"
KNOWN = [
    *(keyword for keywords in KEYWORDS if "true" not in keywords for keyword in keywords.split(", ")),
    *("oneOf", "$defs", "definitions", "additionalItems", "nullable"),
]
ALL = {f"{library}: {name}": each for library, group in FOREIGN.items() for name, each in group.items()}
BY_KEYWORD = {f"{keyword} {n}": each for keyword, group in KEYWORDS.items() for n, each in enumerate(group)}


def is_value(schema: dict[str, Any], text: str, strict: bool = False) -> bool:
    matcher = byte_vocabulary().matcher(Grammar.json_schema(schema, strict=strict).compiled).deep_copy()
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


def wrong_verdicts(foreign: Foreign, strict: bool = False) -> list[Any]:
    pairs = [(value, True) for value in foreign.taken] + [(value, False) for value in foreign.refused]
    written = [(json.dumps(value, ensure_ascii=False), expected) for value, expected in pairs]
    return [text for text, expected in written if is_value(foreign.schema, text, strict) != expected]


@pytest.mark.parametrize("foreign", ALL.values(), ids=ALL)
def test_a_schema_of_another_library_is_taken_with_its_values_and_no_others(foreign: Foreign) -> None:
    assert wrong_verdicts(foreign) == []


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("foreign", BY_KEYWORD.values(), ids=BY_KEYWORD)
def test_every_documented_keyword_is_enforced(foreign: Foreign, strict: bool) -> None:
    assert wrong_verdicts(foreign, strict) == []


@pytest.mark.parametrize("foreign", BY_KEYWORD.values(), ids=BY_KEYWORD)
def test_the_pairs_agree_with_a_json_schema_validator(foreign: Foreign) -> None:
    validator = Draft202012Validator(foreign.schema)
    assert all(map(validator.is_valid, foreign.taken))
    assert "format" in foreign.schema or not any(map(validator.is_valid, foreign.refused))


def test_the_documented_limits_hold() -> None:
    page, groups = PAGE.read_text("utf-8"), {**FOREIGN, "JSON Schema, by keyword": BY_KEYWORD}
    for library, group in groups.items():
        taken, refused = (sum(len(getattr(f, kind)) for f in group.values()) for kind in ("taken", "refused"))
        assert f"| {library} | {len(group)} | {taken} | {refused} |" in page
    named = re.findall(r"`(\w+)`", page.partition("**Enforced.**")[2].partition("\n\n")[0])
    covered = {keyword for keywords in KEYWORDS for keyword in keywords.split(", ")}
    assert covered - {"true", "false"} == set(named) - {"true", "false", "definitions", "defs"} | {"$ref"}


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────


def test_no_excluded_bound_is_generated() -> None:
    places = [0, 0.3, 0.5, 1, 1.5, 2, -0.3, -1, -1.5, -2]
    keys = [("minimum", "maximum"), ("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum")]
    for (low, high), (lower, upper) in itertools.product(itertools.combinations(sorted(places), 2), keys):
        schema = {"type": "number", lower: low, upper: high}
        validator = Draft202012Validator(schema)
        for text in ("0", "-0", "0.0", "1", "1.0", "-1", "-1.0", "2", "-2", "0.3", "-0.3", "1.25", "-1.25", "0.25"):
            if is_value(schema, text):
                assert validator.is_valid(json.loads(text)), (schema, text)
        middle = (low + high) / 2
        assert is_value(schema, json.dumps(middle)), schema


@pytest.mark.parametrize("key", ["minimum", "exclusiveMinimum"])
def test_a_schema_beyond_every_bound_is_an_error_only_if_strict(key: str) -> None:
    schema = {"properties": {"n": {"type": "integer", key: 1e20}}}
    assert Grammar.json_schema(schema, strict=False)
    with pytest.raises(GrammarError, match=f"properties.n.{key}"):
        Grammar.json_schema(schema)


# ── patterns ─────────────────────────────────────────────────────────────────────────────────────

LOOKING = [
    r"^(?!\.)[a-z.]*$",
    r"^(?!.*\.\.)[a-z.]*$",
    r"^(?!.*ab)[abc]*$",
    r"^(?!ab)[abc]*$",
    r"^(?!abc)[abc]*$",
    r"^(?=.*b)(?=.*c)[abc]*$",
    r"^(?![abc]*$)[abcx]*$",
    r"^(?!$)[ab]*$",
    r"^(?!\d)[a-z0-9]*$",
    r"^(?!.*[.b])[abc.]*$",
    r"^(?=[a-z]{2}$)[a-c]*$",
    r"^(?=a|b)[abc]*",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
]


@pytest.mark.parametrize("pattern", LOOKING)
def test_an_expression_that_looks_ahead_takes_the_same_strings_without(pattern: str) -> None:
    patterns = readable_patterns(pattern)
    assert patterns is not None
    assert not any("(?=" in each or "(?!" in each for each in patterns)
    dice = random.Random(7)
    short = ["".join(each) for n in range(4) for each in itertools.product("abc.x1", repeat=n)]
    longer = ["".join(dice.choices("abc.-+01x", k=dice.randrange(4, 9))) for _ in range(3_000)]
    for text in (*short, *longer):
        assert bool(re.search(pattern, text)) == all(re.search(each, text) for each in patterns), text


@pytest.mark.parametrize(
    "pattern",
    [r"\bto\b", r"^(a)\1$", r"^a(?=b)", r"^(?<!a)b", r"^(?!a|b)c", r"^(?!a)b|c", r"(?=a)b", r"^(?!a+)b", "^abc$"],
)
def test_any_other_expression_is_unchanged(pattern: str) -> None:
    assert readable_patterns(pattern) is None


@pytest.mark.parametrize("pattern", [r"^\bto\b$", r"^(x|y)\1$", r"^a(?<=a)b", "a^b", "^[^]$", "(a"])
def test_an_unreadable_expression_is_left_out_with_one_warning(pattern: str, caplog: pytest.LogCaptureFixture) -> None:
    to = {"type": "string", "pattern": pattern, "maxLength": 6, "description": f"where to ({len(pattern)})"}
    schema = {"type": "object", "properties": {"to": to}, "required": ["to"], "description": pattern}
    with caplog.at_level(logging.WARNING):
        assert is_value(schema, '{"to": "Ulm"}')
        assert not is_value(schema, '{"to": "Reykjavik"}'), "its length is still limited"
    [text] = [record.getMessage() for record in caplog.records]
    assert "pattern of a schema: left out" in text
    assert "to" not in text.split(), "a log holds no names of a client's fields"
    with pytest.raises(GrammarError, match=r"at properties\.to\.pattern: .*(regular expression|look)") as error:
        Grammar.json_schema(schema, strict=True)
    assert error.value.field == "properties.to.pattern"


def test_a_hostile_number_of_expressions_stays_within_the_search_limit() -> None:
    parts = {f"p{n}": {"type": "string", "pattern": rf"^\b[a-z]{{{n}}}(x|y)*$"} for n in range(2_000)}
    began = time.thread_time()
    with pytest.raises(GrammarError):
        Grammar.json_schema({"type": "object", "properties": parts})
    assert time.thread_time() - began < 5


# ── what is wrong is named ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("wrong", "field", "says"),
    [
        ({"$ref": "#/$defs/Gone"}, "properties.where", "Gone"),
        ({"$ref": "https://example.org/x.json"}, "properties.where", "example.org"),
        ({"type": "strin"}, "properties.where", "strin"),
        (
            {"type": "integer", "minimum": 3, "maximum": 2},
            "properties.where",
            "greater",
        ),
        ({"anyOf": [{"type": "string"}, {"type": "text"}]}, "properties.where.anyOf.1", "text"),
    ],
)
def test_an_error_of_a_tool_s_schema_names_the_tool_and_the_field(wrong: dict[str, Any], field: str, says: str) -> None:
    clock = Tool("clock", "", {"type": "object", "properties": {}})
    letter = Tool(
        "letter",
        "",
        {"type": "object", "properties": {"where": wrong, "text": {"type": "string"}}, "required": ["where"]},
    )
    with pytest.raises(GrammarError, match="tool 'letter'") as error:
        ToolUse([clock, letter], "any").grammar()
    assert (error.value.tool, error.value.field) == ("letter", field)
    assert says in str(error.value)
    assert "lark" not in str(error.value)


def test_tools_that_are_too_large_together_are_reported_as_tools() -> None:
    tools = [
        Tool(f"t{n}", "", {"type": "object", "properties": {f"p{k}{'x' * 90}": {} for k in range(300)}})
        for n in range(9)
    ]
    with pytest.raises(GrammarError, match="these 9 tools cannot be offered together") as error:
        ToolUse(tools, "any").grammar()
    assert "lark" not in str(error.value).lower()


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "string", "^(?!a)", "#/a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KNOWN), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(schema=st.dictionaries(st.sampled_from(KNOWN), ODD, max_size=5), strict=st.booleans())
def test_a_schema_of_any_form_is_taken_or_refused_by_name(schema: dict[str, Any], strict: bool) -> None:
    with suppress(GrammarError):
        Grammar.json_schema(schema, strict=strict)


# ── unions ───────────────────────────────────────────────────────────────────────────────────────


def union(count: int) -> dict[str, Any]:
    """A union of many objects, each with six optional properties."""
    return {
        "anyOf": [
            {"type": "object", "properties": {f"k{n}_{x}": {"type": "string"} for x in range(6)}} for n in range(count)
        ]
    }


def test_a_union_of_many_objects_is_taken_and_its_masks_are_quick() -> None:
    matcher = byte_vocabulary().matcher(Grammar.json_schema(union(280), strict=False).compiled).deep_copy()
    began = time.thread_time()
    matcher.compute_bitmask()
    assert matcher.consume_tokens(list(b'{"k17_3": "a"}'))
    assert matcher.is_accepting()
    assert time.thread_time() - began < 0.2, "about 25 ms on an idle machine"


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        (union(420), None),
        ({"type": "object", "properties": {"a": {"type": "array", "items": union(420)}}}, "properties.a.items"),
        ({"properties": {"a": {"$ref": "#/$defs/U"}}, "$defs": {"U": union(420)}}, "$defs.U"),
    ],
)
def test_a_schema_beyond_the_parsers_limit_is_refused_at_construction(
    schema: dict[str, Any], field: str | None
) -> None:
    with pytest.raises(GrammarError, match="too many alternatives in one place") as error:
        Grammar.json_schema(schema, strict=False)
    assert error.value.field == field
