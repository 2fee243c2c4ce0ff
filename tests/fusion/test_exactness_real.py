"""The real demo members in float32 against the naive, cache-less round."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from specfuse_shared import EnsembleEngine, Message, SamplingParams
from specfuse_shared.members.local.batching import run_stage
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.members.token_tree import Branch
from tests.support.against_naive import (
    SCORES,
    assert_equals_naive,
    local_members,
    open_session,
    run_rounds,
    with_settings,
)
from tests.support.captured import paged_runner
from tests.support.marks import weekly

PROMPTS = {
    "english": "Why is the sky blue? Explain it to a child.",
    "code": "Write a Python function with nested if statements that returns the sign of a number:\n\n"
    "def sign(x):\n    if x > 0:\n        return 1\n",
    "chinese": "请用中文介绍一下北京的历史，写三句话。",
    "emoji": "Continue this list of emoji with their names: 🎉 party, 🐱 cat, 👩‍🚀 astronaut, 🌍 earth,",
}


def question(text: str) -> list[Message]:
    return [Message("user", text)]


@pytest.mark.parametrize("kind", ["english", "code", *weekly("chinese", "emoji")])
def test_greedy_rounds_equal_the_naive_round(exact_engine: EnsembleEngine, kind: str) -> None:
    score = SCORES[1] if kind == "code" else {}
    config = with_settings(exact_engine.config, exit="never", segment_tokens=8, **score)
    params = SamplingParams(max_tokens=200)
    records = assert_equals_naive(config, local_members(exact_engine), question(PROMPTS[kind]), params, rounds=3)
    assert records


@pytest.mark.parametrize("kind", ["chinese", *weekly("english")])
def test_seeded_rounds_equal_the_naive_round(exact_engine: EnsembleEngine, kind: str) -> None:
    config = with_settings(exact_engine.config, exit="never", segment_tokens=6)
    params = SamplingParams(max_tokens=200, temperature=0.9, top_p=0.9, top_k=50, min_p=0.02, seed=11)
    assert_equals_naive(config, local_members(exact_engine), question(PROMPTS[kind]), params, rounds=3)


def test_feedback_and_exit_equal_the_naive_round(exact_engine: EnsembleEngine) -> None:
    config = with_settings(exact_engine.config, feedback="constant", exit="entropy", segment_tokens=4)
    params = SamplingParams(max_tokens=200, repetition_penalty=1.1)
    records = assert_equals_naive(config, local_members(exact_engine), question(PROMPTS["english"]), params, rounds=6)
    assert len({tuple(r.weights.values()) for r in records}) > 1, "feedback must have moved the weights"


@pytest.mark.weekly
@pytest.mark.parametrize("chance", [{}, {"temperature": 0.8, "seed": 4}], ids=["greedy", "seeded"])
def test_a_stop_string_cuts_the_answer_without_changing_it(
    exact_engine: EnsembleEngine, chance: dict[str, float]
) -> None:
    params = SamplingParams(max_tokens=24, **chance)
    whole = exact_engine.generate(PROMPTS["english"], params)
    borders = [r.start for r in whole.rounds[1:]]
    for start in (borders[0] - 2, borders[-1] - 1):
        stops = [whole.text[start + 1 : start + 5], whole.text[start : start + 4]]
        at, stop = min((whole.text.find(stop), stop) for stop in stops)
        result = exact_engine.generate(PROMPTS["english"], replace(params, stop=stops))
        assert (result.text, result.stop_sequence) == (whole.text[:at], stop)


@pytest.mark.weekly
def test_a_prompt_beyond_the_sliding_window_equals_the_naive_round(exact_engine: EnsembleEngine) -> None:
    facts = " ".join(f"Room {n} holds {n * 7 % 31} telescopes and {n * 3 % 17} maps." for n in range(1, 95))
    messages = question(f"{facts}\n\nWhich rooms hold more than twenty telescopes? Give reasons.")
    members = local_members(exact_engine)
    assert min(len(m.encode_prompt(messages)) for m in members) >= 1200
    config = with_settings(exact_engine.config, exit="never", segment_tokens=2)
    assert_equals_naive(config, members, messages, SamplingParams(max_tokens=200), rounds=1)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (0, "Write an essay of five paragraphs about the moon."),
        *weekly((1, "Write a letter to a friend about a week at the sea, day by day.")),
    ],
)
def test_one_member_alone_equals_its_own_generate(exact_engine: EnsembleEngine, index: int, text: str) -> None:
    member = local_members(exact_engine)[index]
    prompt = member.encode_prompt(question(text))
    session = member.open(prompt, SamplingParams(max_tokens=45), seed=0)
    session._turn_ends = ()
    run_stage(session.prefill())
    drafts = [run_stage(session.draft_alone(9, number)) for number in range(1, 6)]
    with torch.inference_mode():
        ids = member.runner.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=45, do_sample=False
        )[0, len(prompt) :].tolist()
    assert len(ids) == 45, "a longer answer is needed to compare"
    assert list(session.sequence.answer) == ids
    assert "".join(d.text for d in drafts) == member.codec.decode(ids)


@pytest.fixture(scope="module")
def paged_members(exact_engine: EnsembleEngine) -> list[LocalMember]:
    """The same members in paged execution."""
    results = [copy.copy(member) for member in local_members(exact_engine)]
    for member in results:
        member._runner = paged_runner(member.runner.model, member.runner)
    return results


@pytest.mark.parametrize("kind", ["english", *weekly("code", "chinese", "emoji")])
def test_both_executions_give_the_same_rounds(
    exact_engine: EnsembleEngine, paged_members: list[LocalMember], kind: str
) -> None:
    config = with_settings(exact_engine.config, exit="never", segment_tokens=6)
    chance = {} if kind in ("english", "emoji") else {"temperature": 0.9, "top_p": 0.9, "seed": 5}
    params = SamplingParams(max_tokens=200, **chance)
    results = []
    for members in (local_members(exact_engine), paged_members):
        session = open_session(config, members, question(PROMPTS[kind]), params)
        results.append(run_rounds(session, 2))
        session.release()
    for dynamic, paged in zip(*results, strict=True):
        assert (paged.text, paged.winner) == (dynamic.text, dynamic.winner)
        for one, of_dynamic in zip(paged.candidates, dynamic.candidates, strict=True):
            assert (one.text, one.drafters, one.tokens) == (of_dynamic.text, of_dynamic.drafters, of_dynamic.tokens)
            assert one.scores == pytest.approx(of_dynamic.scores, abs=1e-4)


def test_cached_ids_are_prompt_plus_canonical_answer_and_predict_like_a_fresh_pass(
    exact_engine: EnsembleEngine,
) -> None:
    members = local_members(exact_engine)
    config = with_settings(exact_engine.config, exit="never", segment_tokens=7, speculation="off")  # nothing spare
    messages = question(PROMPTS["code"])
    params = SamplingParams(max_tokens=200, temperature=1.0, seed=3, ignore_eos=True)
    session = open_session(config, members, messages, params)
    run_rounds(session, 4)
    assert not session.finished
    for member in members:
        member_session = session.participants[member.name].session
        run_stage(member_session.commit(session.rounds[-1].text))  # with which the next round would begin
        sequence: Any = member_session.sequence
        assert list(sequence.prompt) == member.encode_prompt(messages)
        assert list(sequence.answer) == member.codec.encode(session.text)
        assert sequence._row.used == len(sequence.prompt) + len(sequence.answer)
        with torch.inference_mode():
            fresh = member.runner.plain([*sequence.prompt, *sequence.answer])[-1]
            retained = sequence.logits(Branch(len(sequence.answer), ()))
        assert float((fresh.log_softmax(-1) - retained.log_softmax(-1)).abs().max()) < 1e-3


def test_the_order_of_members_changes_no_candidate_and_no_score(exact_engine: EnsembleEngine) -> None:
    members: list[LocalMember] = local_members(exact_engine)
    params = SamplingParams(max_tokens=60)
    tables = []
    for order in (members, members[::-1]):
        config = with_settings(exact_engine.config, exit="never", reference=members[0].name)
        session = open_session(config, order, question(PROMPTS["english"]), params)
        rounds = run_rounds(session, 3)
        session.release()
        tables.append([{c.text: dict(c.scores) for c in r.candidates} for r in rounds])
    for one, reordered in zip(*tables, strict=True):
        assert one.keys() == reordered.keys()
        for text, scores in one.items():
            assert scores == pytest.approx(reordered[text], abs=1e-4)
