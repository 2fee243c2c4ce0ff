"""Captured steps without a GPU: a replacement for CUDA graphs raises the errors of a real driver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from specfuse_shared import EnsembleEngine, SamplingParams
from specfuse_shared.members.local import lane
from specfuse_shared.members.local.sequence import SequenceState
from specfuse_shared.runtime import packed_steps
from specfuse_shared.runtime.cuda_streams import ModelStream
from specfuse_shared.runtime.model_runner import ModelRunner
from specfuse_shared.runtime.packed_steps import PackedStep
from specfuse_shared.runtime.pages import PagedRow
from tests.support.against_naive import answer_of, local_members
from tests.support.captured import drafted, opened, paged_runner
from tests.support.graphs_without_gpu import Driver, Stream, driver
from tests.support.many_requests import requests

__all__ = ["driver"]


@pytest.fixture
def captured(driver: Driver, tiny_engine: EnsembleEngine) -> Iterator[EnsembleEngine]:
    with EnsembleEngine(replace(tiny_engine.config, execution="paged")) as engine:
        yield engine.load()


@pytest.mark.slow
def test_packed_steps_are_captured_at_load_and_no_new_length_captures_another(
    driver: Driver, tiny_engine: EnsembleEngine
) -> None:
    prompts = requests(12)
    questions, each = [question for question, _ in prompts], [params for _, params in prompts]
    expected = [answer_of(tiny_engine.generate(question, params)) for question, params in prompts]
    with EnsembleEngine(replace(tiny_engine.config, execution="paged", reuse_prefixes=False)) as engine:
        engine.load()
        counts = [member.runner.packed.graphs.count for member in local_members(engine)]
        assert counts == [21, 21], "1 to 256 tokens, 128 and 256 of prompts, and greedy drafts of 1 to 32 answers"
        assert [answer_of(result) for result in engine.generate_batch(questions, each)] == expected
        assert {report.graphs for report in engine.describe()} == {"captured"}
        after = [member.runner.packed.graphs.count for member in local_members(engine)]
        assert all(count <= 21 + 6 for count in after), "each size once, and the sizes of prompts"
        for length in (3, 17, 90, 33):
            engine.generate("moon " * length, SamplingParams(max_tokens=9))
        assert [member.runner.packed.graphs.count for member in local_members(engine)] == after
        assert driver.replays > 50
        assert {member.runner.dynamic for member in local_members(engine)} == {0}
    assert not driver.freed
    assert not driver.allocating


def test_inputs_beyond_the_largest_step_take_several_steps(
    driver: Driver, tiny_engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = requests(5)
    questions, each = [question for question, _ in prompts], [params for _, params in prompts]
    expected = [answer_of(tiny_engine.generate(question, params)) for question, params in prompts]
    monkeypatch.setattr(packed_steps, "SIZES", (1, 2, 4, 8))
    monkeypatch.setattr(packed_steps, "MOST_ANSWERS", 2)
    with EnsembleEngine(replace(tiny_engine.config, execution="paged")) as engine:
        assert [answer_of(result) for result in engine.generate_batch(questions, each)] == expected
        assert all(member.runner.dynamic == 0 for member in local_members(engine))
        sizes = {
            step.tokens
            for member in local_members(engine)
            for step in member.runner.packed._steps.values()
            if isinstance(step, PackedStep)
        }
        assert sizes <= {1, 2, 4, 8}


@pytest.mark.slow
def test_many_captured_answers_equal_dynamic_execution(
    driver: Driver, captured: EnsembleEngine, tiny_engine: EnsembleEngine
) -> None:
    prompts = requests(12)
    questions, each = [question for question, _ in prompts], [params for _, params in prompts]
    expected = [answer_of(tiny_engine.generate(question, params)) for question, params in prompts]
    for _ in range(2):
        assert [answer_of(result) for result in captured.generate_batch(questions, each)] == expected
    assert {report.graphs for report in captured.describe()} == {"captured"}
    assert driver.replays > 50
    assert not driver.freed
    assert not driver.allocating


def test_members_of_one_lane_work_in_separate_streams(
    driver: Driver, tiny_engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward passes, drafts, and the memory of their rows."""
    prompts = requests(4)
    questions, each = [question for question, _ in prompts], [params for _, params in prompts]
    expected = [answer_of(result) for result in tiny_engine.generate_batch(questions, each)]

    def made(self: ModelStream, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    recorded: dict[int, set[Stream]] = {}

    def noted(cls: Any, name: str, pool_of: Any) -> None:
        plainly = getattr(cls, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            recorded.setdefault(id(pool_of(self)), set()).add(driver.stream)
            return plainly(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, call)

    monkeypatch.setattr(ModelStream, "__init__", made)
    monkeypatch.setattr(lane, "cores", lambda: 1)
    with EnsembleEngine(replace(tiny_engine.config, execution="paged")) as engine:
        engine.load()
        noted(ModelRunner, "step", lambda runner: runner.pool)
        for name in ("reserve", "keep", "save", "free"):
            noted(PagedRow, name, lambda row: row.arena)
        assert [answer_of(result) for result in engine.generate_batch(questions, each)] == expected
        runners = [member.runner for member in local_members(engine)]
        assert len(runners) == 2
        for runner in runners:
            assert recorded.pop(id(runner.pool)) == {runner.stream._stream}
        assert not recorded
        assert runners[0].stream._stream is not runners[1].stream._stream
    assert not driver.freed


@torch.inference_mode()
def test_graphs_outlive_the_second_answer_and_returned_memory(driver: Driver, runner: ModelRunner) -> None:
    plain = paged_runner(runner.model, runner, "switched off")
    assert runner.packed is not None
    sequences: list[SequenceState] = []
    expected: list[SequenceState] = []
    for number in range(3):
        for _ in range(3):
            sequences.append(opened(runner, len(sequences)))
            expected.append(opened(plain, len(expected)))
            for _ in range(3):
                assert drafted(sequences) == drafted(expected)
        assert runner.packed.graphs.report == "captured", number
        for sequence in [*sequences, *expected]:
            sequence.release()
        sequences, expected = [], []
        runner.free_spare()
        runner.drop_steps()
    assert driver.captures > 2
    assert not driver.allocating
    assert not driver.freed


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("injected: CUDA out of memory"), RuntimeError("CUDA error: out of memory")]
)
@torch.inference_mode()
def test_out_of_memory_in_captures_does_not_end_capturing(
    driver: Driver, runner: ModelRunner, error: Exception
) -> None:
    """The driver's error has no separate class."""
    assert runner.packed is not None
    driver.failing += [error] * 3
    sequences = [opened(runner, 0)]
    for _ in range(16):
        drafted(sequences)
    assert not driver.failing, "the capture was tried"
    assert runner.packed.graphs.report == "captured"
    assert driver.replays > 5
    assert not driver.allocating


@torch.inference_mode()
def test_a_kernel_on_another_stream_is_detected(driver: Driver, runner: ModelRunner) -> None:
    aside, layer = Stream(), runner.model.model.layers[1].mlp
    buffers: dict[torch.Size, torch.Tensor] = {}

    def elsewhere(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(aside):
            retained = buffers.setdefault(output.shape, torch.empty_like(output))
            return torch.mul(output, 2, out=retained)

    hook = layer.register_forward_hook(elsewhere)
    try:
        plain = paged_runner(runner.model, runner, "switched off")
        sequences, expected = [opened(runner, 0)], [opened(plain, 0)]
        for _ in range(5):
            assert drafted(sequences) == drafted(expected)
    finally:
        hook.remove()
    assert runner.packed is not None
    assert runner.packed.graphs.report.startswith("eager: ")
