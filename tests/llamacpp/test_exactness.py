"""Members on llama.cpp against the naive round over the same library, and against the same weights in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from specfuse_shared import EnsembleConfig, EnsembleEngine, Grammar, Message, SamplingParams
from specfuse_shared.events import FinishEvent
from tests.support.against_naive import answer_of, assert_equals_naive, open_session, run_rounds
from tests.support.llamacpp import FILES, member_config, members_of
from tests.support.naive import NaiveMember

pytest.importorskip("llama_cpp")

QUESTION = [Message("user", "How do the tides follow the moon? Name 3 ships, ça va 北京. " * 2 + "Say it in a word.")]
PAIRS = [("llama", "spoken"), ("qwen2", "window"), ("llama", "recurrent"), ("spoken", "qwen2", "window")]


class NaiveLlama(NaiveMember):
    """Computes every token and score by reading the whole text with an empty context."""

    @cached_property
    def context(self) -> Any:
        from specfuse_shared.members.llamacpp.context import LlamaContext

        return LlamaContext("naive", self.m.runner.context.model, 600, 1, "f32")

    def logits(self, answer_ids: list[int]) -> torch.Tensor:
        rows: torch.Tensor = self.context.plain(self.prompt + answer_ids, len(answer_ids) + 1)
        return rows


def ensemble(files: Mapping[str, Path], names: tuple[str, ...], cache_dir: str, **settings: Any) -> EnsembleConfig:
    members = [member_config(files[name]) for name in names]
    return EnsembleConfig(
        members, cache_dir=cache_dir, **{"segment_tokens": 6, "first_segment_tokens": None, **settings}
    )


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_rounds_equal_the_naive_rounds(files: Mapping[str, Path], cache_dir: str, names: tuple[str, ...]) -> None:
    config = ensemble(files, names, cache_dir)
    with EnsembleEngine(config) as engine:
        members = members_of(engine)
        for speculation in ("auto", "off"):
            for params in (SamplingParams(max_tokens=200), SamplingParams(max_tokens=200, temperature=0.9, seed=3)):
                speculative = replace(config, speculation=speculation)
                assert_equals_naive(speculative, members, QUESTION, params, 8, 1e-4, NaiveLlama)


def test_drafts_longer_than_the_winner_and_exits_equal_the_naive_rounds(
    files: Mapping[str, Path], cache_dir: str
) -> None:
    config = ensemble(
        files, ("llama", "spoken", "qwen2"), cache_dir, segment_tokens=12, exit="entropy", score="mean_logprob"
    )
    with EnsembleEngine(config) as engine:
        records = assert_equals_naive(
            config, members_of(engine), QUESTION, SamplingParams(max_tokens=250), 8, 1e-4, NaiveLlama
        )
    assert len(records) > 1


@pytest.mark.parametrize("name", FILES)
def test_logprobs_equal_transformers_logprobs(files: Mapping[str, Path], cache_dir: str, name: str) -> None:
    here, there = member_config(files[name]), member_config(files[name], "transformers")
    with EnsembleEngine(EnsembleConfig([here, there], cache_dir=cache_dir)) as engine:
        first, second = members_of(engine)
        assert (engine.describe()[0].backend, engine.describe()[1].backend) == ("llama.cpp", "transformers")
        assert first.stop_ids == second.stop_ids
        text = "The quick brown fox, at 12.5 km/h, jumps over it. Ещё 北京 🎉 and so on for more than a window"
        ids = first.codec.encode(text)
        assert ids == second.codec.encode(text)
        runner: Any = first.runner
        plain: Any = second.runner
        here_rows = runner.context.plain(ids, len(ids)).log_softmax(-1)
        there_rows = plain.plain(ids).log_softmax(-1)
        reply = torch.tensor(ids[1:])[:, None]
        off = (here_rows[:-1].gather(1, reply) - there_rows[:-1].gather(1, reply)).abs()
        assert float(off.max()) < (2e-3 if name == "window" else 1e-3)  # see TOLERANCE


def test_the_cache_contains_prompt_and_answer_and_no_token_is_fed_twice(llama_engine: EnsembleEngine) -> None:
    members = members_of(llama_engine)
    for speculation in ("auto", "off"):
        config = replace(llama_engine.config, speculation=speculation)
        session = open_session(config, members, QUESTION, SamplingParams(max_tokens=80))
        records = run_rounds(session, 6)
        for member in members:
            state: Any = session.participants[member.name].session.sequence
            runner: Any = member.runner
            committed = session.text[: records[-1].start]  # the last segment is committed with the next round
            assert list(state.answer) == member.codec.encode(committed)
            plain = runner.context.plain([*state.prompt, *state.answer], 1)[0]
            assert torch.allclose(state._end.log_softmax(-1), plain.log_softmax(-1), atol=1e-4)
            limit = len(records) * (2 * 6 + 8) + (24 * len(records) if speculation == "auto" else 0)
            assert state.computed_tokens <= limit
        session.release()
        assert all(member.cache_use().cache_bytes == 0 for member in members)


def test_concurrent_answers_and_cached_prefixes_change_no_answer(llama_engine: EnsembleEngine) -> None:
    requests = [
        ("How do the tides follow the moon?", SamplingParams(max_tokens=30)),
        ("北京? Name 3 ships, ça va 🎉", SamplingParams(max_tokens=25, temperature=0.9, seed=4)),
        ("Letters?", SamplingParams(max_tokens=20, grammar=Grammar.regex("[a-f]{3,9}"))),
        ("Endless?", SamplingParams(max_tokens=40, stop=["e"], logprobs=True)),
        ("How do the tides follow the sun and the moon, " * 4, SamplingParams(max_tokens=12)),
    ]
    alone = [llama_engine.generate(*each) for each in requests]
    before = llama_engine.metrics().reused_prompt_tokens
    results = llama_engine.generate_batch([each for each, _ in requests] * 2, [params for _, params in requests] * 2)
    assert [getattr(result, "text", result) for result in results] == [answer.text for answer in alone] * 2
    assert llama_engine.metrics().reused_prompt_tokens > before
    assert 3 <= len(alone[2].text) <= 9
    assert set(alone[2].text) <= set("abcdef")
    assert alone[3].stop_sequence in ("e", None)
    assert alone[3].logprobs


def test_a_single_member_decodes_as_the_library_does(files: Mapping[str, Path], cache_dir: str) -> None:
    for name in FILES:
        with EnsembleEngine([member_config(files[name])], cache_dir=cache_dir) as engine:
            [member] = members_of(engine)
            result = engine.generate(QUESTION, SamplingParams(max_tokens=40))
            runner: Any = member.runner
            ids = member.encode_prompt(QUESTION)
            start = len(ids)
            while len(ids) - start < 40:
                token = int(runner.context.plain(ids, 1)[0].argmax())
                if token in member.stop_ids:
                    break
                ids.append(token)
            assert result.text == member.codec.decode(ids[start:]).rstrip("\ufffd")


def test_llama_cpp_and_transformers_members_answer_together(files: Mapping[str, Path], cache_dir: str) -> None:
    mixed = [member_config(files["llama"]), member_config(files["spoken"], "transformers")]
    settings: dict[str, Any] = {"cache_dir": cache_dir, "segment_tokens": 6, "speculation": "off"}
    same = [member_config(files["llama"], "transformers"), member_config(files["spoken"], "transformers")]
    params = SamplingParams(max_tokens=40)
    with EnsembleEngine(mixed, **settings) as one, EnsembleEngine(same, **settings) as same_engine:
        events = list(one.stream(QUESTION, params))
        assert isinstance(events[-1], FinishEvent)
        winners = [name.removesuffix("-there") for name in answer_of(events[-1].result)[1]]
        expected = same_engine.generate(QUESTION, params)
        assert events[-1].result.text == expected.text
        assert winners == [name.removesuffix("-there") for name in answer_of(expected)[1]]
