"""Hostile input at random: schemas, expressions, choices, Lark grammars and request bodies, many nearly right."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "c", "x-1", "", "ü", "$ref", "a/b", "~", "\x00"])
TEXTS = st.text(max_size=12) | st.sampled_from(["{{ 7 * 7 }}", "<|im_end|>", "</s>", "\ud800", "\\ud800", "🎉" * 5])
NUMBERS = (
    st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.sampled_from([0, -1, 2**63, 10**400, 99991])
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=8
)
ATOMS = [*"abxz019.", r"\d", r"\w", r"\s", r"\p{L}", "[a-z]", "[^a]", "(?i:x)", "é", r"\x00", r"(?-u)\xff"]
PATTERNS = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{3}", "{0,40}", "{900}", "{100000}", "*?"])).map("".join),
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=4).map("|".join),
        inner.map(lambda p: f"({p})"),
        inner.map(lambda p: f"(?={p})"),
    ),
    max_leaves=10,
)
BROKEN = st.text(alphabet="()[]{}|*+?\\^$.-,:/\"'ab01 \n%&~", max_size=40)
POINTERS = st.sampled_from(
    ["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/none", "https://example.org/x", "", "#a"]
)


@st.composite
def schemas(draw: st.DrawFn, depth: int = 3) -> Any:
    """A JSON schema, or something like it."""
    schema: dict[str, Any] = {}
    inner = schemas(depth - 1) if depth else st.just({})
    keywords = {
        "type": st.sampled_from(["object", "array", "string", "number", "integer", "boolean", "null", "wat", 5])
        | st.lists(st.sampled_from(["string", "null", "integer"]), max_size=3),
        "properties": st.dictionaries(NAMES, inner, max_size=4),
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        "additionalProperties": st.booleans() | inner,
        "required": st.lists(NAMES, max_size=3) | SCALARS,
        "items": inner | st.lists(inner, max_size=2),
        "prefixItems": st.lists(inner, max_size=3),
        "anyOf": st.lists(inner, max_size=3),
        "oneOf": st.lists(inner, max_size=3),
        "allOf": st.lists(inner, max_size=3),
        "not": inner,
        "enum": st.lists(VALUES, max_size=5),
        "const": VALUES,
        "pattern": PATTERNS | BROKEN,
        "format": st.sampled_from(["date", "time", "date-time", "email", "uuid", "ipv4", "hostname", "regex", "wat"]),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties"), NUMBERS),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), NUMBERS),
        "$ref": POINTERS,
        "$defs": st.fixed_dictionaries({"a": inner, "b": inner}),
        "description": TEXTS,
        "uniqueItems": st.booleans(),
        "x-guidance": VALUES,
    }
    for name in draw(st.lists(st.sampled_from(sorted(keywords)), max_size=5, unique=True)):
        schema[name] = draw(keywords[name])
    return draw(st.sampled_from([schema] * 9 + [True, [], "x"]))


LITERALS = ['"a"', '"b"', '"ab"', '""', '"\\u00e9"', '"<tool_call>"', '"x"i', '"a".."z"']
SPECIAL = ['%json {"type": "object"}', "<[1]>", "<|im_end|>", '%regex { "substring_chars": "abc" }']
OPTIONS = ["", "", "[lazy]", "[max_tokens=3]", '[stop="x"]']
DIRECTIVES = ["", "", "%ignore / /", "%llguidance {}", '%llguidance {"no_forcing": true}', "%import common.INT"]


@st.composite
def lark(draw: st.DrawFn) -> str:
    """A Lark grammar, or something like it."""
    rules = ["start", *draw(st.lists(st.sampled_from(["a", "b", "c"]), max_size=3, unique=True))]
    terminals = draw(st.lists(st.sampled_from(["T", "U"]), max_size=2, unique=True))
    token = st.sampled_from(LITERALS) | PATTERNS.map(lambda p: "/" + p.replace("/", r"\/") + "/")
    atom = st.sampled_from([*rules, *terminals, *SPECIAL]) | token
    lines = [f"{rule}{draw(st.sampled_from(OPTIONS))}: {draw(st.recursive(atom, _several))}" for rule in rules]
    lines += [f"{name}: {draw(st.recursive(token, _several))}" for name in terminals]
    lines.append(draw(st.sampled_from(DIRECTIVES)))
    return "\n".join(draw(st.permutations(lines)))


def _several(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeats = st.sampled_from(["*", "+", "?", "{3}", "{1,9}", "~2..5"])
    return st.one_of(
        st.lists(inner, min_size=1, max_size=4).map(" ".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: "(" + " | ".join(parts) + ")"),
        st.tuples(inner, repeats).map(lambda parts: f"({parts[0]}){parts[1]}"),
    )


def grammars() -> st.SearchStrategy[dict[str, Any]]:
    """Kind and source of a grammar, as a client sends them."""
    written = schemas().map(lambda schema: json.dumps(schema, ensure_ascii=False))
    deep = st.integers(1, 3000).map(lambda n: '{"items":' * n + "{}" + "}" * n)
    chained = st.integers(1, 400).map(chain)
    choices = st.lists(TEXTS, max_size=30).map(lambda texts: json.dumps(texts, ensure_ascii=False)) | VALUES.map(
        json.dumps
    )
    return st.one_of(
        (written | deep | chained | BROKEN).map(lambda source: {"kind": "json_schema", "source": source}),
        written.map(lambda source: {"kind": "json_schema", "source": source, "strict": False}),
        (PATTERNS | BROKEN).map(lambda source: {"kind": "regex", "source": source}),
        choices.map(lambda source: {"kind": "choice", "source": source}),
        (lark() | BROKEN.map(lambda text: f"start: {text}")).map(lambda source: {"kind": "lark", "source": source}),
    )


ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer", "function", "wizard"])
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "refusal", "image_url"])}, optional={"text": TEXTS | VALUES}
)
ARGUMENTS = (
    st.sampled_from(["{}", '{"a": 1}', "", "[" * 9000, '{"a":' + "9" * 5000 + "}", '{"a":"\\ud800"}', "NaN"]) | TEXTS
)
CALLS = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": TEXTS, "arguments": ARGUMENTS | VALUES})},
    optional={"id": TEXTS, "index": st.integers(0, 3)},
)
MESSAGES = st.fixed_dictionaries(
    {"role": ROLES, "content": TEXTS | st.lists(PARTS, max_size=3) | VALUES},
    optional={"name": TEXTS, "tool_calls": st.lists(CALLS, max_size=2), "tool_call_id": TEXTS, "refusal": VALUES},
)
TOOLS = st.fixed_dictionaries(
    {"type": st.just("function") | TEXTS, "function": st.fixed_dictionaries({"name": TEXTS, "parameters": schemas()})}
)
FORMATS = st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "wat"}]) | schemas().map(
    lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
)
CHOICES = st.sampled_from(["auto", "none", "required", "wat", {"type": "function", "function": {"name": "a"}}])


ITEMS = st.one_of(
    st.fixed_dictionaries({"role": ROLES, "content": TEXTS | VALUES}, optional={"id": TEXTS, "type": TEXTS}),
    st.fixed_dictionaries(
        {"type": st.just("function_call"), "call_id": TEXTS, "name": TEXTS, "arguments": ARGUMENTS | VALUES}
    ),
    st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": TEXTS, "output": TEXTS | VALUES}),
    st.fixed_dictionaries({"type": st.sampled_from(["reasoning", "item_reference", "wat"])}, optional={"id": TEXTS}),
)
FLAT_TOOLS = TOOLS.map(lambda tool: {"type": tool["type"], **tool["function"]})
FLAT_FORMATS = FORMATS.map(lambda reported: {"format": {"type": reported["type"], **reported.get("json_schema", {})}})


def _sampling() -> dict[str, st.SearchStrategy[Any]]:
    """Fields of every body."""
    return {
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0, 1),
        "seed": st.integers(-(2**64), 2**64),
        "stop": TEXTS | st.lists(TEXTS, max_size=6) | st.integers(1, 300).map(lambda n: ["x" * n] * n),
        "n": st.integers(-1, 9),
        "max_tokens": st.integers(-1, 12),
        "min_tokens": st.integers(-1, 5),
        "ignore_eos": st.booleans(),
        "stream": st.booleans(),
        "stream_options": st.just({"include_usage": True}) | VALUES,
        "grammar": grammars(),
        "tool_choice": CHOICES,
        "parallel_tool_calls": st.booleans(),
        "specfuse": st.fixed_dictionaries(
            {}, optional={"events": st.booleans(), "report": st.booleans(), "ledger": TEXTS}
        ),
    }


def bodies() -> st.SearchStrategy[dict[str, Any]]:
    """The body of a chat; most of it may be right, and it is soon over."""
    chat_fields = {
        "logprobs": st.booleans(),
        "top_logprobs": st.integers(-1, 21),
        "tools": st.lists(TOOLS, max_size=3),
        "response_format": FORMATS,
    }
    fields = {name: strategy | VALUES for name, strategy in {**_sampling(), **chat_fields}.items()}
    return st.fixed_dictionaries({"messages": st.lists(MESSAGES, max_size=4) | VALUES}, optional=fields)


def response_bodies() -> st.SearchStrategy[dict[str, Any]]:
    """The same for the Responses API."""
    response_fields = {
        "instructions": TEXTS,
        "max_output_tokens": st.integers(-1, 12),
        "tools": st.lists(FLAT_TOOLS, max_size=3),
        "text": FLAT_FORMATS,
        "include": st.lists(st.just("message.output_text.logprobs") | TEXTS, max_size=2),
        "reasoning": st.fixed_dictionaries({}, optional={"summary": TEXTS, "effort": VALUES}),
        "metadata": st.dictionaries(NAMES, TEXTS, max_size=3),
        "store": st.booleans(),
        "top_logprobs": st.integers(-1, 21),
    }
    fields = {name: strategy | VALUES for name, strategy in {**_sampling(), **response_fields}.items()}
    return st.fixed_dictionaries({"input": TEXTS | st.lists(ITEMS, max_size=4) | VALUES}, optional=fields)


def chain(length: int) -> str:
    """A schema of `length` definitions, each of which refers to the next."""
    defs: dict[str, Any] = {f"a{n}": {"properties": {"x": {"$ref": f"#/$defs/a{n + 1}"}}} for n in range(length)}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": {**defs, f"a{length}": {"type": "string"}}})


def rules(length: int) -> str:
    """A Lark grammar of `length` rules, each of which refers to the next."""
    return "\n".join(["start: r0", *(f"r{n}: r{n + 1}" for n in range(length)), f'r{length}: "a"'])
