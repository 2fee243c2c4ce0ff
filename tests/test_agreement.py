"""How far members agree: by rounds whose numbers are known, and where the number is told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from specfuse_shared import Agreement, Disagreement, EnsembleEngine, SamplingParams
from specfuse_shared.agreement import agreement_of
from specfuse_shared.types import Candidate, RoundRecord
from tests.support.explained import explained, round_of

WEIGHTS = {"alpha": 0.75, "beta": 0.25}


def judged(text: str, drafts: dict[str, str], **changes: object) -> RoundRecord:
    """A round won by alpha with `text`, in which each member drafted its own."""
    candidates = tuple(Candidate(draft, (name,), False, 3) for name, draft in drafts.items())
    told = {"candidates": candidates, "weights": WEIGHTS, **changes}
    return replace(round_of(1, 0, ("alpha", text), ("alpha", "beta")), **told)  # type: ignore[arg-type]


def test_members_that_draft_the_same_agree() -> None:
    both = Candidate(" the sea", ("alpha", "beta"), False, 2)
    assert agreement_of([judged(" the sea", {}, candidates=(both,))]) == Agreement(1.0, ())


def test_they_agree_up_to_where_a_draft_leaves_the_segment() -> None:
    found = agreement_of([judged(" the sea", {"alpha": " the sea", "beta": " the sky"})])
    assert found == Agreement(pytest.approx((6 + 2 * 0.75) / 8), (Disagreement(6, 8, 0.75),))


def test_of_what_comes_behind_a_shorter_draft_nothing_is_known_unless_it_ends_there() -> None:
    drafts = {"alpha": " the sea", "beta": " the"}
    assert agreement_of([judged(" the sea", drafts)]) == Agreement(1.0, ())
    ends = (Candidate(" the sea", ("alpha",), False, 2), Candidate(" the", ("beta",), True, 1))
    found = agreement_of([judged(" the sea", {}, candidates=ends)])
    assert found == Agreement(pytest.approx((4 + 4 * 0.75) / 8), (Disagreement(4, 8, 0.75),))


def test_what_a_grammar_dictates_and_what_one_member_writes_alone_says_nothing() -> None:
    dictated = Candidate('{"a": ', ("alpha", "beta"), False, 0)
    assert agreement_of([judged('{"a": ', {}, candidates=(dictated,))]) is None
    assert agreement_of([judged(" the sea", {"alpha": " the sea"}, active=("alpha",))]) is None
    assert agreement_of([]) is None


def test_places_are_those_of_the_answer_and_end_with_it() -> None:
    answer = explained([("alpha", " one two"), ("beta", " three four")])
    found = answer.agreement
    assert found is not None
    assert [(place.start, place.end) for place in found.places] == [(1, 8), (9, 19)]
    assert all(place.share == 0.5 for place in found.places)
    cut = replace(answer, text=answer.text[:12]).agreement
    assert cut is not None
    assert cut.places[-1].end == 12
    assert [record.agreement for record in answer.rounds] == [pytest.approx(4.5 / 8), pytest.approx(6 / 11)]


def test_an_answer_tells_its_agreement_as_a_record_and_in_a_report() -> None:
    answer = explained([("alpha", " one two"), ("beta", " three four")])
    told = json.loads(json.dumps(answer.to_dict()))["agreement"]
    assert told["share"] == pytest.approx(10.5 / 19)
    assert told["places"][0] == {"start": 1, "end": 8, "share": 0.5}
    page = answer.to_html()
    assert "<dt>Agreement</dt><dd>0.553</dd>" in page
    assert "2 places apart" in page
    assert "Agreement 0.562: the share of this segment" in page
    assert "<dt>Agreement</dt>" not in explained([("alpha", " one")], ("alpha",)).to_html()


def test_one_member_has_no_agreement_and_several_have_one(tiny_engine: EnsembleEngine) -> None:
    params = SamplingParams(max_tokens=20)
    several = tiny_engine.generate("Hello", params)
    assert several.agreement is not None
    assert 0 <= several.agreement.share <= 1
    assert all(0 <= p.start < p.end <= len(several.text) and p.share < 1 for p in several.agreement.places)
    assert tiny_engine.generate("Hello", params, members=["chat"]).agreement is None
