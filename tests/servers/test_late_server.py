"""A slow or hanging server delays no answer: its member misses rounds, and returns or leaves."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from specfuse_shared import EnsembleEngine, EnsembleResult, SamplingParams
from tests.servers.model_server import Ways, model_server
from tests.support.against_naive import assert_equals_naive_with_absences, local_members
from tests.support.served import QUESTIONS, served
from tests.support.serving import until

PARAMS = SamplingParams(max_tokens=300)


@dataclass
class Unsteady(Ways):
    """After the member is loaded, every `nth` request takes this number of `seconds`."""

    steady: bool = True
    nth: int = 9
    seconds: float = 0.65
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __getattribute__(self, name: str) -> object:
        if name == "delay":
            return 0.0 if self.steady or next(self.numbers) % self.nth else self.seconds
        return super().__getattribute__(name)


@pytest.fixture
def unsteady(tiny_engine: EnsembleEngine, folders: dict[str, Path]) -> Iterator[tuple[EnsembleEngine, Unsteady]]:
    """The chat model on a server that is sometimes slow, and a local base model."""
    ways = Unsteady()
    with model_server(folders["chat"], ways) as (url, _):
        config = replace(served(tiny_engine, url, "chat"), round_seconds=0.6, round_grace=0.1, late_rounds=100)
        with EnsembleEngine(config) as engine:
            engine.load()
            ways.steady = False
            yield engine, ways


def test_rounds_without_a_late_server_equal_naive_rounds_without_its_member(
    tiny_engine: EnsembleEngine, unsteady: tuple[EnsembleEngine, Unsteady]
) -> None:
    engine, _ = unsteady
    late = back = 0
    for question in itertools.islice(itertools.cycle(QUESTIONS), 20):  # on a fast machine, few answers are late
        result = engine.generate(question, PARAMS)
        names = [[absence.member for absence in record.absent] for record in result.rounds]
        assert all(each in ([], ["chat"]) for each in names), "local members are never late"
        late += sum(each == ["chat"] for each in names)
        back += sum(one == ["chat"] and after == [] for one, after in itertools.pairwise(names))
        assert_equals_naive_with_absences(engine.config, local_members(tiny_engine), question, PARAMS, result)
        if late > 1 and back:
            break
    assert late > 1
    assert back, "the member returned"


def test_a_hanging_server_is_abandoned_and_its_requests_are_cancelled(
    unsteady: tuple[EnsembleEngine, Unsteady],
) -> None:
    engine, ways = unsteady
    engine.config = replace(engine.config, late_rounds=2)
    ways.nth, ways.seconds = 1, 300.0
    began = time.monotonic()
    result = engine.generate(QUESTIONS[0], PARAMS)
    assert time.monotonic() - began < 30
    assert all(record.present == ("base",) for record in result.rounds)
    assert result.text
    until(lambda: not engine.metrics().running)
    until(lambda: not ways.running)
    assert ways.disconnected


def test_concurrent_answers_do_not_wait_for_a_server_that_sometimes_hangs(
    unsteady: tuple[EnsembleEngine, Unsteady],
) -> None:
    engine, ways = unsteady
    ways.nth, ways.seconds = 20, 300.0
    began = time.monotonic()
    results = engine.generate_batch([f"{QUESTIONS[0]} {n}" for n in range(16)], SamplingParams(max_tokens=20))
    assert time.monotonic() - began < 60
    assert all(isinstance(result, EnsembleResult) and result.text for result in results)
    until(lambda: not engine.metrics().running)
