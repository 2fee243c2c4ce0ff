"""Speculation changes how much is computed, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specfuse_shared import EnsembleConfig, EnsembleEngine, Grammar, MemberConfig, Message, SamplingParams
from specfuse_shared.errors import ConfigError
from specfuse_shared.members.guesses import Guesses, PromptLookup, Record
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.results import EnsembleResult
from tests.engine.comparing import local_members, open_session, run_rounds, with_settings
from tests.engine.tiny import byte_level_tokenizer, save_model

CERTAIN = {"score": "stretch", "aggregate": "weighted_mean", "feedback": "uniform", "exit": "never"}
WAYS = {
    "the defaults": {},
    "certain rounds": CERTAIN,
    "exits": {"score": "stretch", "feedback": "constant", "exit": "entropy"},
    "the papers'": {"score": "mean_prob", "aggregate": "weighted_mean", "repetition_guard": False},
}
WORDS = ("the", "fox", "dog", "ask", "why", "tides", "follow", "a", "moon", "over", "cold", "seas", "while", "boxes")


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnsembleEngine]:
    """Two members that are nearly one model and agree often, and one that is not."""
    tokenizer, members = byte_level_tokenizer(), []
    for name, kind, seed, noise in (("one", "llama", 1, 0.0), ("two", "llama", 1, 0.02), ("three", "qwen3", 2, 0.0)):
        folder = save_model(kind, tokenizer, tmp_path_factory.mktemp(name), seed=seed)
        if noise:
            _disturb(folder, noise)
        members.append(MemberConfig(str(folder), name=name, dtype="float32"))
    with EnsembleEngine(EnsembleConfig(members=members)) as engine:
        yield engine.load()


def _disturb(folder: Path, noise: float) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter += noise * torch.randn_like(parameter) * parameter.std()
    model.save_pretrained(folder)


def requests(count: int, seed: int) -> list[tuple[str, SamplingParams]]:
    """Questions and settings at random: sampled and greedy, with stops, penalties, lengths and grammars."""
    chance, found = random.Random(seed), []
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
        found.append((text, SamplingParams(**settings)))  # type: ignore[arg-type]
    return found


def told(result: EnsembleResult) -> tuple[object, ...]:
    return result.text, result.finish_reason, result.stop_sequence, [(r.winner, r.text) for r in result.rounds]


def answers(engine: EnsembleEngine, asked: list[tuple[str, SamplingParams]]) -> list[EnsembleResult]:
    found = engine.generate_batch([text for text, _ in asked], [params for _, params in asked])
    assert all(isinstance(result, EnsembleResult) for result in found), found
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_the_same_with_and_without(trio: EnsembleEngine, way: str) -> None:
    asked, found = requests(16, seed=len(way)), {}
    for speculation in ("off", "auto"):
        config = replace(trio.config, speculation=speculation, **WAYS[way])
        with EnsembleEngine(config) as engine:
            found[speculation] = answers(engine, asked)
            counted = engine.metrics()
        assert (counted.led_rounds > 0) == (speculation == "auto"), "16 answers wait for two lanes at most"
    for off, auto in zip(found["off"], found["auto"], strict=True):
        assert told(auto) == told(off)
    saved = [sum(u.forwards for r in results for u in r.usage.members.values()) for results in found.values()]
    assert saved[1] < saved[0]


@pytest.mark.parametrize("chance", [{}, {"temperature": 0.6, "seed": 3}, {"temperature": 0.6, "seed": 4}], ids=str)
def test_certain_rounds_are_told_of_and_change_nothing(trio: EnsembleEngine, chance: dict[str, float]) -> None:
    members, rounds = local_members(trio), {}
    for speculation in ("off", "auto"):
        config = with_settings(trio.config, speculation=speculation, segment_tokens=3, **CERTAIN)
        rounds[speculation] = []
        for text in ("the fox asks why", "tides follow a cold moon", "jugs jump over the dog while boxes ask"):
            params = SamplingParams(max_tokens=60, **chance)  # type: ignore[arg-type]
            answer = open_session(config, members, [Message("user", text)], params)
            rounds[speculation] += run_rounds(answer, 12)
            answer.release()
    assert [(r.winner, r.text) for r in rounds["auto"]] == [(r.winner, r.text) for r in rounds["off"]]
    assert all(r.leader in r.active for r in rounds["auto"] if len(r.active) > 1)
    assert not any(r.certain or r.leader for r in rounds["off"])
    for off, auto in zip(rounds["off"], rounds["auto"], strict=True):
        heard = {c.text: set(c.drafters) for c in auto.candidates}
        every = {c.text: set(c.drafters) for c in off.candidates}
        assert heard == every or (auto.certain and heard.items() <= every.items() and len(heard) == 1)


def test_counters_tell_of_guesses(trio: EnsembleEngine) -> None:
    with EnsembleEngine(replace(trio.config, speculation="auto")) as engine:
        result = engine.generate("the fox and the dog ask why", SamplingParams(max_tokens=30))
        counted = engine.metrics()
    for name, usage in result.usage.members.items():
        assert counted.accepted_guesses[name] == usage.accepted
        assert counted.rejected_guesses[name] == usage.guessed - usage.accepted
        assert counted.answer_forwards[name] == usage.forwards
        assert counted.answer_tokens[name] == usage.answer


def test_members_that_draft_ahead_make_no_guesses(trio: EnsembleEngine) -> None:
    with EnsembleEngine(replace(trio.config, speculation="auto", execution="static")) as engine:
        result = engine.generate("the fox and the dog ask why", SamplingParams(max_tokens=12))
    assert not any(usage.guessed for usage in result.usage.members.values())
    assert not any(record.leader for record in result.rounds)


def test_an_unknown_way_to_speculate_is_refused() -> None:
    with pytest.raises(ConfigError, match="speculation"):
        EnsembleConfig(["a"], speculation="always")


def test_a_lookup_finds_what_followed_the_longest_equal_end() -> None:
    lookup = PromptLookup()
    lookup.read([1, 2, 3, 4, 9, 2, 3, 5, 6], 0)
    assert lookup.find([2, 3], 2) == ([5, 6], 2)
    assert lookup.find([1, 2, 3], 3) == ([4, 9, 2], 3)
    assert lookup.find([7, 8], 3) == ((), 0)
    lookup.read([7], 7)  # the answer was encoded anew from there
    assert lookup.find([2, 3], 2) == ([7], 2)


def test_guesses_are_as_long_as_they_come_true() -> None:
    guesses = Guesses(barred={99})
    guesses.read([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4], 0)
    before = [1, 2, 3, 4]
    hopeful = guesses.behind(before, Branch(0, ()), room=24)
    assert hopeful.tokens[:3] == (5, 6, 7)
    for _ in range(30):
        guesses.records[4].add(False)
    assert len(guesses.behind(before, Branch(0, ()), room=24).tokens) < len(hopeful.tokens)
    assert not guesses.behind(before, Branch(0, ()), room=0).tokens
    record = Record(0.5)
    for _ in range(50):
        record.add(True)
    assert record.rate > 0.9


def test_accepted_guesses_are_counted_once_and_only_where_they_were_chosen() -> None:
    guesses = Guesses(barred=())
    guesses.read([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], 0)
    guess = guesses.behind([1, 2, 3, 4], Branch(0, ()), room=3)
    guesses.feed(Branch(0, ()), guess, 0)
    assert guesses.guessed == len(guess.tokens) == 3
    guesses.observe((), (), 5)
    guesses.observe((), (), 5)
    guesses.observe((), (5,), 7)
    guesses.observe((), (5, 7), 1)
    assert guesses.accepted == 1
