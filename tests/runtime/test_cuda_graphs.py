"""Captured steps without a GPU: a replacement for CUDA graphs raises the errors of a real driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from specfuse_shared import EnsembleEngine, SamplingParams
from specfuse_shared.members.local import lane
from specfuse_shared.members.local.sequence import SequenceState
from specfuse_shared.runtime import kv_cache, packed_steps
from specfuse_shared.runtime.cuda_streams import ModelStream
from specfuse_shared.runtime.kv_cache import CacheRow
from specfuse_shared.runtime.model_runner import ModelRunner
from specfuse_shared.runtime.static_runner import Graphs, StaticRunner, StaticStep
from tests.support.against_naive import answer_of, local_members
from tests.support.captured import drafted, opened
from tests.support.graphs_without_gpu import Driver, Stream, driver
from tests.support.many_requests import requests

__all__ = ["driver"]


@pytest.fixture
def captured(driver: Driver, tiny_engine: EnsembleEngine) -> Iterator[EnsembleEngine]:
    with EnsembleEngine(replace(tiny_engine.config, execution="static")) as engine:
        yield engine.load()


def test_packed_steps_are_captured_at_load_and_no_new_length_captures_another(
    driver: Driver, tiny_engine: EnsembleEngine
) -> None:
    prompts = requests(12)
    questions, each = [question for question, _ in prompts], [params for _, params in prompts]
    expected = [answer_of(tiny_engine.generate(question, params)) for question, params in prompts]
    with EnsembleEngine(replace(tiny_engine.config, execution="paged", reuse_prefixes=False)) as engine:
        engine.load()
        counts = [member.runner.static.graphs.count for member in local_members(engine)]
        assert counts == [11, 11], "1 to 256 tokens, and 128 and 256 of prompts"
        assert [answer_of(result) for result in engine.generate_batch(questions, each)] == expected
        assert {report.graphs for report in engine.describe()} == {"captured"}
        after = [member.runner.static.graphs.count for member in local_members(engine)]
        assert all(count <= 12 + 5 for count in after), "each size once, and those of prompts"
        for length in (3, 17, 90, 33):
            engine.generate("moon " * length, SamplingParams(max_tokens=9))
        assert [member.runner.static.graphs.count for member in local_members(engine)] == after
        assert driver.replays > 50
        assert {member.runner.dynamic for member in local_members(engine)} == {0}
    assert not driver.freed
    assert not driver.allocating


def test_inputs_beyond_the_largest_step_take_several(
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
        sizes = {step.tokens for member in local_members(engine) for step in member.runner.static._steps.values()}
        assert sizes <= {1, 2, 4, 8}


def test_many_captured_answers_equal_those_of_the_dynamic_execution(
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
    with EnsembleEngine(replace(tiny_engine.config, execution="static")) as engine:
        engine.load()
        noted(ModelRunner, "step", lambda runner: runner.pool)
        for name in ("reserve", "keep", "save", "free"):
            noted(CacheRow, name, lambda row: row.pool)
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
    plain = ModelRunner(runner.model, runner.plan, graphs=Graphs(runner.device, "plain", "switched off"))
    assert runner.static is not None
    sequences: list[SequenceState] = []
    expected: list[SequenceState] = []
    for number in range(3):
        for _ in range(3):
            sequences.append(opened(runner, len(sequences)))
            expected.append(opened(plain, len(expected)))
            for _ in range(3):
                assert drafted(sequences) == drafted(expected)
        assert runner.static.graphs.report == "captured", number
        for sequence in [*sequences, *expected]:
            sequence.release()
        sequences, expected = [], []
        runner.free_spare()
        runner.drop_steps()
    assert driver.captures > 2
    assert not driver.allocating
    assert not driver.freed


@torch.inference_mode()
def test_after_out_of_memory_no_step_reads_freed_memory(
    driver: Driver, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specfuse_shared.runtime.kv_cache._LAYERS_A_STACK", 2)
    runner.pool.is_fixed = False  # else no block grows
    sequences = [opened(runner, 0)]
    for _ in range(4):
        drafted(sequences)
    block = sequences[0]._row.block  # type: ignore[attr-defined]
    made, zeros = list[int](), type(block)._zeros

    def few(self: object, *args: object) -> torch.Tensor:
        made.append(len(made))
        if len(made) == 2:
            raise torch.OutOfMemoryError("injected: out of memory")
        made_now: torch.Tensor = zeros(self, *args)
        return made_now

    monkeypatch.setattr(type(block), "_zeros", few)
    with pytest.raises(torch.OutOfMemoryError):
        opened(runner, 1)
    monkeypatch.setattr(type(block), "_zeros", zeros)
    again = opened(ModelRunner(runner.model, runner.plan, graphs=Graphs(runner.device, "plain", "switched off")), 0)
    for _ in range(4):
        drafted([again])
    assert sequences[0].answer == again.answer
    for _ in range(3):
        assert drafted(sequences[:1]) == drafted([again])
    assert not driver.freed


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("injected: CUDA out of memory"), RuntimeError("CUDA error: out of memory")]
)
@torch.inference_mode()
def test_out_of_memory_in_captures_does_not_end_capturing(
    driver: Driver, runner: ModelRunner, error: Exception
) -> None:
    """The driver's error has no class for itself."""
    assert runner.static is not None
    driver.failing += [error] * 3
    sequences = [opened(runner, 0)]
    for _ in range(16):
        drafted(sequences)
    assert not driver.failing, "the capture was tried"
    assert runner.static.graphs.report == "captured"
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
        plain = ModelRunner(runner.model, runner.plan, graphs=Graphs(runner.device, "plain", "switched off"))
        sequences, expected = [opened(runner, 0)], [opened(plain, 0)]
        for _ in range(5):
            assert drafted(sequences) == drafted(expected)
    finally:
        hook.remove()
    assert runner.static is not None
    assert runner.static.graphs.report.startswith("eager: ")


def test_few_shapes_are_captured_and_none_is_lost_when_answers_come_and_go(
    driver: Driver, tiny_engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kv_cache._SMALLEST_ROW, "cpu", 64)
    captures: Counter[tuple[object, object]] = Counter()  # the check at load captures by itself, in its own memory
    capture = Graphs.capture

    def counted(graphs: Graphs, step: Any, *args: Any) -> Any:
        result = capture(graphs, step, *args)
        captures[held_by(step, StaticRunner), shape_of(step)] += result is not None
        return result

    monkeypatch.setattr(Graphs, "capture", counted)
    with EnsembleEngine(replace(tiny_engine.config, execution="static", reuse_prefixes=False)) as engine:
        prompts = [(f"{n} " + "moon tide " * (n % 9), SamplingParams(max_tokens=10 + 11 * (n % 7))) for n in range(32)]
        capacities = seen_capacities(engine)
        engine.generate_batch([question for question, _ in prompts], [params for _, params in prompts])
        reports = {report.graphs for report in engine.describe()}
        limit = 12 * sum(map(len, capacities.values()))
    assert reports == {"captured"}
    assert driver.replays > 50
    assert not driver.freed
    assert set(captures.values()) == {1}, "no shape is lost by growth and captured again"
    assert len(captures) <= limit


def held_by(step: Any, kind: Any) -> Any:
    return next(cell.cell_contents for cell in step.__closure__ if isinstance(cell.cell_contents, kind))


def shape_of(step: Any) -> object:
    fixed = held_by(step, StaticStep)
    sizes = [(part.shape.block.capacity, part.shape.rows, part.shape.queries) for part in fixed.parts]
    return fixed.parts[0].visible is not None, tuple(sizes)  # a draft's step sees no tree


def seen_capacities(engine: EnsembleEngine) -> dict[str, set[int]]:
    """The capacities of every row that a member gives from now on."""
    results: dict[str, set[int]] = {}
    for member in local_members(engine):
        sizes, row = results.setdefault(member.name, set()), member.runner.pool.row

        def given(slots: int, sizes: set[int] = sizes, row: Any = row) -> Any:
            made = row(slots)
            sizes.add(made.block.capacity)
            return made

        member.runner.pool.row = given  # type: ignore[method-assign]
    return results
