"""Grammars: a JSON schema, a regular expression, a choice of strings, or a Lark grammar.

A `Grammar` is plain data, checked when it is made. `specfuse_shared.text.grammars.constraint` holds answers to it; the
grammars themselves are llguidance's, which the "grammar" extra brings (`specfuse_shared.text.grammars.guidance`).

Instructions for members about a JSON schema: names, descriptions and formats.

Types and choices are left to the grammar, which offers nothing else when it comes to them: small models that read a
list of choices beforehand copy its first (docs/experiments.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, Self

from specfuse_shared.errors import GrammarError
from specfuse_shared.messages import Message
from specfuse_shared.text.grammars.bounds import check_schema, check_source, target_of
from specfuse_shared.text.grammars.guidance import guidance, problem_of
from specfuse_shared.text.grammars.json_schema import plain_problem, styled, written
from specfuse_shared.validation import parsed_json

GrammarKind = Literal["json_schema", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language that an answer must belong to; made by the class methods below.

    `source` is the schema as JSON, the expression, the strings as JSON, or the Lark text. Raises `GrammarError`
    if it is malformed, or if a strict schema uses a keyword that no grammar can enforce.
    """

    kind: GrammarKind
    source: str
    strict: bool = True

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, *, strict: bool = True) -> Self:
        """JSON values of a schema, written on one line, with properties in the schema's order.

        Objects have only the properties that the schema names, unless it says otherwise.

        Args:
            schema: A JSON schema, as a mapping or as JSON.
            strict: Refuse keywords that cannot be enforced (`not`, `uniqueItems`, `contains`, …); otherwise ignore
                them.

        Returns:
            The grammar.

        Raises:
            GrammarError: The schema is invalid or cannot be enforced.

        Example:
            ```python
            from specfuse_shared import Grammar, SamplingParams

            schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
            params = SamplingParams(max_tokens=40, grammar=Grammar.json_schema(schema))
            print(engine.generate("The capital of France as JSON?", params).text)
            ```
        """
        if not isinstance(schema, (str, Mapping)):
            raise GrammarError(f"a JSON schema is a mapping or JSON text, not {type(schema).__name__}")
        return cls("json_schema", schema if isinstance(schema, str) else written(schema), strict)

    @classmethod
    def json(cls) -> Self:
        """Any JSON object.

        Returns:
            The grammar.

        Example:
            ```python
            from specfuse_shared import Grammar

            print(Grammar.json().kind)
            ```
        """
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Texts that match the whole expression.

        Args:
            pattern: A regular expression in the syntax of Rust's regex crate, without look-around.

        Returns:
            The grammar.

        Raises:
            GrammarError: The expression is invalid.

        Example:
            ```python
            from specfuse_shared import Grammar, SamplingParams

            params = SamplingParams(max_tokens=8, grammar=Grammar.regex("[0-9]{4}"))
            print(engine.generate("In which year did the Titanic sink?", params).text)
            ```
        """
        return cls("regex", pattern)

    @classmethod
    def choice(cls, options: Sequence[str]) -> Self:
        """One of several strings.

        Args:
            options: The allowed answers.

        Returns:
            The grammar.

        Example:
            ```python
            from specfuse_shared import Grammar, SamplingParams

            params = SamplingParams(max_tokens=4, grammar=Grammar.choice(["yes", "no"]))
            print(engine.generate("Is the sky blue?", params).text)
            ```
        """
        return cls("choice", _dumps(_checked_options(options)))

    @classmethod
    def lark(cls, source: str) -> Self:
        """A context-free grammar.

        Args:
            source: The grammar in llguidance's dialect of Lark; its first rule is `start`.

        Returns:
            The grammar.

        Raises:
            GrammarError: The grammar is invalid.

        Example:
            ```python
            from specfuse_shared import Grammar

            print(Grammar.lark('start: "a" "b"+').kind)
            ```
        """
        return cls("lark", source)

    def __post_init__(self) -> None:
        guidance()
        check_source(self.kind, self.source)
        try:
            compiled = self.compiled
        except GrammarError as error:
            raise GrammarError(f"this {self.kind} grammar cannot be used: {error}", field=error.field) from None
        if self.kind != "json_schema" and (problem := problem_of(compiled)):  # a schema is tried when it is styled
            raise GrammarError(f"this {self.kind} grammar cannot be used: {plain_problem(problem)}")

    @property
    def compiled(self) -> str:
        """The grammar as llguidance takes it."""
        return _compiled(self)

    def _part(self) -> dict[str, Any]:
        if self.kind == "json_schema":
            return {"json_schema": styled(self.source, self.strict)}
        if self.kind == "regex":
            return dict(json.loads(guidance().LLMatcher.grammar_from_regex(self.source))["grammars"][0])
        if self.kind == "choice":
            return {"lark_grammar": "start: " + " | ".join(_dumps(o) for o in self._options())}
        return {"lark_grammar": self.source}

    def _options(self) -> list[str]:
        """The strings of a choice. Raises `GrammarError` for a source that is none."""
        try:
            options = parsed_json(self.source)
        except ValueError:
            options = None
        return _checked_options(options if isinstance(options, list) else (), "a choice needs {}, as JSON")

    def rest_after(self, text: str) -> str | None:
        """A Lark grammar of the text that may follow a beginning of a value, for a server that checks grammars itself.

        Args:
            text: The beginning.

        Returns:
            The grammar, or None if it cannot be written. JSON has none, because libraries format values differently.

        Example:
            ```python
            from specfuse_shared import Grammar

            print(Grammar.choice(["north", "northeast"]).rest_after("north"))
            ```
        """
        if self.kind == "choice":
            rest = [o.removeprefix(text) for o in self._options() if o.startswith(text)]
            return "start: " + " | ".join(map(_dumps, rest)) if rest else None
        if text or self.kind == "json_schema":
            return None
        return str(self._part()["lark_grammar"])

    def as_rule(self) -> str:
        """The grammar as a part of a larger one.

        Returns:
            The right-hand side of a Lark rule.

        Raises:
            GrammarError: This is a Lark grammar, which has rules of its own names.

        Example:
            ```python
            from specfuse_shared import Grammar

            print(Grammar.choice(["yes", "no"]).as_rule())
            ```
        """
        if self.kind == "json_schema":
            return f"%json {_dumps(styled(self.source, self.strict))}"
        if self.kind == "choice":
            return " | ".join(_dumps(o) for o in self._options())
        if self.kind == "regex":
            return str(self._part()["lark_grammar"]).removeprefix("start:").strip()
        raise GrammarError("a Lark grammar cannot be combined with tools: give a schema, a choice or an expression")


@lru_cache(maxsize=32)
def _compiled(grammar: Grammar) -> str:
    return _dumps({"grammars": [grammar._part()]})


def _checked_options(options: Sequence[str], complaint: str = "a choice needs {}") -> list[str]:
    if isinstance(options, str) or not options or not all(isinstance(o, str) and o for o in options):
        raise GrammarError(complaint.format("a list of non-empty strings"))
    return list(options)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


MOST_FIELDS = 500
"""Maximum number of fields in the instruction; the grammar enforces all of them."""
_DESCRIBING = ("description", "format")
_BRANCHES = ("allOf", "anyOf", "oneOf", "prefixItems")
_INSIDE = ("items", "additionalProperties")

_KEYS_ASKED_FOR = "Answer with a JSON object that has the keys that were asked for."


def schema_request(schema: Mapping[str, Any]) -> Message | None:
    """Asks for a value of the schema, its fields a line each; None for a schema that names and describes nothing.

    Of an object without fields (OpenAI's JSON mode) the user has said which, and small models do better reminded.
    Raises `GrammarError` for a schema that is too large.
    """
    check_schema(schema)
    reader = _Reader(schema)
    fields, about = list(islice(reader.fields(), MOST_FIELDS)), reader.about(schema)
    if not fields and not about:
        is_open = schema.get("type") == "object" and "properties" not in schema
        return Message("system", _KEYS_ASKED_FOR) if is_open else None
    instruction = "Answer in JSON with these fields:" if fields else "Answer in JSON."
    return Message("system", "\n".join([*([about] if about else []), instruction, *fields]))


class _Reader:
    """Reads one schema. Every reference is opened once, where it comes first, and every part is described once."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._opened: set[str] = set()
        self._abouts: dict[int, str] = {}

    def fields(self) -> Iterator[str]:
        """The fields of all objects that a value may be or hold, a line each."""
        stack: list[tuple[str | None, Any, str]] = [(None, self._schema, "")]
        while stack:
            name, schema, indent = stack.pop()
            if name is not None:
                about = self.about(schema)
                yield f"{indent}- {name}: {about}" if about else f"{indent}- {name}"
                indent += "  "
            if isinstance(schema, Mapping):
                stack += reversed([(key, part, indent) for key, part in self._inside(schema)])

    def _inside(self, schema: Mapping[str, Any]) -> Iterator[tuple[str | None, Any]]:
        """The parts of a schema, in order; those that are fields with their names."""
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self._opened:
            self._opened.add(reference)
            yield None, target_of(reference, self._schema)
        properties = schema.get("properties")
        yield from properties.items() if isinstance(properties, Mapping) else ()
        for part in (*_branches(schema), *(schema.get(key) for key in _INSIDE)):
            yield None, part

    def about(self, schema: Any) -> str:
        """A schema's description and format, else the descriptions of its references and branches (`date | None`)."""
        if not isinstance(schema, Mapping):
            return ""
        if id(schema) not in self._abouts:
            self._abouts[id(schema)] = self._described(schema)
        return self._abouts[id(schema)]

    def _described(self, schema: Mapping[str, Any]) -> str:
        if descriptions := [str(schema[key]) for key in _DESCRIBING if schema.get(key)]:
            return ", ".join(descriptions)
        reference = schema.get("$ref")
        targets = [target_of(reference, self._schema)] if isinstance(reference, str) else []
        plain = [part for part in (*targets, *_branches(schema)) if isinstance(part, Mapping) and "$ref" not in part]
        return ", ".join(dict.fromkeys(filter(None, map(self.about, plain))))


def _branches(schema: Mapping[str, Any]) -> list[Any]:
    """The alternatives or parts of a value."""
    return [part for key in _BRANCHES if isinstance(schema.get(key), list) for part in schema[key]]
