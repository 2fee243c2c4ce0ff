"""`min_tokens` and `ignore_eos`: answers of a given length, although members would end them earlier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specfuse_shared import EnsembleConfig, EnsembleEngine, Grammar, MemberConfig, Message, SamplingParams
from specfuse_shared.errors import ConfigError
from tests.support.against_naive import local_members
from tests.support.tiny import save_pair

QUESTION = [Message("user", "How do the tides follow the moon?")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two members with many tokens that end their turn: greedy decoding soon meets one."""
    return list(save_pair(tmp_path_factory).values())


@pytest.fixture(scope="module")
def config(folders: list[Path]) -> EnsembleConfig:
    ends = tuple(range(300, 420))
    members = [MemberConfig(str(f), name=f.name, stop_token_ids=ends, dtype="float32") for f in folders]
    return EnsembleConfig(members, segment_tokens=6, first_segment_tokens=None, exit="never")


@pytest.fixture(scope="module", params=["dynamic", "paged"])
def engine(request: pytest.FixtureRequest, config: EnsembleConfig) -> Iterator[EnsembleEngine]:
    with EnsembleEngine(replace(config, execution=request.param)) as made:
        yield made.load()


def test_an_answer_has_at_least_min_tokens_and_with_ignore_eos_all(engine: EnsembleEngine) -> None:
    free = engine.generate(QUESTION, SamplingParams(max_tokens=60))
    assert free.finish_reason == "stop"
    assert free.usage.completion_tokens < 20
    for min_tokens in (1, 20, 33, 60):
        result = engine.generate(QUESTION, SamplingParams(max_tokens=60, min_tokens=min_tokens))
        assert min_tokens <= result.usage.completion_tokens <= 60
        assert result.finish_reason == ("length" if result.usage.completion_tokens == 60 else "stop")
    whole = engine.generate(QUESTION, SamplingParams(max_tokens=60, ignore_eos=True))
    assert (whole.finish_reason, whole.usage.completion_tokens) == ("length", 60)
    assert not any(candidate.ends for record in whole.rounds for candidate in record.candidates)


def test_a_seeded_answer_has_at_least_min_tokens(engine: EnsembleEngine) -> None:
    params = SamplingParams(max_tokens=60, min_tokens=50, temperature=1.0, seed=3)
    result = engine.generate(QUESTION, params)
    assert 50 <= result.usage.completion_tokens <= 60
    assert engine.generate(QUESTION, params).text == result.text


@pytest.mark.parametrize("min_tokens", [5, 17, 40])
def test_a_lone_member_with_min_tokens_equals_its_own_generate(config: EnsembleConfig, min_tokens: int) -> None:
    with EnsembleEngine(replace(config, members=config.members[:1])) as engine:
        result = engine.generate(QUESTION, SamplingParams(max_tokens=40, min_tokens=min_tokens))
        [member] = local_members(engine)
        prompt = torch.tensor([member.encode_prompt(QUESTION)])
        with torch.inference_mode():
            ids = member.runner.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=40,
                min_new_tokens=min_tokens,
                eos_token_id=list(member.stop_ids),
                pad_token_id=0,
            )[0, prompt.shape[1] :].tolist()
    ended = ids[-1] in member.stop_ids
    assert result.text == member.codec.decode(ids[: len(ids) - ended]).rstrip("\ufffd")
    assert result.usage.completion_tokens == len(ids) - ended >= min_tokens


def test_stop_strings_end_an_answer_that_ignores_ends_of_turn(engine: EnsembleEngine) -> None:
    whole = engine.generate(QUESTION, SamplingParams(max_tokens=60, ignore_eos=True)).text
    stop = whole[20:23]
    result = engine.generate(QUESTION, SamplingParams(max_tokens=60, min_tokens=60, ignore_eos=True, stop=stop))
    assert result.text == whole[: whole.index(stop)]
    assert result.stop_sequence == stop


def test_contradictory_lengths_are_refused(tiny_engine: EnsembleEngine) -> None:
    for settings in ({"min_tokens": 3}, {"ignore_eos": True}):
        with pytest.raises(ConfigError, match="which decide when an answer is complete"):
            SamplingParams(grammar=Grammar.choice(["yes"]), **settings)
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
        with pytest.raises(ConfigError, match="which decide when an answer is complete"):
            tiny_engine.generate("x", SamplingParams(**settings), tools=[tool])
    with pytest.raises(ConfigError, match=r"min_tokens must be between 0 and 5, not 6"):
        SamplingParams(max_tokens=5, min_tokens=6)


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=30, ignore_eos=True), SamplingParams(max_tokens=60)])
def test_stop_ids_outside_the_vocabulary_are_ignored(config: EnsembleConfig, params: SamplingParams) -> None:
    """The default ids of an architecture can lie outside a smaller vocabulary."""
    beyond = [replace(m, stop_token_ids=(*m.stop_token_ids, 151_329)) for m in config.member_configs]
    with EnsembleEngine(config) as plain, EnsembleEngine(replace(config, members=beyond)) as engine:
        expected, result = plain.generate(QUESTION, params), engine.generate(QUESTION, params)
        assert (result.text, result.finish_reason) == (expected.text, expected.finish_reason)
        assert not any(151_329 in report.stop_token_ids for report in engine.describe())
