"""How large a grammar may be. Checked in plain Python, before the grammar library or the members see anything of it.

Whether a Lark grammar describes any text: the library follows one that describes none without end.

`start: /a+/ start` allows "a" for ever and never an end. One step of llguidance 1.9 on it does not return.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from specfuse_shared.errors import GrammarError
from specfuse_shared.validation import is_whole_text

DEEPEST_GROUP = 100
"""Of brackets in a rule."""
_TEXT = "\0"
"""Replaces parts that are certainly text: strings, expressions, schemas, tokens of a model."""
_LITERAL = re.compile(r'//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^>\n]*>|->\s*\w+|%\w+\s*')
_LARK_RULE = re.compile(r"^[ \t]*[?!]*(\w+)[ \t]*(?:\[[^\]\n]*\])?[ \t]*(?:\.[ \t]*-?\d+)?[ \t]*:", re.MULTILINE)
_MARKS = ("*", "+", "?", "~")
_TOKEN = re.compile(r"\w+|[()\[\]|*+?]|~[ \t]*\d+(?:[ \t]*\.\.[ \t]*\d+)?|\0")


def check_has_text(source: str) -> None:
    """Raises `GrammarError` for a grammar whose rule `start` always needs itself."""
    rules = dict(_rules(_without_literals(source)))
    ways = _Ways(rules)
    for name, tokens in rules.items():
        ways.read(name, tokens)
    if "start" in rules and "start" not in ways.with_text():
        raise GrammarError(
            "this Lark grammar describes no text: its rule start always needs itself: give it an alternative without"
        )


def _without_literals(source: str) -> str:
    """The grammar with `_TEXT` for all that is text."""
    parts, at = list[str](), 0
    while match := _LITERAL.search(source, at):
        parts.append(source[at : match.start()])
        at, literal = match.end(), match[0]
        if literal.startswith("%"):
            try:
                _, at = json.JSONDecoder().raw_decode(source, at)
                parts.append(_TEXT)
            except (ValueError, RecursionError):  # a statement, such as %ignore
                end = source.find("\n", at)
                at = len(source) if end < 0 else end
        elif not literal.startswith(("//", "#", "->")):
            parts.append(_TEXT)
    return "".join([*parts, source[at:]])


def _rules(source: str) -> Iterator[tuple[str, list[str]]]:
    """Each rule and the tokens after its colon; terminals are text."""
    matches = list(_LARK_RULE.finditer(source))
    for rule, after in itertools.zip_longest(matches, matches[1:]):
        end = after.start() if after else len(source)
        if rule[1].lstrip("_")[:1].islower():
            yield rule[1], _TOKEN.findall(source, rule.end(), end)


class _Ways:
    """The ways in which rules and groups become text: each needs the rules and groups that it names."""

    def __init__(self, rules: Mapping[str, object]) -> None:
        self._rules = rules
        self._ways: list[tuple[str, set[str]]] = []
        self._groups = itertools.count()

    def read(self, name: str, tokens: Sequence[str]) -> None:
        """The alternatives of a rule."""
        opened: list[tuple[str, set[str]]] = []
        head, needs, last = name, set[str](), ""
        for token, mark in itertools.pairwise([*tokens, ""]):
            if token in ("(", "["):
                opened.append((head, needs))
                head, needs = f"({next(self._groups)}", set()
                if len(opened) > DEEPEST_GROUP:
                    raise GrammarError(f"this Lark grammar has more than {DEEPEST_GROUP} brackets within each other")
                if token == "[":
                    self._ways.append((head, set()))
            elif token == "|":
                self._ways.append((head, needs))
                needs = set()
            elif token in (")", "]") and opened:
                self._ways.append((head, needs))
                last = head
                head, needs = opened.pop()
            else:
                last = token
            if token[:1] in _MARKS or token in ("(", "[", "|"):
                continue
            if last in self._rules or last.startswith("("):
                needs |= set() if _may_be_none(mark) else {last}
        self._ways += [(head, needs), *opened]

    def with_text(self) -> set[str]:
        """Which rules and groups have a way whose needs are all met, in time linear in the grammar."""
        missing = [len(needs) for _, needs in self._ways]
        users: dict[str, list[int]] = defaultdict(list)
        for number, (_, needs) in enumerate(self._ways):
            for need in needs:
                users[need].append(number)
        heads: set[str] = set()
        ready = [head for head, needs in self._ways if not needs]
        while ready:
            if (name := ready.pop()) in heads:
                continue
            heads.add(name)
            for number in users[name]:
                missing[number] -= 1
                if not missing[number]:
                    ready.append(self._ways[number][0])
        return heads


def _may_be_none(mark: str) -> bool:
    """Whether the item before this mark is optional."""
    return mark in ("*", "?") or re.match(r"~\s*0+\b", mark) is not None


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
    """The schema after a `%json` of a Lark grammar."""
    try:
        return json.JSONDecoder().raw_decode(source, start)[0]
    except (ValueError, RecursionError):
        raise GrammarError("no JSON follows %json in this Lark grammar: write the schema directly after it") from None


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
                    f"the numbers after multipleOf in this schema have a common multiple above {LARGEST_MULTIPLE}: "
                    "give smaller ones, or leave them out"
                )
        if depth > DEEPEST_NESTING:
            raise GrammarError(f"this schema is nested more than {DEEPEST_NESTING} levels deep: flatten it")
        if values > MOST_VALUES:
            raise GrammarError(f"this schema has more than {MOST_VALUES} values: ask for less at once")


def target_of(reference: str, schema: Mapping[str, Any]) -> Any:
    """The target of a reference within the schema ("#/$defs/Person"); None if there is none."""
    node: Any = schema
    for key in reference.removeprefix("#").split("/")[1:]:
        node = node.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node if reference.startswith("#") else None


def _without_zeros(number: Any) -> int:
    """The digits of a number, without zeros at its end; 1 if it is no finite number."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return 1
    if isinstance(number, float) and not math.isfinite(number):
        return 1
    return int("".join(map(str, Decimal(str(number)).normalize().as_tuple().digits))) or 1


def _walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Every value inside of a value, with its depth; without recursion, which a deep one would exhaust."""
    stack = [(value, 0)]
    while stack:
        value, depth = stack.pop()
        yield value, depth
        if isinstance(value, Mapping):
            stack += ((each, depth + 1) for each in value.values())
        elif isinstance(value, (list, tuple)):
            stack += ((each, depth + 1) for each in value)
