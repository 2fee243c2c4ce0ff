"""How far members agree, where they differ, and on which fields: by rounds with known numbers, and in every place that
reports it."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from typing import Any

import pytest

from specfuse_shared import (
    Agreement,
    Disagreement,
    EnsembleEngine,
    EnsembleResult,
    Grammar,
    MemberWords,
    SamplingParams,
)
from specfuse_shared.agreement import agreement_of
from specfuse_shared.frameworks import ledger
from specfuse_shared.types import Candidate, RoundRecord
from tests.support.explained import differing, explained, round_of

WEIGHTS = {"alpha": 0.75, "beta": 0.25}


def judged(text: str, drafts: dict[str, str], **changes: object) -> RoundRecord:
    """A round won by alpha with `text`; the other members' drafts differ."""
    candidates = tuple(Candidate(draft, (name,), False, 3) for name, draft in drafts.items())
    fields = {"candidates": candidates, "weights": WEIGHTS, **changes}
    return replace(round_of(1, 0, ("alpha", text), ("alpha", "beta")), **fields)


def test_members_that_draft_the_same_agree() -> None:
    both = Candidate(" the sea", ("alpha", "beta"), False, 2)
    assert agreement_of([judged(" the sea", {}, candidates=(both,))]) == Agreement(1.0, ())


def test_they_agree_up_to_where_a_draft_leaves_the_segment() -> None:
    result = agreement_of([judged(" the sea", {"alpha": " the sea", "beta": " the sky"})])
    assert result == Agreement(pytest.approx((6 + 2 * 0.75) / 8), (Disagreement(6, 8, 0.75),))


def test_text_after_a_shorter_draft_is_unknown_unless_the_draft_ends_there() -> None:
    drafts = {"alpha": " the sea", "beta": " the"}
    assert agreement_of([judged(" the sea", drafts)]) == Agreement(1.0, ())
    ends = (Candidate(" the sea", ("alpha",), False, 2), Candidate(" the", ("beta",), True, 1))
    result = agreement_of([judged(" the sea", {}, candidates=ends)])
    assert result == Agreement(pytest.approx((4 + 4 * 0.75) / 8), (Disagreement(4, 8, 0.75),))


def test_forced_text_and_text_of_a_lone_member_have_no_agreement() -> None:
    dictated = Candidate('{"a": ', ("alpha", "beta"), False, 0)
    assert agreement_of([judged('{"a": ', {}, candidates=(dictated,))]) is None
    assert agreement_of([judged(" the sea", {"alpha": " the sea"}, active=("alpha",))]) is None
    assert agreement_of([]) is None


def test_positions_are_within_the_answer() -> None:
    answer = explained([("alpha", " one two"), ("beta", " three four")])
    result = answer.agreement
    assert result is not None
    assert [(place.start, place.end) for place in result.places] == [(1, 8), (9, 19)]
    assert all(place.share == 0.5 for place in result.places)
    cut = replace(answer, text=answer.text[:12]).agreement
    assert cut is not None
    assert cut.places[-1].end == 12
    assert [record.agreement for record in answer.rounds] == [pytest.approx(4.5 / 8), pytest.approx(6 / 11)]


def test_the_record_and_the_report_of_an_answer_have_its_agreement() -> None:
    answer = explained([("alpha", " one two"), ("beta", " three four")])
    differences_of = json.loads(json.dumps(answer.to_dict()))["agreement"]
    assert differences_of["share"] == pytest.approx(10.5 / 19)
    assert differences_of["places"][0] == {"start": 1, "end": 8, "share": 0.5}
    page = answer.to_html()
    assert "<dt>Agreement</dt><dd>0.553</dd>" in page
    assert "2 places apart" in page
    assert "Agreement 0.562: the share of this segment" in page
    assert "<dt>Agreement</dt>" not in explained([("alpha", " one")], ("alpha",)).to_html()


def test_agreement_needs_several_members(tiny_engine: EnsembleEngine) -> None:
    params = SamplingParams(max_tokens=20)
    several = tiny_engine.generate("Hello", params)
    assert several.agreement is not None
    assert 0 <= several.agreement.share <= 1
    assert all(0 <= p.start < p.end <= len(several.text) and p.share < 1 for p in several.agreement.places)
    assert tiny_engine.generate("Hello", params, members=["chat"]).agreement is None


# ── what members would have written ──────────────────────────────────────────────────────────────

THREE = {"alpha": 0.5, "beta": 0.3, "gamma": 0.2}


def differences_of(answer: EnsembleResult) -> list[tuple[str, str, dict[str, str]]]:
    """Kind, words of the answer, and the others' words in their place; "…" where a draft ended within a word."""
    for each in answer.differences:
        assert answer.text[each.start : each.end] == each.text
    return [
        (each.kind, each.text, {o.member: o.words + "…" * o.is_cut + "." * o.ends for o in each.others})
        for each in answer.differences
    ]


def test_numbers_precede_names_long_words_and_short_words() -> None:
    drafts = {
        "beta": "On a day in 1968 the sailor Buzz slept there.…",
        "gamma": "On the day in 1969 the sailor Neil ate there.…",
    }
    answer = differing([("On the day in 1969 the sailor Neil slept there.", drafts)], THREE, over=True)
    assert differences_of(answer) == [
        ("number", "1969", {"beta": "1968"}),
        ("name", "Neil", {"beta": "Buzz"}),
        ("word", "slept", {"gamma": "ate"}),
        ("word", "the", {"beta": "a"}),
    ]
    assert [each.share for each in answer.differences] == pytest.approx([0.7, 0.7, 0.8, 0.7])


def test_differences_of_one_kind_are_ordered_by_fewest_votes() -> None:
    answer = differing(
        [("In 1 and 2 and 3 cases", {"beta": "In 1 and 5 and 4 cases", "gamma": "In 7 and 2 and 4 cases"})], THREE
    )
    assert [(each.text, each.share) for each in answer.differences] == [
        ("3", pytest.approx(0.5)),
        ("2", pytest.approx(0.7)),
        ("1", pytest.approx(0.8)),
    ]


def test_a_difference_names_the_members_of_other_words_and_their_votes() -> None:
    [result] = differing([("It is 42.", {"beta": "It is 41."})], {"alpha": 0.75, "beta": 0.25}, over=True).differences
    assert (result.start, result.end, result.kind, result.share, result.round) == (6, 8, "number", 0.75, 1)
    assert result.others == (MemberWords("beta", "41", 0.25, score=0.25, own_score=0.5),)


def test_words_are_whole_although_rounds_and_drafts_end_within_them() -> None:
    rounds = [
        ("It was in 19", {}),
        ("69 that Arm", {"beta": "68 that Ald", "gamma": "69 that Arms"}),
        ("strong went", {}),
    ]
    assert differences_of(differing(rounds, THREE)) == [
        ("number", "1969", {"beta": "1968"}),
        ("name", "Armstrong", {"beta": "Ald…"}),
    ]


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ("The Moon, in July.", "the moon in july"),
        ("about 1,969 ships", "about 1969 ships"),
        ("an e-mail of the U.S.", "an email of the US"),
        ("one  two\nthree", "one two three"),
        ("the sea is wide", "the se"),
        ("the sea", "the sea is wide"),
        ("It rests, and", "It rests and goes"),
    ],
)
def test_case_punctuation_spaces_and_unknown_text_are_no_difference(text: str, draft: str) -> None:
    rounds = [(text, {"beta": draft}), (" goes on", {})]
    assert differences_of(differing(rounds, THREE)) == []


def test_ending_and_continuing_the_answer_is_a_difference() -> None:
    assert differences_of(differing([("It rests", {"beta": "It rests…"}), (" at sea", {})], THREE)) == [
        ("word", "", {"beta": "."})
    ]
    assert differences_of(differing([("It rests at sea", {"beta": "It…"})], THREE)) == [
        ("word", "rests at sea", {"beta": "."})
    ]
    continues = differing([("Paris.", {"beta": "Paris, since 987"})], THREE, over=True)
    assert differences_of(continues) == [("number", "", {"beta": "since 987…"})]
    assert continues.differences[0].start == len("Paris")


def test_members_with_one_difference_are_listed_together() -> None:
    drafts = {"beta": "by Buzz Aldrin alone", "gamma": "by Neil Young alone"}
    answer = differing([("by Neil Armstrong alone", drafts)], THREE)
    assert differences_of(answer) == [("name", "Neil Armstrong", {"beta": "Buzz Aldrin", "gamma": "Neil Young"})]
    assert answer.differences[0].share == pytest.approx(0.5)


def test_scripts_without_spaces_differ_by_character() -> None:
    answer = differing([("1969年", {}), ("几时有", {"beta": "何时有"})], THREE)
    assert differences_of(answer) == [("word", "几", {"beta": "何"})]


def test_cut_forced_or_closed_text_is_no_difference() -> None:
    rounds = [("It is 42 or", {"beta": "It is 41 or", "gamma": "It is 42 but"})]
    cut = differing(rounds, THREE)
    assert differences_of(replace(cut, text="It is 42")) == [("number", "42", {"beta": "41 or…"})]
    assert differences_of(replace(cut, text="It is 4")) == []
    assert differences_of(replace(cut, text="")) == []
    dictated = tuple(replace(c, tokens=0) for c in cut.rounds[0].candidates)
    assert differences_of(replace(cut, rounds=(replace(cut.rounds[0], candidates=dictated),))) == []
    closed = replace(cut.rounds[0], text='"}', end=2)
    assert differences_of(replace(cut, text='"}', rounds=(closed,), closing='"}')) == []


# ── fields of JSON ───────────────────────────────────────────────────────────────────────────────


def fields(answer: EnsembleResult) -> dict[str, tuple[str, float | None, dict[str, str]]]:
    for each in answer.fields:
        assert answer.text[each.start : each.end] == each.text
    return {
        f"{each.value}{each.path}": (
            each.text,
            None if each.share is None else round(each.share, 3),
            {o.member: o.words + "…" * o.is_cut for o in each.others},
        )
        for each in answer.fields
    }


def test_each_field_has_its_share_and_its_alternatives() -> None:
    rounds = [
        ('{"city": "Os', {"beta": '{"city": "Ber', "gamma": '{"city": "Oslo", "'}),
        ('lo", "days": [1, 2', {"beta": 'lo", "days": [1, 3, ', "gamma": 'lo", "days": [1.0, '}),
        ('], "ok": true}', {"beta": '], "ok": false', "gamma": ', 9], "ok": true}'}),
    ]
    assert fields(differing(rounds, THREE, over=True)) == {
        "0$.city": ('"Oslo"', 0.7, {"beta": '"Ber…'}),
        "0$.days[0]": ("1", 1.0, {}),
        "0$.days[1]": ("2", 0.625, {"beta": "3"}),
        "0$.days[2]": ("", 0.8, {"gamma": "9"}),
        "0$.ok": ("true", 0.7, {"beta": "false"}),
    }


def test_a_field_is_one_value_over_any_number_of_rounds() -> None:
    rounds = [('{"say": "one', {}), (" two", {"beta": " 2"}), (' three"}', {"gamma": ' four"}'})]
    assert fields(differing(rounds, THREE, over=True)) == {
        "0$.say": ('"one two three"', 0.5, {"beta": '"one 2…', "gamma": '"one two four"'})
    }


def test_the_arguments_of_each_call_are_fields() -> None:
    call = '<tool_call>{"name": "go", "arguments": {"to": "%s"}}</tool_call>'
    rounds = [("I ask. " + call % "Oslo", {"beta": "I ask. " + call % "Rome"}), ("\n" + call % "Bern", {})]
    assert fields(differing(rounds, THREE)) == {
        "0$.name": ('"go"', 1.0, {}),
        "0$.arguments.to": ('"Oslo"', 0.7, {"beta": '"Rome"'}),
        "1$.name": ('"go"', 1.0, {}),
        "1$.arguments.to": ('"Bern"', 1.0, {}),
    }


def test_a_field_forced_by_the_grammar_has_no_share() -> None:
    answer = differing([('{"kind": "boat", "n": ', {}), ("4}", {"beta": "5}"})], THREE, over=True)
    dictated = tuple(replace(candidate, tokens=0) for candidate in answer.rounds[0].candidates)
    answer = replace(answer, rounds=(replace(answer.rounds[0], candidates=dictated), answer.rounds[1]))
    assert fields(answer) == {"0$.kind": ('"boat"', None, {}), "0$.n": ("4", 0.7, {"beta": "5"})}


@pytest.mark.parametrize(
    "text",
    ['{"a": 1, "b": [tru', '{"a": 1, "b"', '{"a": 1}}', '{"a": 1, , }', '{"a": 1 "b": 2}', '{"a": 1, "b": "\\u12'],
)
def test_text_before_a_cut_or_broken_place_has_its_fields(text: str) -> None:
    assert fields(differing([(text, {"beta": '{"a": 7, ', "gamma": "{{]"})], THREE))["0$.a"] == (
        "1",
        0.625,
        {"beta": "7"},
    )


def test_no_text_raises_an_error_and_every_result_is_plain_json() -> None:
    chance = random.Random(5)
    parts = [*'{}[],:"\\\n é明"', "true", "1,969", "-5", "Oslo", "<tool_call>", '{"a": ', "the", " ", " "]

    def some() -> str:
        return "".join(chance.choice(parts) for _ in range(chance.randrange(12)))

    for _ in range(800):
        rounds = [(text := some(), {"beta": some(), "gamma": text[: chance.randrange(9)] + some()}) for _ in range(4)]
        answer = differing(rounds, THREE, over=chance.random() < 0.5)
        answer = replace(answer, text=answer.text[: chance.randrange(60)])
        results: list[Any] = [*answer.differences, *answer.fields]
        for each in results:
            assert 0 <= each.start <= each.end <= len(answer.text)
            assert each.text == answer.text[each.start : each.end]
            assert each.others or each.share in (None, 1.0)
        json.dumps(answer.to_dict(), allow_nan=False)


def long_answer(rounds: int) -> EnsembleResult:
    chance, names = random.Random(1), [f"m{n}" for n in range(5)]

    def words() -> str:
        return "".join(
            f" {chance.choice('tides ships Oslo harbours').strip()}{chance.randrange(999)}" for _ in range(3)
        )

    turns = [(words(), {name: words() for name in names[1:]}) for _ in range(rounds)]
    return differing([('{"essay": "', {}), *turns, ('"}', {})], dict.fromkeys(names, 0.2))


def test_the_time_grows_linearly_with_the_length() -> None:
    def seconds(answer: EnsembleResult) -> float:
        began = time.process_time()
        assert len(answer.differences) > len(answer.rounds) / 2
        assert answer.fields[0].share is not None
        return time.process_time() - began

    short, long = long_answer(150), long_answer(1200)
    assert min(seconds(long) for _ in range(2)) < 20 * min(seconds(short) for _ in range(3)) + 0.1


# ── where it is reported ─────────────────────────────────────────────────────────────────────────


def test_a_real_answer_has_its_differences_as_json_if_rounds_are_kept(tiny_engine: EnsembleEngine) -> None:
    result = tiny_engine.generate("Hello", SamplingParams(max_tokens=160))
    full, summary = (ledger(result, detail) for detail in ("full", "summary"))
    assert full["differences"] == json.loads(json.dumps(result.to_dict()))["differences"]
    assert len(full["differences"]) == len(result.differences) > 8
    assert summary["differences"] == full["differences"][:8]
    assert summary["differences_left_out"] == len(result.differences) - 8
    assert "fields" not in full
    assert ledger(result, "none") == {}
    names = set(result.members)
    assert all({rival["member"] for rival in each["others"]} < names for each in full["differences"])
    assert tiny_engine.generate("Hello", SamplingParams(max_tokens=20), members=["chat"]).differences == ()


def test_a_real_value_has_its_agreement_by_field(tiny_engine: EnsembleEngine) -> None:
    rows = {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 10}, "minItems": 24, "maxItems": 24}
    schema = {"type": "object", "properties": {"rows": rows, "ok": {"type": "boolean"}}, "required": ["rows", "ok"]}
    result = tiny_engine.generate("Hello", SamplingParams(max_tokens=200, grammar=Grammar.json_schema(schema)))
    value = json.loads(result.text)
    assert [each.path for each in result.fields] == [*(f"$.rows[{n}]" for n in range(24)), "$.ok"]
    assert [json.loads(each.text) for each in result.fields] == [*value["rows"], value["ok"]]
    assert any(each.others for each in result.fields)
    summary = ledger(result, "summary")
    assert (len(summary["fields"]), summary["fields_left_out"]) == (20, 5)
    smallest = min(each.share for each in result.fields if each.share is not None)
    assert smallest in [each["share"] for each in summary["fields"]]
    cut = replace(result, text=result.text[:-30])
    assert 0 < len(cut.fields) < 25
