"""Members on separate devices or cores step concurrently: answers and faults are the same as in sequence."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from specfuse_shared import EnsembleConfig, EnsembleEngine, SamplingParams
from specfuse_shared.errors import EngineClosedError
from specfuse_shared.events import FinishEvent, WarningEvent
from specfuse_shared.members.local.lane import LocalLane, lanes_of, use_cores
from specfuse_shared.members.stages import Close, Draft, Open, StageRequest, StageResult
from tests.support.against_naive import answer_of, local_members

QUESTIONS = [f"How do the tides follow the moon? {n}" for n in range(6)]
PARAMS = [SamplingParams(max_tokens=30, temperature=n % 2 * 0.9, seed=n) for n in range(6)]


Lanes = Callable[[], list[threading.Thread]]


@pytest.fixture(autouse=True)
def lanes() -> Lanes:
    """The threads of members that started during the test."""
    before = set(threading.enumerate())
    return lambda: [t for t in threading.enumerate() if t.name.startswith("specfuse lane") and t not in before]


@pytest.fixture(scope="module")
def config(tiny_engine: EnsembleEngine) -> EnsembleConfig:
    return replace(tiny_engine.config, reuse_prefixes=False)


@pytest.fixture(params=["devices", "cores"])
def engine(
    request: pytest.FixtureRequest, lanes: Lanes, config: EnsembleConfig, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EnsembleEngine]:
    """The tiny members, each on a simulated device or on separate cores."""
    if request.param == "devices":
        monkeypatch.setattr("specfuse_shared.members.local.lane.devices_of", lambda member: (member.name,))
    else:
        monkeypatch.setattr("specfuse_shared.members.local.lane.cores", lambda: 2)
    with EnsembleEngine(config) as made:
        yield made.load()


@contextmanager
def slowed(engine: EnsembleEngine, seconds: float) -> Iterator[dict[str, list[tuple[float, float]]]]:
    """Slow down every forward pass, and record its start and end by member."""
    times: dict[str, list[tuple[float, float]]] = {m.name: [] for m in local_members(engine)}
    for member in local_members(engine):
        plain = member.runner.step

        def step(segments: Any, plain: Any = plain, intervals: Any = times[member.name]) -> Any:
            began = time.monotonic()
            time.sleep(seconds)
            result = plain(segments)
            intervals.append((began, time.monotonic()))
            return result

        member.runner.step = step  # type: ignore[method-assign]
    yield times
    for member in local_members(engine):
        del member.runner.step


def test_answers_equal_sequential_ones_and_forward_passes_overlap(
    tiny_engine: EnsembleEngine, engine: EnsembleEngine, lanes: Lanes
) -> None:
    expected = [answer_of(tiny_engine.generate(*each)) for each in zip(QUESTIONS, PARAMS, strict=True)]
    assert len(lanes()) == 1, "one member runs in the worker itself"
    with slowed(engine, 0.002) as times:
        results = [answer_of(result) for result in engine.generate_batch(QUESTIONS, PARAMS)]
    assert results == expected
    first, second = times.values()
    together = sum(any(a < d and c < b for c, d in second) for a, b in first)
    assert together > 0.5 * len(first), "except if only one of them has work"


def test_members_on_one_core_run_one_after_another_without_a_thread(
    config: EnsembleConfig, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specfuse_shared.members.local.lane.cores", lambda: 1)
    with EnsembleEngine(config) as engine, slowed(engine.load(), 0.0) as times:
        engine.generate(QUESTIONS[0], PARAMS[0])
        assert not lanes()
    first, second = times.values()
    assert not any(a < d and c < b for a, b in first for c, d in second)


def test_a_member_that_fails_on_its_device_leaves_and_the_other_continues(engine: EnsembleEngine) -> None:
    for number in range(2):
        faulty = local_members(engine)[number]

        def broken(segments: Any) -> Any:
            raise RuntimeError("injected")

        faulty.runner.step = broken  # type: ignore[method-assign]
        events = list(engine.stream(QUESTIONS[0], PARAMS[0]))
        del faulty.runner.step
        assert [e.member for e in events if isinstance(e, WarningEvent)] == [faulty.name]
        assert isinstance(events[-1], FinishEvent)
        assert events[-1].result.text
    assert not [e for e in engine.stream(QUESTIONS[0], PARAMS[0]) if isinstance(e, WarningEvent)]


def test_cancelling_stops_within_a_step_and_frees_the_caches_of_all_devices(engine: EnsembleEngine) -> None:
    expected = answer_of(engine.generate(QUESTIONS[0], PARAMS[0]))
    streams = [engine.stream(question, SamplingParams(max_tokens=400)) for question in QUESTIONS]
    for stream in streams:
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    limit = time.monotonic() + 10
    while engine.metrics().running:
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert sum(member.runner.pool.memory_bytes for member in local_members(engine)) == 0
    assert answer_of(engine.generate(QUESTIONS[0], PARAMS[0])) == expected


@pytest.mark.parametrize("dying", [0, 1])
def test_a_device_whose_thread_dies_ends_the_engine_and_every_call(
    engine: EnsembleEngine, lanes: Lanes, dying: int
) -> None:
    def die(segments: Any) -> Any:
        raise SystemExit("killed")

    streams = [engine.stream(question, SamplingParams(max_tokens=400)) for question in QUESTIONS[:3]]
    local_members(engine)[dying].runner.step = die  # type: ignore[method-assign]
    for stream in streams:
        with pytest.raises(EngineClosedError, match="worker stopped"):
            list(stream)
    engine.close()
    limit = time.monotonic() + 10
    while lanes():
        assert time.monotonic() < limit, "the threads of the devices end with the engine"
        time.sleep(0.01)


def test_members_share_out_the_cores(tiny_engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = sorted(local_members(tiny_engine), key=lambda member: member.report.memory_bytes)[-2:]
    for cores, request, expected in [
        (1, [small, large], [([large, small], None)]),
        (2, [small, large], [([large], 1), ([small], 1)]),
        (7, [small, large], [([large], 3), ([small], 3)]),
        (2, [small, large, small], [([large], 1), ([small, small], 1)]),
        (4, [small], [([small], None)]),
    ]:
        monkeypatch.setattr("specfuse_shared.members.local.lane.cores", lambda cores=cores: cores)
        assert lanes_of(request) == expected


def test_a_thread_keeps_to_its_cores_and_others_keep_theirs() -> None:
    before, results = torch.get_num_threads(), []

    def limited() -> None:
        use_cores(before + 1)
        thread = threading.Thread(target=lambda: results.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        results.append(torch.get_num_threads())

    thread = threading.Thread(target=limited)
    thread.start()
    thread.join()
    assert results == [before, before + 1]
    assert torch.get_num_threads() == before


def test_a_lane_waits_briefly_for_missing_answers_to_fill_its_batch(tiny_engine: EnsembleEngine) -> None:
    member = local_members(tiny_engine)[0]
    lane, results = LocalLane([member]), list[StageResult]()
    lane.reply_to(results.extend)

    def ask(op: Open | Draft | Close, *answers: int) -> None:
        lane.submit([StageRequest(answer, member.name, op) for answer in answers])

    def run() -> None:
        while lane.wait_seconds is not None:
            lane.step()

    assert lane.wait_seconds is None, "there is nothing to do"
    ask(Open((1, 2, 3), SamplingParams(), seed=0), 1, 2, 3, 4, 5)
    assert lane.wait_seconds == 0, "all answers are present"
    run()
    ask(Draft(4, 0), 1, 2)
    with slowed(tiny_engine, 0.5):
        lane.step()
        wait_seconds = lane.wait_seconds or 0.0
        assert wait_seconds > 0, "three answers are missing, and two are present"
        time.sleep(wait_seconds)
        assert lane.wait_seconds == 0, "the wait is no longer than the last step"
        lane.step()
        assert lane.wait_seconds
        ask(Draft(4, 0), 3)
        assert lane.wait_seconds == 0, "two answers are missing, and three are present"
    run()
    ask(Close(), 1, 2, 3, 4, 5)
    run()
    assert [result.error for result in results] == [None] * 13
    assert lane.wait_seconds is None
    assert not any(lane._sessions.values())
