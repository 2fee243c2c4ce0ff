"""Tool calls as text: their syntax, their grammar, and a reader for streams.

A call is `<tool_call>{"name": "…", "arguments": {…}}</tool_call>`. Each call has its own line, and text may come
before the first. All members use this syntax, since they write one shared answer.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specfuse_shared.errors import ConfigError, GrammarError, UnfinishedValueError
from specfuse_shared.messages import CUT_MARK, Tool, ToolCall
from specfuse_shared.text.grammars.grammar import Grammar
from specfuse_shared.text.grammars.json_schema import styled
from specfuse_shared.text.stops import partial_stop
from specfuse_shared.validation import check, check_choice, parsed_json

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')
_TAIL = "}" + CALL_CLOSE

_CHOICES = ("auto", "any", "required", "none")
"""Of tools, where none is named."""

CALL_SYNTAX = (
    'To call a tool, write exactly <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call> with the name of '
    "the tool and a JSON object of its arguments. Text that calls no tool is the answer to the user."
)


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as an answer writes it."""
    return f"{CALL_OPEN}{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}{CALL_CLOSE}"


def plain_description(functions: Sequence[Mapping[str, Any]]) -> str:
    """Tools for a member whose chat template has no place for them: one JSON object a line, then the call syntax."""
    lines = [json.dumps(function, ensure_ascii=False) for function in functions]
    return "\n".join(["You can use these tools:", *lines, CALL_SYNTAX])


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one call, and the allowed answers. Raises `ConfigError` for invalid combinations.

    `choice`: "auto" (the ensemble decides), "any", "none" or a tool's name. `parallel`: one answer may hold several
    calls. `otherwise`: the form of an answer without calls; None: any text, also before a call.
    """

    tools: Sequence[Tool] = ()
    choice: str = "auto"
    parallel: bool = False
    otherwise: Grammar | None = None

    def __post_init__(self) -> None:
        tools = tuple(self.tools)
        object.__setattr__(self, "tools", tools)
        check(all(isinstance(t, Tool) for t in tools), "tools must hold Tool objects: use Tool.from_dict")
        names = [tool.name for tool in tools]
        check(len(set(names)) == len(names), f"tools holds two tools of one name: {names}")
        for name in names:
            check(name not in _CHOICES, f"a tool cannot be called {name!r}, which is a tool_choice: rename it")
        if self.choice in ("any", "required") and not names:
            raise ConfigError(
                'tool_choice "required" (or "any") needs tools, and none are given: give tools, or "auto"'
            )
        check_choice("tool_choice", self.choice, ("auto", "none", *(["any"] if names else []), *names))

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the choice leaves: all of them, none, or the named one."""
        if self.choice in ("auto", "any"):
            return tuple(self.tools)
        return tuple(tool for tool in self.tools if tool.name == self.choice)

    @property
    def leaves_text(self) -> bool:
        """Whether the answer may also be free text."""
        return bool(self.offered) and self.choice == "auto" and self.otherwise is None

    def grammar(self) -> Grammar | None:
        """The grammar of the whole answer: `otherwise`, or the calls that it may contain instead.

        Raises `GrammarError` for the schema of a tool that cannot be enforced.
        """
        if not self.offered:
            return self.otherwise
        return call_grammar(self.offered, self.choice, self.parallel, self.otherwise)

    def reader(self) -> CallReader | None:
        """The reader of the answer; None if it cannot contain calls."""
        return CallReader(anywhere=self.otherwise is None) if self.offered else None

    def opened_by(self, text: str, after: str) -> int:
        """Bytes of the tag, or of its beginning, with which `text` opens the answer's first call; 0: it opens none.

        `after`: the answer so far.
        """
        opens = text.startswith(CALL_OPEN) or (text and CALL_OPEN.startswith(text))
        first = CALL_OPEN not in after if self.otherwise is None else not after
        return min(len(text), len(CALL_OPEN)) if self.offered and opens and first else 0

    def begins(self, text: str) -> bool:
        """Whether an answer under `grammar` that is not complete is calls so far, and no other value."""
        has_begun = CALL_OPEN in text if self.otherwise is None else text.startswith(CALL_OPEN)
        return bool(self.offered) and (has_begun or CALL_OPEN.startswith(text))


def call_grammar(offered: Sequence[Tool], choice: str, parallel: bool, otherwise: Grammar | None) -> Grammar:
    """Answers that call tools. With the choice "auto" they may also be text, or a value of `otherwise`.

    `parallel`: several calls may follow one another. Raises `GrammarError` for a schema that cannot be enforced.
    """
    names = [f"call_{number}" for number in range(len(offered))]
    rules = [
        f"{name}: {_quoted(_head(tool))} %json {_schema(tool)} {_quoted(_TAIL)}"
        for name, tool in zip(names, offered, strict=True)
    ]
    rules.append(f"call: {' | '.join(names)}")
    calls = "first" + (f" ({_quoted(chr(10) + CALL_OPEN)} call)*" if parallel else "")
    if choice != "auto":
        rules += [f"start: {calls}", f"first: {_quoted(CALL_OPEN)} call"]
    elif otherwise is not None:
        rules += [f"start: {calls} | value", f"first: {_quoted(CALL_OPEN)} call", f"value: {otherwise.as_rule()}"]
    else:
        # the lazy rule ends at the first tag, so that from there on only a call is valid
        rules += [f"start: {calls} | TEXT", "first: before call", f"before[lazy]: /(?s:.*){CALL_OPEN}/"]
        rules.append(f"TEXT: /(?s:.*)/ & ~/(?s:.*){CALL_OPEN}(?s:.*)/")
    try:
        return Grammar.lark("\n".join(rules))
    except GrammarError as error:
        message = re.sub("^this lark grammar", "their grammar", str(error), flags=re.IGNORECASE)
        what = f"these {len(offered)} tools" if len(offered) > 1 else f"the tool {offered[0].name!r}"
        what += "" if otherwise is None else " and the grammar of the answer"
        together = " together" if len(offered) > 1 or otherwise is not None else ""
        raise GrammarError(f"{what} cannot be offered{together}: {message}") from None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text of the answer outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of call number `index` (from 0). `id` and `name` come with its first piece, where `arguments` is ""."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class CallReader:
    """Reads text and calls from a streamed answer. No character of a call is ever given out as text.

    `anywhere`: text may come before the first call; else the answer is calls, or all of it is text. `calls` are those
    that are complete; their arguments are the parsed JSON.
    """

    def __init__(self, *, anywhere: bool = True) -> None:
        self._anywhere = anywhere
        self._is_text = False
        self.calls: list[ToolCall] = []
        self._state: Literal["text", "between", "head", "arguments"] = "text"
        self._buffer = ""
        self._arguments = ""
        self._name = ""
        self._id = ""

    @property
    def calling(self) -> bool:
        """The answer has begun a call."""
        return self._state != "text"

    def feed(self, text: str) -> list[TextDelta | CallDelta]:
        """Take new text of the answer; give out what is certain."""
        self._buffer += text
        return [part for part in self._parts() if part != TextDelta("")]

    def finish(self, *, cut: bool = False, closing: str = "") -> list[TextDelta | CallDelta]:
        """The answer is over: give out what was held back. Raises `UnfinishedValueError` inside a call, unless `cut`.

        `cut`: `max_tokens` ended the answer. Then the last call is not among the `calls` if it is incomplete or only
        the `closing` of the answer completed it: the last piece of its arguments makes them invalid JSON for every
        parser. Half a tag of a cut answer is left out.
        """
        if not cut and self._state in ("head", "arguments"):
            raise UnfinishedValueError("the answer ended inside a tool call", member="", text=self._buffer)
        rest, self._buffer = self._buffer, ""
        if self._state == "text":
            rest = "" if cut and len(rest) > 1 else rest
            return [TextDelta(rest)] if rest else []
        if self._state == "between" and closing:
            self.calls.pop()
            return [CallDelta(len(self.calls), _broken(self._arguments))]
        if self._state == "arguments":
            return [CallDelta(len(self.calls), rest + _broken(self._arguments + rest))]
        return []

    def _parts(self) -> Iterator[TextDelta | CallDelta]:
        while True:
            before = self._state
            if before in ("text", "between"):
                yield from self._read_text()
            elif before == "head":
                yield from self._read_head()
            else:
                yield from self._read_arguments()
            if self._state == before:
                return

    def _read_text(self) -> Iterator[TextDelta]:
        if self._is_value():
            value, self._buffer, self._is_text = self._buffer, "", True
            yield TextDelta(value)
            return
        text, opened, rest = self._buffer.partition(CALL_OPEN)
        if opened:
            self._buffer = rest
        else:
            size = len(text) - partial_stop(text, (CALL_OPEN,))
            text, self._buffer = text[:size], text[size:]
        if self._state == "text":
            yield TextDelta(text)
        if opened:
            self._state = "head"

    def _is_value(self) -> bool:
        """Whether no call can come any more: text came first."""
        starts = self._buffer.startswith(CALL_OPEN) or CALL_OPEN.startswith(self._buffer)
        return not self._anywhere and self._state == "text" and (self._is_text or not starts)

    def _read_head(self) -> Iterator[CallDelta]:
        if head := _HEAD.match(self._buffer):
            self._buffer = self._buffer[head.end() :]
            self._name, self._id, self._arguments = json.loads(head[1]), f"call_{secrets.token_hex(8)}", ""
            self._state = "arguments"
            yield CallDelta(len(self.calls), "", self._id, self._name)

    def _read_arguments(self) -> Iterator[CallDelta]:
        index = len(self.calls)
        while (at := self._buffer.find(_TAIL)) >= 0:
            arguments = _parsed(self._arguments + self._buffer[:at])
            size = at if arguments is not None else at + 1  # a tail inside of a string ends nothing
            yield CallDelta(index, self._take(size))
            if arguments is not None:
                self._buffer = self._buffer[len(_TAIL) :]
                self.calls.append(ToolCall(self._name, arguments, self._id))
                self._state = "between"
                return
        if size := len(self._buffer) - partial_stop(self._buffer, (_TAIL,)):
            yield CallDelta(index, self._take(size))

    def _take(self, size: int) -> str:
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        self._arguments += taken
        return taken


_STRING = re.compile(r'"(?:[^"\\]|\\.)*("|\\?$)', re.DOTALL)


def _broken(arguments: str) -> str:
    """Makes arguments invalid JSON even for lenient parsers, which would otherwise execute half a call."""
    ends = [string[1] for string in _STRING.finditer(arguments)]
    unclosed = "" if not ends or ends[-1] == '"' else f'{ends[-1]}"'
    opened: list[str] = []
    for bracket in re.findall(r"[{}\[\]]", _STRING.sub("", arguments)):
        opened = [*opened, bracket] if bracket in "{[" else opened[:-1]
    wrong = "]" if opened and opened[-1] == "{" else "}"
    return f"{unclosed}{wrong} {CUT_MARK}"


def _parsed(arguments: str) -> dict[str, Any] | None:
    try:
        value = parsed_json(arguments)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _head(tool: Tool) -> str:
    return f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '


def _schema(tool: Tool) -> str:
    try:
        return json.dumps(styled({**tool.parameters, "type": "object"}, tool.strict), ensure_ascii=False)
    except GrammarError as error:
        message = f"the schema of tool {tool.name!r} cannot be used: {error}"
        raise GrammarError(message, tool=tool.name, field=error.field) from None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
