"""Collected first rounds equal the engine's rounds, and repeated elections give the same winners."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
from elections import POLICIES, SEGMENT, Ballot, Claim, Collector, _decided, collector, is_own, rules_for
from variants import Lottery, Override, StretchWithoutEnd

from specfuse_shared import EnsembleConfig, EnsembleEngine
from specfuse_shared.comparing import Question
from specfuse_shared.policies import CandidateLogprobs, Stretch

QUESTION = Question("What does the log say of the moon?", references=["the moon is full"], kind="text")
CHOICE = Question("What is full?", references=["the moon"], choices=["the sea", "the moon", "the log"], kind="choice")
SIZED = next(iter(POLICIES.values()))


@pytest.fixture(scope="module")
def pair_settings(tiny_engine: EnsembleEngine) -> EnsembleConfig:
    return replace(tiny_engine.config, first_segment_tokens=SEGMENT, early_margin=0)


@pytest.fixture(scope="module")
def collecting(pair_settings: EnsembleConfig) -> Iterator[Collector]:
    with collector(pair_settings, ["Be brief."]) as opened:
        yield opened


@pytest.mark.parametrize("question", [QUESTION, CHOICE], ids=["text", "choice"])
def test_a_ballot_equals_the_engines_first_round(
    question: Question, collecting: Collector, pair_settings: EnsembleConfig
) -> None:
    ballot = collecting.ballot(question, 0, 0)
    names = [name for name in ballot.voters if not name.endswith("/2")]
    with EnsembleEngine(pair_settings) as engine:
        first = engine.generate(question.prompt, replace(question.params(), max_tokens=SEGMENT)).rounds[0]
    draft_of = {name: i for i, claims in enumerate(ballot.claims) for name in names if Claim(name) in claims}
    assert {c.text: set(c.drafters) for c in first.candidates} == {
        ballot.table[0][i].text: {n for n in names if draft_of[n] == i} for i in draft_of.values()
    }
    rows = sorted(set(draft_of.values()))
    assert question is QUESTION or len(rows) > 1, "equal choices show no difference"
    for name in names:
        scores = Stretch()([ballot.table[ballot.voters.index(name)][i] for i in rows])
        scores = [score / sum(scores) for score in scores] if question is CHOICE else scores
        reports = {c.text: c.scores[name] for c in first.candidates}
        assert [reports[ballot.table[0][i].text] for i in rows] == pytest.approx(scores, abs=1e-5)


def test_further_drafts_begin_differently_and_are_no_candidates_by_default(collecting: Collector) -> None:
    plain, more = collecting.ballot(QUESTION, 0, 0), collecting.ballot(QUESTION, 2, 1)
    assert len(more.claims) > len(plain.claims) > 0
    kinds = [claim.kind for claims in more.claims for claim in claims]
    assert set(kinds) == {"own", "unsure", "sampled"}
    for name in more.voters:
        plain_draft = next(
            row.text for row, claims in zip(more.table[0], more.claims, strict=True) if Claim(name) in claims
        )
        gaps = [c.gap for claims in more.claims for c in claims if c.author == name and c.kind == "unsure"]
        unsure_drafts = [
            row.text
            for row, claims in zip(more.table[0], more.claims, strict=True)
            if any(c.author == name and c.kind == "unsure" for c in claims)
        ]
        assert all(0 <= gap <= 1 for gap in gaps)
        assert all(text != plain_draft for text in unsure_drafts)
    assert more.chosen(more.voters, *SIZED, "rougeL") == pytest.approx(plain.chosen(plain.voters, *SIZED, "rougeL"))


def test_a_choice_has_the_prompt_of_compare(collecting: Collector) -> None:
    ballot = collecting.ballot(CHOICE, 0, 2)
    assert {row.text for row in ballot.table[0]} <= set("ABC")
    assert {claim.kind for claims in ballot.claims for claim in claims} == {"own", "sampled"}


def test_a_ballot_can_be_written_and_read(collecting: Collector) -> None:
    ballot = collecting.ballot(QUESTION, 1, 0)
    assert Ballot.read(json.loads(json.dumps(asdict(ballot)))) == ballot


def _ballot(*rows: list[CandidateLogprobs]) -> Ballot:
    metrics = [{"f1": float(n)} for n in range(len(rows[0]))]
    return Ballot(["a", "b"], [1, 1], [[Claim("a")], [Claim("b")]], metrics, rows)


def _logprobs(*chances: float, ends: bool = False) -> CandidateLogprobs:
    text = "x" * (len(chances) - ends)
    return CandidateLogprobs(text, ends, tuple(map(math.log, chances)), (1,) * len(chances))


def test_clear_elections_are_decided_early_unless_a_draft_has_ended() -> None:
    sure, doubted = _logprobs(*[0.9] * 20), _logprobs(*[0.5] * 20)
    clear = _ballot([sure, doubted], [sure, doubted])
    assert _decided(clear, ["a", "b"], (8, 8, False)) == (0, 5)
    assert _decided(clear, ["a", "b"], (math.inf, 8, False)) == (0, 10)
    assert _decided(clear, ["a", "b"], (math.inf, math.inf, False)) == (0, 20)
    short = _ballot([_logprobs(0.9, 0.9, ends=True), doubted], [_logprobs(0.9, 0.9, ends=True), doubted])
    assert _decided(short, ["a", "b"], (1, 1, False)) == (0, 5)
    assert _decided(short, ["a", "b"], (1, 1, True)) == (0, 20)


def test_early_decisions_weight_votes_by_the_given_power() -> None:
    ours, theirs = _logprobs(*[0.9] * 20), _logprobs(*[0.5] * 20)
    split = replace(_ballot([ours, theirs], [theirs, ours]), sizes=[1, 100])
    assert _decided(split, ["a", "b"], (8, 8, False), 1.5) == (1, 5)
    assert _decided(split, ["a", "b"], (8, 8, False), 0.0)[1] == 20


def test_members_outside_the_ensemble_neither_draft_nor_vote() -> None:
    ballot = _ballot([_logprobs(0.9), _logprobs(0.1)], [_logprobs(0.01), _logprobs(0.95)])
    assert ballot.chosen(["a"], *SIZED, "f1") == 0
    assert ballot.chosen(["b"], *SIZED, "f1") == 1
    assert ballot.chosen(["a", "b"], *SIZED, "f1", is_own) == 1


def test_a_key_has_the_votes_of_all_its_drafts() -> None:
    unlike, twice = _logprobs(0.9), _logprobs(0.5)
    ballot = _ballot([unlike, twice], [unlike, twice])
    again = replace(ballot, claims=[[Claim("a")], [Claim("b"), Claim("b", "sampled")]])
    assert [each.keyed(["a", "b"], 1.5, "f1", lambda claim: True) for each in (ballot, again)] == [0, 1]
    assert again.keyed(["a", "b"], 1.5, "f1", is_own) == 0
    assert again.keyed(["b"], 1.5, "f1", is_own) == 1


def test_the_leads_draft_counts_more_and_others_override_it_if_they_are_surer() -> None:
    lead, rival = _logprobs(0.5), _logprobs(0.7)
    ballot = _ballot([lead, rival], [lead, rival])
    policy = Override(0, 1.5)
    assert policy([[0.5, 0.7], [0.5, 0.7]], [0.5, 0.5], [[0], [1]]) == pytest.approx([0.75, 0.7])
    rules = rules_for(["a", "b"])
    reports = {name: rule(ballot, ["a", "b"], 0.0, "f1") for name, rule in rules.items()}
    assert reports["seconded mean: the default"] == 1
    assert reports["a leads, × 1.5"] == 0
    assert reports["b leads, × 1.5"] == 1
    assert reports["lottery by weight: its mean"] == pytest.approx(0.5)
    assert reports["the better draft by references: a ceiling"] == 1


def test_a_sure_lead_is_not_voted_on() -> None:
    sure, surer, doubted = _logprobs(0.6), _logprobs(0.9), _logprobs(0.4)
    skipping = rules_for(["a", "b"])["a leads, no vote if it is sure"]
    assert skipping(_ballot([sure, surer], [sure, surer]), ["a", "b"], 0.0, "f1") == 0
    assert skipping(_ballot([doubted, surer], [doubted, surer]), ["a", "b"], 0.0, "f1") == 1


def test_the_lottery_draws_by_weight_and_is_repeatable() -> None:
    drafters, weights = [[0], [1]], [0.8, 0.2]
    drawn = [Lottery()([[n / 500, 0.5], [0.5, 0.5]], weights, drafters) for n in range(500)]
    assert drawn == [Lottery()([[n / 500, 0.5], [0.5, 0.5]], weights, drafters) for n in range(500)]
    assert 350 < sum(votes[0] for votes in drawn) < 450
    assert Lottery()([[0.1], [0.9]], weights, [[0, 1]]) == [1.0]


def test_without_the_end_of_the_turn_only_the_text_counts() -> None:
    over, open_ = _logprobs(0.9, 0.001, ends=True), _logprobs(0.8, 0.8)
    assert StretchWithoutEnd()([over, open_]) == pytest.approx([0.9, 0.8])
    assert Stretch()([over, open_]) == pytest.approx([0.9 * 0.001, 0.8 * 0.999])
