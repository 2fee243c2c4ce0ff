"""What an answer may look like: a JSON schema, a regular expression, a choice of strings, or a Lark grammar.

A `Grammar` is plain data, checked when it is made. `specfuse_shared.text.grammars.constraint` holds answers to it; the
grammars themselves are llguidance's, which the "grammar" extra brings (`specfuse_shared.text.grammars.guidance`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Self

from specfuse_shared.errors import GrammarError
from specfuse_shared.text.grammars.bounds import check_source
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
        """JSON values of a schema, written on one line; properties come in the schema's order.

        Objects have only the properties that the schema names, unless it says otherwise. A keyword that cannot
        be enforced (`not`, `uniqueItems`, `contains`, …) is refused if `strict`, else ignored.
        """
        if not isinstance(schema, (str, Mapping)):
            raise GrammarError(f"a JSON schema is a mapping or JSON text, not {type(schema).__name__}")
        return cls("json_schema", schema if isinstance(schema, str) else written(schema), strict)

    @classmethod
    def json(cls) -> Self:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Texts that match the whole expression (syntax of Rust's regex crate, without look-around)."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, options: Sequence[str]) -> Self:
        """One of these strings."""
        return cls("choice", _dumps(_checked_options(options)))

    @classmethod
    def lark(cls, source: str) -> Self:
        """A context-free grammar in llguidance's dialect of Lark; its first rule is `start`."""
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

    def behind(self, text: str) -> str | None:
        """A Lark grammar of what may follow `text`, where that can be written down as one; None else.

        JSON cannot: other libraries write its values in another style.
        """
        if self.kind == "choice":
            rest = [o.removeprefix(text) for o in self._options() if o.startswith(text)]
            return "start: " + " | ".join(map(_dumps, rest)) if rest else None
        if text or self.kind == "json_schema":
            return None
        return str(self._part()["lark_grammar"])

    def as_rule(self) -> str:
        """The right-hand side of a Lark rule for this grammar; a Lark grammar has none."""
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
