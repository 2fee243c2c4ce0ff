"""A member on a server gives the same answers as a local one, byte for byte in float32; the server can fail."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from specfuse_shared import (
    EnsembleEngine,
    GenerationError,
    Grammar,
    SamplingParams,
)
from specfuse_shared.events import FinishEvent, SegmentEvent, WarningEvent
from specfuse_shared.members.server.member import ServerLane
from tests.servers.model_server import MOST_IDS, Ways, model_server
from tests.support.marks import weekly
from tests.support.served import QUESTIONS, TOOL, WIDE, assert_same, served


@pytest.fixture(scope="module")
def chat_server(folders: dict[str, Path]) -> Iterator[tuple[str, Ways]]:
    with model_server(folders["chat"]) as (url, ways):
        yield url, ways


@pytest.fixture
def mixed(tiny_engine: EnsembleEngine, chat_server: tuple[str, Ways]) -> Iterator[tuple[EnsembleEngine, Ways]]:
    """The chat model on a server, and a local base model."""
    url, ways = chat_server
    ways.requests.clear()
    with EnsembleEngine(served(tiny_engine, url, "chat")) as engine:
        yield engine.load(), ways


@pytest.mark.parametrize(
    "params",
    [
        WIDE,
        *weekly(SamplingParams(max_tokens=25, repetition_penalty=1.3)),
        SamplingParams(max_tokens=40, stop=["e"], logprobs=True, top_logprobs=3),
        *weekly(SamplingParams(max_tokens=24, min_tokens=20)),
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(max_tokens=20, grammar=Grammar.regex("[a-f]{3,9}")),
        SamplingParams(max_tokens=40, grammar=Grammar.json_schema({"properties": {"n": {"type": "integer"}}})),
    ],
    ids=["plain", "penalty", "stop and logprobs", "min_tokens", "ignore_eos", "expression", "schema"],
)
def test_a_member_on_a_server_answers_as_it_does_locally(
    tiny_engine: EnsembleEngine, mixed: tuple[EnsembleEngine, Ways], params: SamplingParams
) -> None:
    for question in QUESTIONS:
        assert_same(mixed[0].generate(question, params), tiny_engine.generate(question, params))


def test_a_single_member_decodes_as_it_does_locally(
    tiny_engine: EnsembleEngine, chat_server: tuple[str, Ways], folders: dict[str, Path]
) -> None:
    for question in QUESTIONS:
        with EnsembleEngine(served(tiny_engine, chat_server[0], "chat")) as engine:
            result = engine.generate(question, WIDE, members=["chat"])
        assert_same(result, tiny_engine.generate(question, WIDE, members=["chat"]))


@pytest.mark.slow
def test_members_on_two_servers_need_no_local_model(
    tiny_engine: EnsembleEngine, chat_server: tuple[str, Ways], folders: dict[str, Path]
) -> None:
    with model_server(folders["base"]) as (url, _):
        config = served(tiny_engine, chat_server[0], "chat")
        config = replace(config, members=[config.member_configs[0], replace(config.member_configs[1], server=url)])
        with EnsembleEngine(replace(config, cache_bytes=1)) as engine:
            for question in QUESTIONS:
                assert_same(engine.generate(question, WIDE), tiny_engine.generate(question, WIDE))
            assert {report.memory_bytes for report in engine.describe()} == {0}
            assert all(report.parameters > 10_000 for report in engine.describe())
            assert engine.metrics().cache_bytes == 0


def test_tools_are_called_as_they_are_locally(tiny_engine: EnsembleEngine, mixed: tuple[EnsembleEngine, Ways]) -> None:
    options: dict[str, Any] = {"tools": [TOOL], "tool_choice": "any"}
    params = SamplingParams(max_tokens=60)
    assert_same(mixed[0].generate("Ring!", params, **options), tiny_engine.generate("Ring!", params, **options))


@pytest.mark.slow
def test_eight_concurrent_answers_equal_answers_one_after_another(
    tiny_engine: EnsembleEngine, mixed: tuple[EnsembleEngine, Ways]
) -> None:
    questions = [f"{question} {number}" for number in (1, 2) for question in QUESTIONS]
    expected = [tiny_engine.generate(question, WIDE) for question in questions]
    for result, one in zip(mixed[0].generate_batch(questions, WIDE), expected, strict=True):
        assert_same(result, one)


def test_a_seed_makes_answers_repeatable(mixed: tuple[EnsembleEngine, Ways]) -> None:
    engine, _ = mixed
    first = engine.generate(QUESTIONS[0], SamplingParams(max_tokens=30, temperature=1.0, seed=5))
    again = engine.generate(QUESTIONS[0], SamplingParams(max_tokens=30, temperature=1.0, seed=5))
    reseeded = engine.generate(QUESTIONS[0], SamplingParams(max_tokens=30, temperature=1.0, seed=6))
    assert first.text == again.text
    assert first.text != reseeded.text


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


def test_a_round_is_two_requests_and_a_prefix_is_requested_once(mixed: tuple[EnsembleEngine, Ways]) -> None:
    engine, ways = mixed
    ways.requests.clear()
    before = engine.metrics().forwards["chat"]
    result = engine.generate(QUESTIONS[0], SamplingParams(max_tokens=60))
    bodies = ways.bodies()
    plain = [body for body in bodies if "stop_token_ids" in body and "logit_bias" not in body]
    drafts = [body for body in plain if body["max_tokens"] == 6]
    single = [body for body in plain if body["max_tokens"] == 1]
    judgements = [body for body in bodies if "logprob_token_ids" in body]
    assert len(drafts) == len(result.rounds)
    assert len(single) <= 1 + 0.5 * len(result.rounds), "one reads the prompt, others finish a character"
    assert len({len(body["prompt"]) for body in single}) == len(single)
    assert len(judgements) == sum(record.verified for record in result.rounds)
    for body in judgements:
        prompts = [tuple(prompt) for prompt in body["prompt"]]
        assert len(prompts) == len(set(prompts))
        assert body["max_tokens"] == 1
    assert engine.metrics().forwards["chat"] - before == len(bodies)


@pytest.mark.slow
def test_a_long_verification_is_split_at_the_servers_limit_of_tokens(
    tiny_engine: EnsembleEngine, mixed: tuple[EnsembleEngine, Ways]
) -> None:
    params = SamplingParams(max_tokens=400, logprobs=True, ignore_eos=True)
    words = "Say much of all."
    engine, ways = mixed
    ways.requests.clear()
    [result, expected] = [each.generate(words, params) for each in (engine, tiny_engine)]
    assert_same(result, expected)
    sizes = [len(body["logprob_token_ids"]) for body in ways.bodies() if "logprob_token_ids" in body]
    assert max(sizes) <= MOST_IDS
    assert len(set(engine.tokenize(result.text))) > MOST_IDS, "the answer has too few tokens to show it"


def test_tokens_without_text_are_banned(tiny_engine: EnsembleEngine, folders: dict[str, Path]) -> None:
    """On a server they are banned after the first one."""
    with model_server(folders["chat"]) as (url, ways), EnsembleEngine(served(tiny_engine, url, "chat")) as engine:
        engine.load()
        lane = engine._assembly.others[-1]
        assert isinstance(lane, ServerLane)
        member = lane.served["chat"]
        assert {0, 1} <= set(member.special_ids), "<|pad|> and <|turn|>"

        def drafted() -> list[int]:
            first = engine.generate(QUESTIONS[0], replace(WIDE, max_tokens=6)).rounds[0].candidates
            return engine.tokenize(next(c.text for c in first if "chat" in c.drafters))

        first, second, *_ = drafted()
        for banned in (first, second):  # as if what it says were such a token
            member.special_ids = (banned,)
            ways.requests.clear()
            assert banned not in drafted()
            assert [body["logit_bias"] for body in ways.bodies() if "logit_bias" in body] == [{str(banned): -100.0}]


def test_a_member_that_only_verifies_drafts_nothing_under_a_grammar(
    tiny_engine: EnsembleEngine, chat_server: tuple[str, Ways]
) -> None:
    url, ways = chat_server
    params = SamplingParams(max_tokens=20, grammar=Grammar.regex("[a-f]{3,9}"))
    with EnsembleEngine(served(tiny_engine, url, "chat", drafts_under_grammar=False)) as engine:
        ways.requests.clear()
        result = engine.generate("Letters?", params)
        assert {name for record in result.rounds for c in record.candidates for name in c.drafters} == {"base"}
        assert not [body for body in ways.bodies() if "allowed_token_ids" in body]
        assert engine.generate("Letters?", WIDE).rounds[0].active == ("chat", "base")
        alone = engine.generate("Letters?", params, members=["chat"])
        assert alone.text == tiny_engine.generate("Letters?", params, members=["chat"]).text, "no other member drafts"


# ── trouble while it answers ─────────────────────────────────────────────────────────────────────


def test_a_cancelled_answer_leaves_no_request_at_the_server(mixed: tuple[EnsembleEngine, Ways]) -> None:
    engine, ways = mixed
    stream = engine.stream("Never stop", SamplingParams(max_tokens=400))
    next(event for event in stream if isinstance(event, SegmentEvent))
    ways.delay, before = 30.0, ways.disconnected
    try:
        _until(lambda: ways.running)
        stream.close()  # type: ignore[attr-defined]
        _until(lambda: not ways.running)
        assert ways.disconnected == before + 1
        _until(lambda: not engine.metrics().running)
    finally:
        ways.delay = 0.0


def test_a_slow_server_is_given_up_after_its_timeout(
    tiny_engine: EnsembleEngine, chat_server: tuple[str, Ways]
) -> None:
    url, ways = chat_server
    with EnsembleEngine(served(tiny_engine, url, "chat", server_timeout=5.0)) as engine:
        events = engine.load().stream(QUESTIONS[0], SamplingParams(max_tokens=60))
        output = next(event for event in events if isinstance(event, SegmentEvent))
        ways.delay = 30.0
        try:
            rest = list(events)
        finally:
            ways.delay = 0.0
        [warning] = [event for event in rest if isinstance(event, WarningEvent)]
        assert "did not answer within 5 s" in warning.message
        last = rest[-1]
        assert isinstance(last, FinishEvent)
        assert last.result.text.startswith(output.text)
        assert not engine.generate(QUESTIONS[0], WIDE).warnings, "the member has returned"


def test_a_refused_request_removes_only_its_member_from_the_answer(
    mixed: tuple[EnsembleEngine, Ways],
) -> None:
    engine, ways = mixed
    ways.status = 500
    try:
        result = engine.generate(QUESTIONS[0], WIDE)
    finally:
        ways.status = 200
    assert [(fault.member, fault.stage) for fault in result.warnings] == [("chat", "prefill")]
    assert "answers 500 to /v1/completions: out of order" in result.warnings[0].message
    assert not engine.generate(QUESTIONS[0], WIDE).warnings


@contextmanager
def in_a_process(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server of this model, until it is killed."""
    process = subprocess.Popen([sys.executable, "-m", "tests.servers.model_server", str(folder), str(port)])
    try:
        _until(lambda: _answers(port), 60)
        yield process
    finally:
        process.kill()
        process.wait(20)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/version").is_success
    except httpx.TransportError:
        return False


def _until(condition: Any, seconds: float = 20.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.slow
def test_a_killed_server_removes_its_member_and_a_restarted_one_restores_it(
    tiny_engine: EnsembleEngine, folders: dict[str, Path]
) -> None:
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with in_a_process(folders["chat"], port) as process:
        engine = EnsembleEngine(served(tiny_engine, url, "chat"))
        events = engine.stream(QUESTIONS[0], SamplingParams(max_tokens=200))
        output = next(event for event in events if isinstance(event, SegmentEvent))
        process.kill()
        rest = list(events)
    with engine:
        [warning] = [event for event in rest if isinstance(event, WarningEvent)]
        assert warning.member == "chat"
        assert f"no server answers at {url}" in warning.message
        last = rest[-1]
        assert isinstance(last, FinishEvent)
        assert last.result.text.startswith(output.text)
        assert last.result.rounds[-1].active == ("base",)
        without = engine.generate(QUESTIONS[0], WIDE)
        assert [fault.member for fault in without.warnings] == ["chat"]
        with pytest.raises(GenerationError, match="no server answers"):
            engine.generate(QUESTIONS[0], WIDE, members=["chat"])
        with in_a_process(folders["chat"], port):
            assert_same(engine.generate(QUESTIONS[0], WIDE), tiny_engine.generate(QUESTIONS[0], WIDE))
        with in_a_process(folders["base"], port):  # another model at the same address is not accepted
            fault = engine.generate(QUESTIONS[0], WIDE).warnings[0]
            assert (fault.member, fault.stage) == ("chat", "prefill")
            assert "does not exist" in fault.message
            assert "has no model" in engine.generate(QUESTIONS[0], WIDE).warnings[0].message, "it is checked again"


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
