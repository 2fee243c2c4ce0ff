"""How large a grammar may be. Checked in plain Python, before the grammar library or the members see anything of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from specfuse_shared.errors import GrammarError
from specfuse_shared.text.grammars.lark_rules import check_has_text
from specfuse_shared.validation import is_whole_text

MOST_CHARACTERS = 256 * 1024
"""Of one grammar: a schema as JSON, an expression, a list of choices, or a Lark text."""
MOST_RULES = 2_000
"""Of a Lark grammar."""
MOST_VALUES = 10_000
"""Objects, lists and scalars of a schema."""
DEEPEST_NESTING = 64
"""Of objects and lists in a schema."""
LARGEST_MULTIPLE = 65_536
"""Least common multiple of a schema's `multipleOf`s, without their zeros: the compiler makes a state for each
remainder, and 1,000,003 takes it 6 s."""

_RULE = re.compile(r"^[ \t]*[?!]*\w[^\n:]*:", re.MULTILINE)
_ATTRIBUTES = re.compile(r"^\s*[?!]*\w+\s*\[(?!\s*lazy\s*\]\s*:)", re.MULTILINE)
_EMBEDDED = re.compile(r"%json\s*")
_RAW_BYTES = re.compile(r"^\s*%llguidance\s*\{[^}]*allow_invalid_utf8", re.MULTILINE)


def check_source(kind: str, source: str) -> None:
    """Raises `GrammarError` for a text that is too long, or that has too many rules."""
    if len(source) > MOST_CHARACTERS:
        raise GrammarError(f"this {kind} grammar has {len(source)} characters, and {MOST_CHARACTERS} is the most")
    if not is_whole_text(source):
        raise GrammarError(f"this {kind} grammar holds half a character (a lone surrogate): write it whole")
    if kind != "lark":
        return
    rules = sum(1 for _ in _RULE.finditer(source))
    if rules > MOST_RULES:
        raise GrammarError(f"this Lark grammar has {rules} rules, and {MOST_RULES} is the most")
    if _ATTRIBUTES.search(source):
        raise GrammarError(
            "of the attributes of a Lark rule only [lazy] is supported: others count tokens of one model"
        )
    if _RAW_BYTES.search(source):
        raise GrammarError("allow_invalid_utf8 is not supported: an answer is text, so a grammar describes text")
    for match in _EMBEDDED.finditer(source):
        check_schema(_embedded(source, match.end()))
    check_has_text(source)


def _embedded(source: str, start: int) -> Any:
    """The schema behind a `%json` of a Lark grammar."""
    try:
        return json.JSONDecoder().raw_decode(source, start)[0]
    except (ValueError, RecursionError):
        raise GrammarError(
            "behind %json of this Lark grammar stands no JSON: write the schema right behind it"
        ) from None


def check_schema(schema: Any) -> None:
    """Raises `GrammarError` for a schema with too many values, too deep a nesting or too large a `multipleOf`.

    References lead from one to the next at most as often as there are values, for which the compiler's stack is made.
    """
    multiple = 1
    for values, (value, depth) in enumerate(_walk(schema), 1):
        if isinstance(value, Mapping) and "multipleOf" in value:
            multiple = math.lcm(multiple, _without_zeros(value["multipleOf"]))
            if multiple > LARGEST_MULTIPLE:
                raise GrammarError(
                    f"the numbers behind multipleOf in this schema have a common multiple above {LARGEST_MULTIPLE}: "
                    "give smaller ones, or leave them out"
                )
        if depth > DEEPEST_NESTING:
            raise GrammarError(f"this schema is nested more than {DEEPEST_NESTING} levels deep: flatten it")
        if values > MOST_VALUES:
            raise GrammarError(f"this schema has more than {MOST_VALUES} values: ask for less at once")


def target_of(reference: str, schema: Mapping[str, Any]) -> Any:
    """What a reference within the schema names ("#/$defs/Person"); None if it names nothing."""
    found: Any = schema
    for key in reference.removeprefix("#").split("/")[1:]:
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if reference.startswith("#") else None


def _without_zeros(number: Any) -> int:
    """The digits of a number, without the zeros at its end; 1 for what is no finite number."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return 1
    if isinstance(number, float) and not math.isfinite(number):
        return 1
    return int("".join(map(str, Decimal(str(number)).normalize().as_tuple().digits))) or 1


def _walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Every value inside of a value, with its depth; without recursion, which a deep one would exhaust."""
    left = [(value, 0)]
    while left:
        value, depth = left.pop()
        yield value, depth
        if isinstance(value, Mapping):
            left += ((each, depth + 1) for each in value.values())
        elif isinstance(value, (list, tuple)):
            left += ((each, depth + 1) for each in value)
