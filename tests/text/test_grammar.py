"""Grammars: every draft of every member is valid, drafts change no state, and values end within the budget."""

from __future__ import annotations

import json
import random
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import validate
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specfuse_shared import EnsembleConfig, EnsembleEngine, FinishReason, Grammar, Message, SamplingParams
from specfuse_shared.errors import ConfigError, GrammarError, MissingExtraError, RequestError, UnfinishedValueError
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.runtime.sampler import masked
from specfuse_shared.text.chat_template import PromptEncoder
from specfuse_shared.text.grammars.constraint import AnswerConstraint, MemberConstraint
from tests.support.against_naive import local_members, open_session, run_rounds, with_settings
from tests.support.tiny import byte_level_tokenizer, save_model

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["village", "town", "große Stadt"]},
        "people": {"type": ["integer", "null"]},
        "districts": {"type": "array", "items": {"$ref": "#/$defs/district"}, "maxItems": 2},
        "twin": {"anyOf": [{"$ref": "#/$defs/district"}, {"type": "boolean"}]},
    },
    "required": ["name", "kind", "people", "districts"],
    "$defs": {"district": {"type": "object", "properties": {"label": {"type": "string"}}, "required": ["label"]}},
}
VALUE = '{"name": "Köln, „am Rhein“ 🎉", "kind": "große Stadt", "people": 1087353, "districts": [{"label": "北区"}]}'
QUESTION = [Message("user", "Describe Cologne.")]
GRAMMARS = [
    Grammar.json_schema(CITY),
    Grammar.json(),
    Grammar.choice(["Köln", "北京", "a 🎉 b", "a"]),
    Grammar.regex(r"[A-Z][a-zé]+ \d{2}(, \d{2})*"),
    Grammar.lark('start: "f(" arg ")"\narg: /[a-z]+/ | start'),
]


def constraint_of(member: LocalMember, grammar: Grammar) -> MemberConstraint:
    return MemberConstraint(grammar, member.vocabulary, member.stop_ids)


def random_draft(constraint: MemberConstraint, member: LocalMember, seed: int, count: int) -> str:
    """The draft of a member with random logits."""
    generator = torch.Generator().manual_seed(seed)
    size, ids = member.runner.model.get_input_embeddings().num_embeddings, []
    constraint.start()
    for _ in range(count):
        if constraint.finished:
            break
        token = int(masked(torch.rand(1, size, generator=generator), [constraint.allowed()]).argmax())
        if token in member.stop_ids:
            break
        constraint.advance(token)
        ids.append(token)
    return member.codec.decode(ids).rstrip("\ufffd")


# ── what a grammar may be ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Grammar.json_schema({"type": "strin"}), "strin"),
        (lambda: Grammar.json_schema("{"), "no JSON"),
        (lambda: Grammar.json_schema("[1]"), "object"),
        (lambda: Grammar.json_schema({"not": {"type": "string"}}), "not"),
        (lambda: Grammar.regex("a("), "unclosed group"),
        (lambda: Grammar.lark("begin: /a/"), "start"),
        (lambda: Grammar.lark(""), "no start rule"),
        (lambda: Grammar.lark("# nothing\n"), "no start rule"),
        (lambda: Grammar.choice([]), "choice"),
        (lambda: Grammar.choice("yes"), "choice"),
    ],
)
def test_an_invalid_grammar_is_refused_at_construction(make: Any, says: str) -> None:
    with pytest.raises(GrammarError, match=says):
        make()


def test_a_lenient_schema_ignores_unenforceable_keywords() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(GrammarError, match="uniqueItems"):
        Grammar.json_schema(schema)
    assert Grammar.json_schema(schema, strict=False)


def test_a_grammar_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r'"grammar" extra'):
        Grammar.choice(["yes", "no"])


def test_an_object_of_another_type_is_no_grammar() -> None:
    with pytest.raises(ConfigError, match="grammar must be a Grammar"):
        SamplingParams(grammar={"type": "object"})


# ── drafts ───────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=15, deadline=None)
@given(grammar=st.sampled_from(GRAMMARS), seed=st.integers(0, 10_000))
def test_every_draft_of_every_member_is_valid(exact_engine: EnsembleEngine, grammar: Grammar, seed: int) -> None:
    for member in local_members(exact_engine):
        drafted = random_draft(constraint_of(member, grammar), member, seed, 12)
        answer = AnswerConstraint(grammar, member.codec, 10_000)
        assert answer.admit(drafted, False).text == drafted != ""


def test_a_draft_does_not_change_the_committed_state(exact_engine: EnsembleEngine) -> None:
    for member in local_members(exact_engine):
        constraint = constraint_of(member, GRAMMARS[0])
        constraint.commit('{"name": "K')
        drafts = {random_draft(constraint, member, seed, 8) for seed in (1, 2, 1)}
        assert len(drafts) == 2
        assert random_draft(constraint, member, 1, 8) in drafts


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(0, len(VALUE)), max_size=5))
def test_members_follow_a_text_cut_at_any_byte(exact_engine: EnsembleEngine, cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(VALUE)]
    pieces = [VALUE[a:b] for a, b in pairwise(places) if a < b]
    for member in local_members(exact_engine):
        constraint, answer = constraint_of(member, GRAMMARS[0]), AnswerConstraint(GRAMMARS[0], member.codec, 500)
        for piece in pieces:
            assert answer.admit(piece, False).text == piece
            constraint.commit(piece)
            answer.commit(piece)
        constraint.start()
        assert answer.accepts("")
        # only the optional property is missing: here was a comma or the closing bracket
        assert answer.admit("!", False).text != "!"


def test_control_strings_in_a_value_are_text_for_every_member(exact_engine: EnsembleEngine) -> None:
    value = '{"name": "<|im_end|><eos><end_of_turn>", "kind": "town", "people": null, "districts": []}'
    for member in local_members(exact_engine):
        constraint = constraint_of(member, GRAMMARS[0])
        constraint.commit(value)
        constraint.start()
        assert constraint.finished


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda g: g.kind)
def test_a_value_is_complete_within_the_budget(exact_engine: EnsembleEngine, grammar: Grammar, seed: int) -> None:
    members, dice = local_members(exact_engine), random.Random(seed)
    limit = dice.randrange(30, 90)
    answer = AnswerConstraint(grammar, members[0].codec, limit)
    constraints, text = [constraint_of(m, grammar) for m in members], ""
    for turn in range(200):
        number = dice.randrange(len(members))
        draft = random_draft(constraints[number], members[number], seed + turn, 6)
        admitted = answer.admit(draft, ends=dice.random() < 0.1)
        text += admitted.text
        if admitted.ends or admitted.reason:
            break
        answer.commit(admitted.text)
        for constraint in constraints:
            constraint.commit(admitted.text)
    assert len(members[0].codec.encode(text)) <= limit
    assert AnswerConstraint(grammar, members[0].codec, 10_000).accepts(text)
    if grammar.kind == "json_schema":
        validate(json.loads(text), json.loads(grammar.source))


@pytest.mark.parametrize("limit", [60, 90, pytest.param(400, marks=pytest.mark.slow)])
def test_an_answer_of_random_models_is_a_valid_value(tiny_engine: EnsembleEngine, limit: int) -> None:
    params = SamplingParams(max_tokens=limit, grammar=Grammar.json_schema(CITY), temperature=1.0, seed=3)
    result = tiny_engine.generate(QUESTION, params)
    validate(json.loads(result.text), CITY)
    assert result.usage.completion_tokens <= limit
    assert "".join(r.text for r in result.rounds) == result.text


def test_a_single_member_follows_the_grammar(tiny_engine: EnsembleEngine) -> None:
    config = with_settings(tiny_engine.config, exit=lambda totals, t: _Leave((0.9, 0.1)[: len(totals)], (1,)))
    params = SamplingParams(max_tokens=200, grammar=Grammar.json_schema(CITY))
    session = open_session(config, local_members(tiny_engine), QUESTION, params)
    rounds = run_rounds(session, 500)
    assert any(r.active == ("chat",) for r in rounds)
    validate(json.loads("".join(r.text for r in rounds)), CITY)


class _Leave:
    def __init__(self, retention: tuple[float, ...], leavers: tuple[int, ...]) -> None:
        self.retention, self.leavers = retention, leavers


@pytest.mark.parametrize(
    ("grammar", "start", "finish"),
    [
        (Grammar.json_schema(CITY), '{"name": "Kö', '", "kind": "town", "people": 1, "districts": []}'),
        (Grammar.json_schema(CITY), '{"name": "\\', '"", "kind": "town", "people": 1, "districts": []}'),
        (Grammar.json_schema({"type": "array", "items": {"type": "number"}, "minItems": 2}), "[12.5e", "0, 0]"),
        (Grammar.json_schema({"type": "string", "minLength": 4}), '"a', '0aa"'),
        (Grammar.json_schema({"type": "string", "format": "date"}), '"2024-', '01-01"'),
        (Grammar.regex(r"[A-Z][a-zé]+ \d{2}(, \d{2})*"), "Ke", " 00"),
        (Grammar.lark('start: "f(" arg ")"\narg: /[a-z]+/ | start'), "f(f(x", "))"),
    ],
)
def test_an_open_value_has_a_short_completion(grammar: Grammar, start: str, finish: str) -> None:
    codec = PromptEncoder(byte_level_tokenizer(), None, {}, "tiny").codec
    answer = AnswerConstraint(grammar, codec, len(codec.encode(start + finish)))
    answer.commit(start)
    assert answer.admit("", False).reason is None
    assert answer.admit("\0", False).text == ""
    assert answer.finish() == finish


@pytest.mark.parametrize(
    ("schema", "closing"),
    [
        ({"type": "string", "format": "email"}, '"0@0"'),
        ({"type": "string", "format": "uri"}, '"A:"'),
        ({"type": "string", "pattern": r"^\S+$"}, '"0"'),
        ({"type": "string", "pattern": r"^\S+@\S+$"}, '"0@a"'),
        ({"type": "string", "pattern": r"^[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}$"}, '"0@0.aa"'),
        ({"type": "string", "pattern": r"^[^\s@]+@[^\s@]+\.[^\s@]+$"}, '"0@0.a"'),
        ({"type": "string", "pattern": "^[^/]+/[^/]+$"}, '"0/0"'),
        ({"type": "string", "pattern": "^[^x]*$"}, '""'),
        ({"type": "string", "pattern": "^[^xX]+$"}, '"0"'),
    ],
)
def test_a_string_with_brackets_and_without_spaces_has_a_short_completion(schema: dict[str, Any], closing: str) -> None:
    codec = PromptEncoder(byte_level_tokenizer(), None, {}, "tiny").codec
    assert AnswerConstraint(Grammar.json_schema(schema), codec, 40).finish() == closing


def test_text_between_tags_is_completed_by_its_tag() -> None:
    codec = PromptEncoder(byte_level_tokenizer(), None, {}, "tiny").codec
    answer = AnswerConstraint(Grammar.lark('start: "<x>" /[^<]*/ "</x>"'), codec, 40)
    assert answer.finish() == "<x></x>"


def test_a_long_value_continues_up_to_its_limit() -> None:
    """Each piece has another completion, and they need far more steps than one search is allowed."""
    codec = PromptEncoder(byte_level_tokenizer(), None, {}, "tiny").codec
    person = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "mail": {"type": "string", "format": "email"}},
    }
    person["required"] = ["name", "mail"]
    value = json.dumps([{"name": f"Person {n}", "mail": f"p{n}@example.org"} for n in range(90)])
    pieces = re.findall(r".{1,7}", value)
    whole = len(codec.encode(value))
    for budget in (10**6, whole + 40):
        answer = AnswerConstraint(Grammar.json_schema({"type": "array", "items": person}), codec, budget)
        for piece in pieces[:-1]:
            for draft in (piece + "x", piece):
                admitted = answer.admit(draft, False)
                assert admitted.reason is None
            assert admitted.text == piece
            answer.commit(piece)
        assert answer.accepts(pieces[-1])


def test_a_value_that_the_vocabulary_cannot_write_is_closed_with_a_warning(tmp_path: Path) -> None:
    """Some community tokenizers lack bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(["yes no maybe nothing 0123456789 "], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    with EnsembleEngine(EnsembleConfig([str(save_model("llama", fast, tmp_path))])) as engine:
        result = engine.generate("Hi.", SamplingParams(max_tokens=20, grammar=Grammar.choice(["nße", "nàa"])))
    assert (result.text, result.finish_reason) == ("nße", FinishReason.LENGTH)


def test_a_budget_below_the_shortest_value_is_refused_before_any_work(tiny_engine: EnsembleEngine) -> None:
    with pytest.raises(RequestError, match=r"max_tokens=5 cannot hold any value"):
        tiny_engine.stream(QUESTION, SamplingParams(max_tokens=5, grammar=Grammar.json_schema(CITY)))


def test_a_value_without_a_possible_end_is_an_explicit_error(tiny_engine: EnsembleEngine) -> None:
    endless = Grammar.lark("start: /(ab|cd){2000}/")
    with pytest.raises(UnfinishedValueError, match="max_tokens=20") as caught:
        tiny_engine.generate(QUESTION, SamplingParams(max_tokens=20, grammar=endless))
    assert caught.value.text


def test_forced_text_needs_no_model(exact_engine: EnsembleEngine) -> None:
    result = exact_engine.generate(QUESTION, SamplingParams(max_tokens=60, grammar=Grammar.json_schema(CITY)))
    first = result.rounds[0]
    assert (first.text, first.verified, first.candidates[0].tokens) == ('{"name": "', False, 0)
    assert first.candidates[0].drafters == exact_engine.config.names
    validate(json.loads(result.text), CITY)


def test_a_complete_value_ends_the_answer_at_once(exact_engine: EnsembleEngine) -> None:
    params = SamplingParams(max_tokens=10, grammar=Grammar.choice(["yes", "no"]))
    result = exact_engine.generate("Is water wet?", params)
    assert result.text in ("yes", "no")
    assert (result.finish_reason, result.rounds[-1].candidates[0].ends) == (FinishReason.STOP, True)


def test_a_stop_string_does_not_break_a_value(tiny_engine: EnsembleEngine) -> None:
    params = SamplingParams(max_tokens=200, grammar=Grammar.json_schema(CITY), stop='"')
    result = tiny_engine.generate(QUESTION, params)
    validate(json.loads(result.text), CITY)
    assert result.stop_sequence is None


def test_a_stop_string_cuts_a_value_after_a_whole_value(tiny_engine: EnsembleEngine) -> None:
    pattern = r"[a-e ,]{5,}"
    cut, ignored, across = 0, 0, 0
    for seed in range(4):
        params = SamplingParams(max_tokens=50, grammar=Grammar.regex(pattern), temperature=1.0, seed=seed)
        whole = tiny_engine.generate(QUESTION, params)
        for start in range(1, len(whole.text) - 3, 3):
            stop = whole.text[start : start + 3]
            places = (n for n in range(len(whole.text)) if whole.text.startswith(stop, n))
            at = next((n for n in places if re.fullmatch(pattern, whole.text[:n])), None)
            result = tiny_engine.generate(QUESTION, replace(params, stop=[stop, "nowhere"]))
            assert (result.text, result.stop_sequence) == (whole.text[:at], stop if at is not None else None)
            cut, ignored = cut + (at is not None), ignored + (at is None)
            across += at is not None and at < result.rounds[-1].start
    assert min(cut, ignored, across) >= 1


ENDLESS = {
    "$defs": {"Box": {"type": "object", "properties": {"box": {"$ref": "#/$defs/Box"}}, "required": ["box"]}},
    "$ref": "#/$defs/Box",
}
"""An object that requires itself: it has no finite value, and its whole text is forced."""


def test_a_value_without_end_uses_only_its_budget(tiny_engine: EnsembleEngine) -> None:
    params = SamplingParams(max_tokens=40, grammar=Grammar.json_schema(ENDLESS))
    with pytest.raises(UnfinishedValueError, match="max_tokens=40") as caught:
        tiny_engine.generate(QUESTION, params)
    assert caught.value.text.startswith('{"box": {"box": {"box"')


def test_a_long_forced_text_is_cut_with_few_encodings() -> None:
    codec = PromptEncoder(byte_level_tokenizer(), None, {}, "tiny").codec
    lengths: list[int] = []
    answer = AnswerConstraint(Grammar.json_schema(ENDLESS), _Counting(codec, lengths), 100)
    head = answer.admit(answer.forced(), False).text
    assert len(codec.encode(head)) <= 100 < len(codec.encode(head + answer.forced()[len(head) :][:1]))
    assert len(lengths) < 20
    assert max(lengths) <= 4096


class _Counting:
    """A codec that records the lengths of its input."""

    def __init__(self, codec: Any, lengths: list[int]) -> None:
        self._codec, self._lengths = codec, lengths

    def extend(self, encoding: Any, text: str) -> Any:
        self._lengths.append(len(text))
        return self._codec.extend(encoding, text)
