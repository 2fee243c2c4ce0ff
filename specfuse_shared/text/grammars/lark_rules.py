"""Whether a Lark grammar describes any text: the library follows one that describes none without end.

`start: /a+/ start` allows "a" for ever and never an end. One step of llguidance 1.9 on it does not return.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from specfuse_shared.errors import GrammarError

DEEPEST_GROUP = 100
"""Of brackets in a rule."""
_TEXT = "\0"
"""Stands for what is text for sure: strings, expressions, schemas, tokens of a model."""
_LITERAL = re.compile(r'//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^>\n]*>|->\s*\w+|%\w+\s*')
_RULE = re.compile(r"^[ \t]*[?!]*(\w+)[ \t]*(?:\[[^\]\n]*\])?[ \t]*(?:\.[ \t]*-?\d+)?[ \t]*:", re.MULTILINE)
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
    while found := _LITERAL.search(source, at):
        parts.append(source[at : found.start()])
        at, said = found.end(), found[0]
        if said.startswith("%"):
            try:
                _, at = json.JSONDecoder().raw_decode(source, at)
                parts.append(_TEXT)
            except (ValueError, RecursionError):  # a statement, such as %ignore
                end = source.find("\n", at)
                at = len(source) if end < 0 else end
        elif not said.startswith(("//", "#", "->")):
            parts.append(_TEXT)
    return "".join([*parts, source[at:]])


def _rules(source: str) -> Iterator[tuple[str, list[str]]]:
    """Each rule and the tokens behind its colon; terminals are text."""
    found = list(_RULE.finditer(source))
    for rule, after in itertools.zip_longest(found, found[1:]):
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
        found: set[str] = set()
        left = [head for head, needs in self._ways if not needs]
        while left:
            if (name := left.pop()) in found:
                continue
            found.add(name)
            for number in users[name]:
                missing[number] -= 1
                if not missing[number]:
                    left.append(self._ways[number][0])
        return found


def _may_be_none(mark: str) -> bool:
    """Whether what stands in front of this mark may be left out."""
    return mark in ("*", "?") or re.match(r"~\s*0+\b", mark) is not None
