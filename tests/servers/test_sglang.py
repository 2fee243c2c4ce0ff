"""SGLang's requests, against a server of ours that answers them as its documentation says; a real one was not run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specfuse_shared import EnsembleEngine, Grammar, SamplingParams
from specfuse_shared.errors import RequestError, ServerSettingsError
from tests.servers.model_server import Ways, model_server
from tests.servers.test_server_member import QUESTIONS, WIDE, assert_same, served


@pytest.fixture(scope="module")
def sglang(tiny_engine: EnsembleEngine, folders: dict[str, Path]) -> Iterator[tuple[EnsembleEngine, Ways]]:
    with model_server(folders["chat"]) as (url, ways):
        config = served(tiny_engine, url, "chat", server_kind="sglang", drafts_under_grammar=False)
        with EnsembleEngine(config) as engine:
            yield engine.load(), ways


@pytest.mark.parametrize(
    "params", [WIDE, SamplingParams(max_tokens=40, stop=["e"], logprobs=True)], ids=["plain", "stop"]
)
def test_a_member_behind_sglang_answers_as_it_does_here(
    tiny_engine: EnsembleEngine, sglang: tuple[EnsembleEngine, Ways], params: SamplingParams
) -> None:
    for question in QUESTIONS:
        assert_same(sglang[0].generate(question, params), tiny_engine.generate(question, params))


def test_only_what_is_judged_is_read_behind_its_cache(sglang: tuple[EnsembleEngine, Ways]) -> None:
    engine, ways = sglang
    ways.asked.clear()
    result = engine.generate(QUESTIONS[0], WIDE)
    judgements = [body for body in ways.bodies("/generate") if body.get("return_logprob")]
    assert len(judgements) == sum(record.verified for record in result.rounds)
    for body in judgements:
        assert all(start > 0 for start in body["logprob_start_len"])
    assert engine.describe()[0].attention == "SGLang 0.0-tests, prefix cache on"


def test_a_seed_gives_the_same_answer_again_and_a_grammar_is_left_to_others(
    sglang: tuple[EnsembleEngine, Ways],
) -> None:
    engine, _ = sglang
    sampled = SamplingParams(max_tokens=20, temperature=1.0, seed=2)
    assert engine.generate(QUESTIONS[0], sampled).text == engine.generate(QUESTIONS[0], sampled).text
    letters = SamplingParams(max_tokens=20, grammar=Grammar.regex("[a-f]{3,9}"))
    assert engine.generate("Letters?", letters).warnings == ()


def test_a_server_without_its_radix_cache_is_refused(tiny_engine: EnsembleEngine, folders: dict[str, Path]) -> None:
    with (
        model_server(folders["chat"], Ways(prefix_cache="False")) as (url, _),
        EnsembleEngine(served(tiny_engine, url, "chat", server_kind="sglang")) as engine,
        pytest.raises(ServerSettingsError, match="prefix cache"),
    ):
        engine.load()


def test_the_most_probable_tokens_are_refused_before_anything_is_asked(sglang: tuple[EnsembleEngine, Ways]) -> None:
    engine, ways = sglang
    engine.load()
    ways.asked.clear()
    asked = SamplingParams(max_tokens=4, logprobs=True, top_logprobs=2)
    with pytest.raises(RequestError, match="top_logprobs: the server of the reference member 'chat'"):
        engine.generate("Hi", asked)
    assert not ways.bodies("/generate")
