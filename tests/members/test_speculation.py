"""Speculation changes the amount of computation, and no answer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from specfuse_shared import (
    EnsembleConfig,
    EnsembleEngine,
    Grammar,
    MemberConfig,
    Message,
    SamplingParams,
    Tool,
    demo_members,
)
from specfuse_shared.errors import ConfigError
from specfuse_shared.events import EnsembleResult
from specfuse_shared.fusion.participants import LeaderPolicy
from specfuse_shared.members.local.session import Guesses, PromptLookup, Record
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.serving.telemetry import MetricsSnapshot
from tests.support.against_naive import EngineOver, local_members, open_session, run_rounds, with_settings
from tests.support.marks import weekly
from tests.support.tiny import byte_level_tokenizer, metaspace_tokenizer, save_model

WAYS = {
    "the defaults": {},
    "a plain mean": {"aggregate": "weighted_mean", "feedback": "uniform"},
    "exits": {"score": "stretch", "feedback": "constant", "exit": "entropy"},
    "the papers'": {"score": "mean_prob", "aggregate": "weighted_mean", "repetition_guard": False},
}
Asked = list[tuple[str, SamplingParams]]
TOOL = Tool("ring", "Ring a bell.", {"type": "object", "properties": {"times": {"type": "integer"}}})
REAL = (
    "Why is the sky blue?",
    "Name three animals of the sea.",
    "Repeat this sentence: the harbour master counts the boats and writes down their names.",
    "Add a docstring to this code and repeat all of it:\ndef mean(values):\n    return sum(values) / len(values)\n",
)
WORDS = ("the", "fox", "dog", "ask", "why", "tides", "follow", "a", "moon", "over", "cold", "seas", "while", "boxes")


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnsembleEngine]:
    """Two similar members that often agree, and a different one."""
    tokenizer, members = byte_level_tokenizer(), []
    for name, kind, seed, noise in (("one", "llama", 1, 0.0), ("two", "llama", 1, 0.02), ("three", "qwen3", 2, 0.0)):
        folder = save_model(kind, tokenizer, tmp_path_factory.mktemp(name), seed=seed)
        if noise:
            _disturb(folder, noise)
        members.append(MemberConfig(str(folder), name=name, dtype="float32"))
    with EnsembleEngine(EnsembleConfig(members, first_segment_tokens=5)) as engine:
        yield engine.load()


def _disturb(folder: Path, noise: float) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.add_(noise * torch.randn_like(parameter) * parameter.std())
    model.save_pretrained(folder)


def requests(count: int, seed: int) -> Asked:
    """Random questions and settings: sampled and greedy, with stops, penalties, lengths and grammars."""
    chance, results = random.Random(seed), []
    for _ in range(count):
        text = " ".join(chance.choices(WORDS, k=chance.randint(3, 30)))
        settings: dict[str, object] = {"max_tokens": chance.randint(4, 24)}
        if chance.random() < 0.6:
            settings |= {"temperature": chance.choice((0.2, 0.7, 1.1)), "seed": chance.randrange(1000)}
            settings |= {"top_p": chance.choice((1.0, 0.9)), "top_k": chance.choice((0, 20))}
        if chance.random() < 0.3:
            settings["repetition_penalty"] = chance.choice((1.05, 1.3))
        if chance.random() < 0.3:
            settings["stop"] = [chance.choice("abcdeot"), "ing"]
        if chance.random() < 0.2:
            settings["grammar"] = Grammar.regex("[a-z ]{3,40}")
        elif chance.random() < 0.3:
            settings["min_tokens"] = chance.randint(1, 4)
        results.append((text, SamplingParams(**settings)))
    return results


def fields_of(result: EnsembleResult) -> tuple[object, ...]:
    return result.text, result.finish_reason, result.stop_sequence, [(r.winner, r.text) for r in result.rounds]


def answers(engine: EnsembleEngine, requests: Asked, **options: Any) -> list[EnsembleResult]:
    results = engine.generate_batch([text for text, _ in requests], [params for _, params in requests], **options)
    assert all(isinstance(result, EnsembleResult) for result in results), results
    return results  # type: ignore[return-value]


def assert_same_with_and_without(
    config: EnsembleConfig, requests: Asked, over: EnsembleEngine | None = None, **options: Any
) -> dict[str, MetricsSnapshot]:
    """Assert equal answers with no more forward passes, and return the metrics of both engines. `over`: the members."""
    values, counted = {}, {}
    for speculation in ("off", "auto"):
        expected = replace(config, speculation=speculation)
        with EngineOver(over, expected) if over is not None else EnsembleEngine(expected) as engine:
            values[speculation] = answers(engine, requests, **options)
            counted[speculation] = engine.metrics()
    for (text, params), off, auto in zip(requests, values["off"], values["auto"], strict=True):
        assert fields_of(auto) == fields_of(off), (text, params)
    saved = [sum(u.forwards for r in results for u in r.usage.members.values()) for results in values.values()]
    assert saved[1] < saved[0] or (options and saved[1] == saved[0]), "a forced call can leave nothing to guess"
    return counted


@pytest.mark.parametrize(
    ("way", "execution"),
    [
        ("the defaults", "paged"),
        *((way, "dynamic") for way in WAYS),
        *(pytest.param(way, "paged", marks=pytest.mark.slow) for way in list(WAYS)[1:]),
    ],
)
def test_answers_are_the_same_with_and_without_speculation(
    trio: EnsembleEngine, way: str, execution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specfuse_shared.members.local.lane.cores", lambda: 1)
    config = replace(trio.config, execution=execution, **WAYS[way])
    counted = assert_same_with_and_without(config, requests(16, seed=len(way)))
    assert sum(counted["auto"].answer_forwards.values()) < sum(counted["off"].answer_forwards.values())
    assert counted["off"].led_rounds == 0
    assert counted["auto"].led_rounds > 0, "on one core members run one after another"


@pytest.fixture(scope="module")
def five(trio: EnsembleEngine, tmp_path_factory: pytest.TempPathFactory) -> EnsembleConfig:
    """The three members and two of other families, one with another kind of tokenizer."""
    folders = {
        "four": save_model("gemma2", metaspace_tokenizer(), tmp_path_factory.mktemp("four"), seed=3),
        "five": save_model("gpt2", byte_level_tokenizer(), tmp_path_factory.mktemp("five"), seed=4),
    }
    more = [MemberConfig(str(folder), name=name, dtype="float32") for name, folder in folders.items()]
    return replace(trio.config, members=[*trio.config.member_configs, *more])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["the defaults", *weekly(*list(WAYS)[1:])])
def test_fifty_answers_of_five_members_are_the_same_with_and_without_speculation(
    five: EnsembleConfig, way: str
) -> None:
    """Two hundred requests in all, a fifth of them with tools."""
    assert_same_with_and_without(replace(five, **WAYS[way]), requests(40, seed=100 + len(way)))
    able = {"grammar": None, "min_tokens": 0, "max_tokens": 90}  # long enough for a call
    calls = [(text, replace(params, **able)) for text, params in requests(10, seed=200 + len(way))]
    assert_same_with_and_without(replace(five, **WAYS[way]), calls, tools=[TOOL], tool_choice="any")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["the defaults", *weekly(*list(WAYS)[1:])])
def test_answers_of_the_demo_are_the_same_with_and_without_speculation(exact_engine: EnsembleEngine, way: str) -> None:
    plain = [(text, SamplingParams(max_tokens=24)) for text in REAL]
    sampled = [(text, SamplingParams(max_tokens=24, temperature=0.8, seed=number)) for number, text in enumerate(REAL)]
    bounded = [
        (REAL[0], SamplingParams(max_tokens=24, stop=["a", ","])),
        (REAL[1], SamplingParams(max_tokens=24, min_tokens=12)),
        ("Is the sky blue?", SamplingParams(max_tokens=8, grammar=Grammar.choice(["yes", "no", "perhaps"]))),
    ]
    config = EnsembleConfig(exact_engine.config.members, **WAYS[way])
    assert_same_with_and_without(config, [*plain, *sampled, *bounded], exact_engine)
    calls = [("Ring the bell twice.", SamplingParams(max_tokens=40))]
    assert_same_with_and_without(config, calls, exact_engine, tools=[TOOL], tool_choice="any")


@pytest.mark.parametrize("chance", [{}, {"temperature": 0.6, "seed": 3}, {"temperature": 0.6, "seed": 4}], ids=str)
def test_a_leader_is_recorded_and_changes_nothing(trio: EnsembleEngine, chance: dict[str, float]) -> None:
    members = local_members(trio)
    rounds: dict[str, Any] = {}
    for speculation in ("off", "auto"):
        config = with_settings(trio.config, speculation=speculation, segment_tokens=3)
        rounds[speculation] = []
        for text in ("the fox asks why", "tides follow a cold moon", "jugs jump over the dog while boxes ask"):
            params = SamplingParams(max_tokens=60, **chance)
            answer = open_session(config, members, [Message("user", text)], params)
            rounds[speculation] += run_rounds(answer, 12)
            answer.release()
    assert [(r.winner, r.text) for r in rounds["auto"]] == [(r.winner, r.text) for r in rounds["off"]]
    assert all(r.leader in r.active for r in rounds["auto"] if len(r.active) > 1)
    assert not any(r.leader for r in rounds["off"])
    texts = {way: [{c.text: set(c.drafters) for c in r.candidates} for r in result] for way, result in rounds.items()}
    assert texts["auto"] == texts["off"]


def test_counters_include_guesses(trio: EnsembleEngine) -> None:
    with EnsembleEngine(replace(trio.config, speculation="auto")) as engine:
        result = engine.generate("the fox and the dog ask why", SamplingParams(max_tokens=30))
        counted = engine.metrics()
    for name, usage in result.usage.members.items():
        assert counted.accepted_guesses[name] == usage.accepted
        assert counted.rejected_guesses[name] == usage.guessed - usage.accepted
        assert counted.answer_forwards[name] == usage.forwards
        assert counted.answer_tokens[name] == usage.answer


@pytest.mark.slow
def test_a_leaders_draft_saves_forward_passes_of_agreeing_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members of one model, without lookup: the follower verifies the leader's draft in one forward pass."""
    monkeypatch.setattr(PromptLookup, "find", lambda *args: ((), 0))
    # with measured seconds, equal members would swap the lead
    monkeypatch.setattr(LeaderPolicy, "_steps", lambda lead, participants, names: dict.fromkeys(names, 1.0))
    one = demo_members(dtype="float32")[0]
    config = EnsembleConfig(
        [replace(one, name="one"), replace(one, name="again")], segment_tokens=8, first_segment_tokens=None
    )
    requests = [(text, SamplingParams(max_tokens=24)) for text in REAL]
    forwards = {}
    with EnsembleEngine(config) as loaded:
        for speculation in ("off", "auto"):
            with EngineOver(loaded, replace(config, speculation=speculation)) as engine:
                results = answers(engine, requests)
            forwards[speculation] = [sum(r.usage.members[name].forwards for r in results) for name in ("one", "again")]
    assert min(forwards["auto"]) < 0.4 * min(forwards["off"])


def test_members_in_paged_execution_guess_or_draft_ahead(trio: EnsembleEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with EnsembleEngine(replace(trio.config, speculation="auto", execution="paged", max_concurrent=1)) as engine:
        drafts: list[Mock] = []
        for member in local_members(engine.load()):
            packed = member.runner.packed
            assert packed is not None
            drafts.append(Mock(wraps=packed.draft))
            monkeypatch.setattr(packed, "draft", drafts[-1])
        prompts = ("the fox asks why", "tides follow")
        results = [engine.generate(text, SamplingParams(max_tokens=24)) for text in prompts]
    usages = [usage for result in results for usage in result.usage.members.values()]
    assert sum(usage.accepted for usage in usages) > 0
    assert any(draft.called for draft in drafts)


def test_an_unknown_speculation_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="speculation"):
        EnsembleConfig(["a"], speculation="always")


def test_guesses_need_a_higher_acceptance_rate_in_shared_passes(
    trio: EnsembleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = local_members(trio)[0]
    with monkeypatch.context() as changed:
        for sharing, cost in ((1, 0.06), (8, 0.34), (32, 0.67)):
            changed.setattr(member, "sharing", sharing)
            assert round(member.guess_cost, 2) == cost
        changed.setattr(member, "devices", {"cuda:0": 1.0})
        assert member.guess_cost == 0.06, "a GPU waits for its weights"
    prompts = [" ".join(random.Random(n).choices(WORDS, k=24)) for n in range(8)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    alone = [trio.generate(question, params) for question in prompts]
    together = trio.generate_batch(prompts, params)
    assert [result.text for result in together] == [result.text for result in alone]
    assert 0 < _guessed(together) < _guessed(alone)


def _guessed(results: Sequence[EnsembleResult]) -> int:
    return sum(usage.guessed for result in results for usage in result.usage.members.values())


def test_a_lookup_finds_the_continuation_of_the_longest_equal_end() -> None:
    lookup = PromptLookup()
    lookup.read([1, 2, 3, 4, 9, 2, 3, 5, 6], 0)
    assert lookup.find([2, 3], 2) == ([5, 6], 2)
    assert lookup.find([1, 2, 3], 3) == ([4, 9, 2], 3)
    assert lookup.find([7, 8], 3) == ((), 0)
    lookup.read([7], 7)  # the answer was re-encoded from there
    assert lookup.find([2, 3], 2) == ([7], 2)
    lookup.read([1, 2, 9, 256, 512, 0, 7], 0)  # its bytes hold the bytes of 1 and 2 a second time, across three ids
    assert lookup.find([1, 2], 2) == ([9, 256], 2)


def test_the_length_of_guesses_follows_their_acceptance() -> None:
    guesses = Guesses(barred={99})
    guesses.read([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4], 0)
    before = [1, 2, 3, 4]
    hopeful = guesses.after(before, Branch(0, ()), slots=24, cost=0.06)
    assert hopeful.tokens[:3] == (5, 6, 7)
    assert len(guesses.after(before, Branch(0, ()), slots=24, cost=0.5).tokens) == 3, "0.8 ** 4 is less"
    for _ in range(30):
        guesses.records[4].add(False)
    assert len(guesses.after(before, Branch(0, ()), slots=24, cost=0.06).tokens) < len(hopeful.tokens)
    assert not guesses.after(before, Branch(0, ()), slots=0, cost=0.06).tokens
    record = Record(0.5)
    for _ in range(50):
        record.add(True)
    assert record.rate > 0.9


def test_accepted_guesses_are_counted_once_and_only_for_chosen_drafts() -> None:
    guesses = Guesses(barred=())
    guesses.read([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], 0)
    guess = guesses.after([1, 2, 3, 4], Branch(0, ()), slots=3, cost=0.06)
    guesses.feed(Branch(0, ()), guess, 0)
    assert guesses.guessed == len(guess.tokens) == 3
    guesses.observe((), (), 5)
    guesses.observe((), (), 5)
    guesses.observe((), (5,), 7)
    guesses.observe((), (5, 7), 1)
    assert guesses.accepted == 1
