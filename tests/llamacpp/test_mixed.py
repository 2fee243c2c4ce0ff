"""Members on llama.cpp, on transformers and on a server in one ensemble."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from specfuse_shared import EnsembleConfig, EnsembleEngine, EnsembleResult, Grammar, MemberConfig, SamplingParams, Tool
from specfuse_shared.events import FinishEvent, SegmentEvent
from specfuse_shared.loading.gguf import converted
from tests.servers.model_server import Ways, model_server
from tests.support.against_naive import answer_of
from tests.support.llamacpp import member_config

pytest.importorskip("llama_cpp")

NAMES = ("llama", "spoken", "qwen2")
QUESTION = "How do the tides follow the moon?"
TOOL = Tool("tide", "When the tide comes", {"type": "object", "properties": {"port": {"enum": ["Ryde", "Cowes"]}}})


@pytest.fixture(scope="module")
def folder(files: Mapping[str, Path], cache_dir: str) -> Path:
    """The third model as its server reads it."""
    return converted(files["qwen2"], cache_dir, lambda stage: None)


def ensemble(files: Mapping[str, Path], folder: Path, cache_dir: str, **third: str) -> EnsembleConfig:
    """Members by the same names; the third is the one in `folder`."""
    members = [MemberConfig(str(folder), name="qwen2", dtype="float32", device="cpu")]
    if "server" in third:
        members = [MemberConfig(str(folder), name="qwen2", server=third["server"])]
    backends = {"llama": "llama.cpp" if "server" in third else "transformers", "spoken": "transformers"}
    first = [member_config(files[name], backend, name=name) for name, backend in backends.items()]
    return EnsembleConfig([*first, *members], cache_dir=cache_dir, segment_tokens=6, first_segment_tokens=None)


@pytest.fixture(scope="module")
def engines(files: Mapping[str, Path], folder: Path, cache_dir: str) -> Iterator[tuple[EnsembleEngine, EnsembleEngine]]:
    """The mixed ensemble, and one of the same models that are all on transformers."""
    with (
        model_server(folder) as (url, _),
        EnsembleEngine(ensemble(files, folder, cache_dir, server=url)) as mixed,
        EnsembleEngine(ensemble(files, folder, cache_dir)) as same,
    ):
        yield mixed.load(), same.load()


def test_each_member_runs_in_its_configured_place(engines: tuple[EnsembleEngine, EnsembleEngine]) -> None:
    places = {report.name: (report.backend, report.device) for report in engines[0].describe()}
    assert places["llama"] == ("llama.cpp", "cpu")
    assert places["spoken"] == ("transformers", "cpu")
    assert places["qwen2"][1].startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=30, stop=["e"], logprobs=True),
        SamplingParams(max_tokens=20, grammar=Grammar.regex("[a-f]{3,9}")),
    ],
    ids=["greedy", "stop", "grammar"],
)
def test_a_mixed_ensemble_answers_as_members_on_transformers_do(
    engines: tuple[EnsembleEngine, EnsembleEngine], params: SamplingParams
) -> None:
    mixed, same = engines
    events = list(mixed.stream(QUESTION, params))
    last = events[-1]
    assert isinstance(last, FinishEvent)
    expected = same.generate(QUESTION, params)
    assert "".join(event.text for event in events if isinstance(event, SegmentEvent)) == expected.text
    assert answer_of(last.result) == answer_of(expected)
    assert set(last.result.usage.members) == set(NAMES)
    assert all(usage.drafted for usage in last.result.usage.members.values())


def test_a_seed_makes_answers_repeatable(engines: tuple[EnsembleEngine, EnsembleEngine]) -> None:
    """The answer differs from a local one, since the server uses its own random generator."""
    first, again, reseeded = (
        engines[0].generate(QUESTION, SamplingParams(max_tokens=30, temperature=0.9, seed=seed)) for seed in (5, 5, 6)
    )
    assert answer_of(first) == answer_of(again)
    assert first.text != reseeded.text


def test_concurrent_answers_and_a_forced_call_equal_those_one_after_another(
    engines: tuple[EnsembleEngine, EnsembleEngine],
) -> None:
    mixed, same = engines
    requests = [QUESTION, "北京? Name 3 ships, ça va 🎉", "def f(x):"]
    params = SamplingParams(max_tokens=24)
    alone = [same.generate(question, params).text for question in requests]
    together = mixed.generate_batch(requests, params)
    assert [result.text for result in together if isinstance(result, EnsembleResult)] == alone
    forced = {"tools": [TOOL], "tool_choice": "any"}
    call = SamplingParams(max_tokens=120)
    assert mixed.generate(QUESTION, call, **forced).text == same.generate(QUESTION, call, **forced).text


def test_the_others_continue_when_the_server_goes_down(files: Mapping[str, Path], folder: Path, cache_dir: str) -> None:
    ways = Ways()
    with (
        model_server(folder, ways) as (url, _),
        EnsembleEngine(ensemble(files, folder, cache_dir, server=url)) as engine,
    ):
        engine.load()
        ways.status = 500
        result = engine.generate(QUESTION, SamplingParams(max_tokens=30))
    assert [(fault.member, fault.stage) for fault in result.warnings] == [("qwen2", "prefill")]
    assert result.text
    assert set(answer_of(result)[1]) <= {"llama", "spoken"}
