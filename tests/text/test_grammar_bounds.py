"""Bounds on a grammar: checked before the library sees it, compiled outside the lanes, closed within a budget."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import pytest

from specfuse_shared import EnsembleEngine, Grammar, SamplingParams, Tool
from specfuse_shared.errors import GrammarError, RequestError, UnfinishedValueError
from specfuse_shared.messages import Message, ToolCall
from specfuse_shared.text.grammars import constraint, guidance
from specfuse_shared.text.grammars.bounds import MOST_CHARACTERS, MOST_RULES, MOST_VALUES, check_has_text
from specfuse_shared.text.grammars.constraint import AnswerConstraint
from tests.hostile.strategies import chain
from tests.support.against_naive import local_members

WIDE = {"enum": [*range(MOST_VALUES)]}
DEEP = '{"items":' * 20_000 + "{}" + "}" * 20_000


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Grammar.json_schema(chain(4000)), "values"),
        (lambda: Grammar.json_schema(json.loads(chain(4000))), "values"),
        (lambda: Grammar.json_schema(WIDE), "values"),
        (lambda: Grammar.json_schema(DEEP), "nested"),
        (lambda: Grammar.json_schema(nested(100)), "nested"),
        (lambda: Grammar.json_schema(nested(100_000)), "nested"),
        (lambda: Grammar.json_schema('{"maximum": ' + "9" * 5000 + "}"), "no JSON"),
        (lambda: Grammar.json_schema('{"maximum": NaN}'), "no JSON"),
        (lambda: Grammar.json_schema('{"const": "\\ud800"}'), "no JSON"),
        (lambda: Grammar.json_schema({"const": "\ud800"}), "surrogate"),
        (lambda: Grammar.json_schema({"enum": {1, 2}}), "JSON"),
        (lambda: Grammar.regex("a" * (MOST_CHARACTERS + 1)), "characters"),
        (lambda: Grammar.lark("start: a\n" + "a: a\n" * MOST_RULES), "rules"),
        (lambda: Grammar.lark('start[max_tokens=3]: "ab"+'), "only \\[lazy\\]"),
        (lambda: Grammar.lark('start: a\n a [stop="]"] : "ab"+'), "only \\[lazy\\]"),
        (lambda: Grammar.lark('%llguidance {"allow_invalid_utf8": true}\nstart: /(?-u)\\xff/'), "is text"),
        (lambda: Grammar("choice", "[" * 50_000), "as JSON"),
        (lambda: Grammar.json_schema({"multipleOf": 13_088_624}), "common multiple"),
        (lambda: Grammar.json_schema({"allOf": [{"multipleOf": 997}, {"multipleOf": 0.991}]}), "common multiple"),
        (lambda: Grammar.lark('start: %json {"\\u006dultipleOf": 13088624}'), "common multiple"),
        (lambda: Grammar.lark(f"start: %json {DEEP}"), "nested|no JSON"),
        (lambda: Grammar.lark("start: %json nothing"), "write the schema directly after"),
        (lambda: Grammar("choice", "[" + "9" * 5000 + "]"), "as JSON"),
    ],
)
def test_a_grammar_that_is_too_large_is_refused_by_name(make: Any, says: str) -> None:
    with pytest.raises(GrammarError, match=says):
        make()


@pytest.mark.parametrize("number", [5, 0.01, 1e-6, 86_400, 1_000_000_000, 0.25, 65_536])
def test_usual_multiples_are_taken(number: float) -> None:
    grammar = Grammar.json_schema({"type": "number", "multipleOf": number})
    assert guidance.byte_vocabulary().matcher(grammar.compiled) is not None


def test_a_tool_under_such_a_schema_is_refused_too(exact_engine: EnsembleEngine) -> None:
    tool = Tool("f", "", {"type": "object", **json.loads(chain(4000))})
    with pytest.raises(GrammarError, match="values"):
        exact_engine.generate("x", tools=[tool], tool_choice="any")


def test_large_grammars_that_are_not_too_large_compile_in_a_thread_with_a_small_stack() -> None:
    # in another process, which an overflow would end
    work = (
        "import threading\n"
        "from specfuse_shared import Grammar\n"
        "from tests.hostile.strategies import chain, rules\n"
        "def work():\n"
        "    Grammar.json_schema(chain(2000))\n"
        f"    Grammar.lark(rules({MOST_RULES - 2}))\n"
        "    print('compiled')\n"
        "threading.stack_size(512 * 1024)\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "compiled\n"), done.stderr


def test_compiling_a_grammar_restores_the_stack_size() -> None:
    before = threading.stack_size()
    Grammar.choice(["yes", "no"])
    assert threading.stack_size() == before


def test_a_grammar_is_compiled_before_it_reaches_a_lane(
    exact_engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    plainly = guidance.on_deep_stack

    def spied(work: Any) -> Any:
        compiled.append(threading.current_thread().name)
        return plainly(work)

    monkeypatch.setattr(guidance, "on_deep_stack", spied)
    exact_engine.generate("x", SamplingParams(max_tokens=30, grammar=Grammar.regex("[a-f]{7}")))
    assert set(compiled) == {threading.current_thread().name}


# ── closings ─────────────────────────────────────────────────────────────────────────────────────


def test_a_long_closing_is_searched_for_once(exact_engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    plainly = constraint._detour

    def spied(*arguments: Any) -> Any:
        tried.append(1)
        return plainly(*arguments)

    monkeypatch.setattr(constraint, "_detour", spied)
    codec = local_members(exact_engine)[0].codec
    answer = AnswerConstraint(Grammar.regex("[b-wy-z]{900}"), codec, 2000)
    for word in ("fetching", "brown", "dogs") * 10:
        admitted = [answer.admit(each, False).text for each in (word, word[::-1])]
        assert admitted == [word, word[::-1]]
        answer.commit(word)
    assert len(answer.finish()) == 900 - 10 * len("fetchingbrowndogs")
    assert sum(tried) <= 2 * 24, "once for every allowed byte"


def test_a_closing_continues_the_committed_text(exact_engine: EnsembleEngine) -> None:
    codec = local_members(exact_engine)[0].codec
    grammar = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
    answer = AnswerConstraint(grammar, codec, 200)
    for piece, finish in (('{"a": "', '"}'), ("so", '"}'), ('me"', "}"), ("}", "")):
        assert answer.admit(piece, False).text == piece
        answer.commit(piece)
        assert answer.finish() == finish


@pytest.mark.parametrize("rule", ['s: s s | "a" |', 's: s s s | s s | "a" | "aa" |'])
def test_an_ambiguous_grammar_ends_its_answer_and_keeps_the_text(exact_engine: EnsembleEngine, rule: str) -> None:
    codec = local_members(exact_engine)[0].codec
    answer, committed = AnswerConstraint(Grammar.lark(f"start: s\n{rule}"), codec, 10_000), list[str]()

    def go_on() -> None:
        while len(committed) < 2000:
            answer.commit(answer.admit("a" * 12, False).text)
            committed.append("a" * 12)

    with pytest.raises(UnfinishedValueError, match="takes too long to follow") as error:
        go_on()
    assert error.value.text == "".join(committed)


# ── JSON inside of JSON ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "arguments",
    ['{"a":' * 50_000 + "1" + "}" * 50_000, '{"a":' + "9" * 5000 + "}", '{"a":"\\ud800"}', '{"a":NaN}', "["],
)
def test_arguments_of_calls_that_are_no_json_are_refused(arguments: str) -> None:
    with pytest.raises(RequestError, match="not a JSON object") as error:
        ToolCall.from_dict({"function": {"name": "f", "arguments": arguments}})
    assert len(str(error.value)) < 200, "it does not repeat all of it"


def test_a_message_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestError, match="half a character"):
        Message("user", "\ud800")


@pytest.mark.parametrize(
    "source",
    [
        "start: /a*/ start start",
        "start: (start)* /a+/ start",
        'start: a\na: "x" b\nb: (a | b "y")+',
        'start: "(" start ")" // | "no alternative"',
        'start: "|" start /|"x"/',
        'start: start ~ 2..3 "a"',
        'start: %json {"type": "null"} start',
    ],
)
def test_a_grammar_without_any_text_is_refused(source: str) -> None:
    with pytest.raises(GrammarError, match="describes no text: its rule start always needs itself"):
        Grammar.lark(source)


@pytest.mark.parametrize(
    "source",
    [
        'start: "f(" arg ")"\narg: /[a-z]+/ | start',
        'start: (start)* /a*/ start start | "b"',
        'start: start? "a"',
        'start: [start] "a"',
        'start: start~0..2 "a"',
        'start: NAME (":" NAME)*\nNAME: /[a-z:]+/\n%ignore / +/',
        'start: a b\na: "x"\n  | b a\nb[lazy]: /y*z/',
        'start: thing\nthing: %json {"type": "object"} | "(" thing ")" -> nested',
        'start: /start: start/ "b: b"',
    ],
)
def test_a_grammar_with_some_text_is_accepted(source: str) -> None:
    check_has_text(source)


def test_brackets_without_end_are_refused() -> None:
    with pytest.raises(GrammarError, match="brackets within each other"):
        check_has_text("start: " + "(" * 5000)
