"""Driver errors over the life of a member's graphs: a graph freed alone, a stream with two users, a thread that waits
during a capture, and results that drift. All tests use the replacement for CUDA graphs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from specfuse_shared import EnsembleEngine, Grammar, MemberConfig, Message, SamplingParams
from specfuse_shared.members.local import lane, probe
from specfuse_shared.members.local.lane import LocalLane
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.runtime import attention, cuda_graphs, cuda_streams, model_runner, packed_steps
from specfuse_shared.runtime.cuda_graphs import Graphs
from specfuse_shared.runtime.cuda_streams import ModelStream
from specfuse_shared.runtime.model_runner import ModelRunner, share_memory
from specfuse_shared.runtime.sampler import PendingToken, Sampler, upload
from tests.support.against_naive import answer_of, local_members, open_session
from tests.support.captured import drafted, opened, paged_runner
from tests.support.graphs_without_gpu import Driver, driver
from tests.support.many_requests import requests

__all__ = ["driver"]
CUDA = torch.device("cuda", 0)


def plain_of(runner: ModelRunner) -> ModelRunner:
    return paged_runner(runner.model, runner, "switched off")


@pytest.fixture
def streams(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give members on the CPU streams, as on a GPU."""
    for module in (probe, model_runner):
        monkeypatch.setattr(module, "ModelStream", lambda device: ModelStream(CUDA), raising=False)


# ── graphs of a member go together ───────────────────────────────────────────────────────────────


@torch.inference_mode()
def test_graphs_are_dropped_with_buffers_that_become_too_small(
    driver: Driver, member: LocalMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_steps, "_MOST_PAGES", 4)
    runner = paged_runner(member.runner.model, member.runner)
    plain = plain_of(runner)
    pairs = [(opened(runner, n, size), opened(plain, n, size)) for n, size in enumerate((10, 70, 150, 280))]
    for number in (0, 1, 2, 3, 0, 1, 2, 3, 2, 1, 0):
        one, second = pairs[number]
        assert drafted([one]) == drafted([second])
    assert not driver.freed
    assert runner.packed is not None
    assert runner.packed.graphs.report == "captured"
    assert driver.captures > runner.packed.graphs.count, "some were captured again"


@torch.inference_mode()
def test_a_capture_with_wrong_results_does_not_free_the_workspace(
    driver: Driver, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = plain_of(runner)
    first, first_plain = opened(runner, 0), opened(plain, 0)
    for _ in range(3):
        assert drafted([first]) == drafted([first_plain])
    captures = driver.captures
    assert captures > 0
    second, second_plain = opened(runner, 1), opened(plain, 1)
    monkeypatch.setattr(cuda_graphs, "_alike", lambda logits, expected: False)
    for _ in range(3):
        assert drafted([second, first]) == drafted([second_plain, first_plain])
        assert drafted([first]) == drafted([first_plain])
    assert driver.captures == captures + 1
    assert not driver.freed
    assert runner.packed is not None
    assert runner.packed.graphs.report.startswith("eager: ReplayError")


@torch.inference_mode()
def test_out_of_memory_drops_prefixes_before_the_steps_of_a_member(driver: Driver, runner: ModelRunner) -> None:
    second = paged_runner(runner.model, runner)
    share_memory([runner, second])
    for each in (runner, second):
        each.prefixes.limit = 1 << 30
        sequence = opened(each, 0)
        for _ in range(4):
            drafted([sequence])
        sequence.release(remember=True)
    assert runner.packed is not None
    assert second.packed is not None
    counts = []
    while second.pool.reclaim_memory():
        remembered = runner.prefixes.memory_bytes + second.prefixes.memory_bytes
        counts.append((remembered, runner.packed.graphs.count > 0, second.packed.graphs.count > 0))
    assert counts == [(0, True, True), (0, False, True), (0, False, False)]
    assert not driver.freed
    assert second.packed.graphs.report == "captured"


# ── streams ──────────────────────────────────────────────────────────────────────────────────────


def test_six_members_have_separate_streams(streams: None, driver: Driver, tiny_engine: EnsembleEngine) -> None:
    """This includes the streams of probes: torch has 32 and assigns them cyclically."""
    folders = [config.model for config in tiny_engine.config.member_configs]
    made: list[LocalMember] = []
    for number in range(6):
        config = MemberConfig(str(folders[number % 2]), name=f"m{number}")
        made.append(LocalMember(config, execution="paged"))
    used = []
    for each in made:
        assert each.runner.packed is not None
        assert each.runner.packed.graphs.report == "captured"
        used += [each.runner.stream._stream, each.runner.packed.graphs._stream]
    assert None not in used
    assert len({stream.cuda_stream for stream in used}) == 12
    assert next(driver._streams[0]) <= 12, "no more than two a member were made"


def test_a_member_without_a_separate_stream_captures_nothing(driver: Driver) -> None:
    taken = [ModelStream(CUDA) for _ in range(64)]
    assert all(stream._stream is not None for stream in taken)
    late = ModelStream(CUDA)
    assert late._stream is None
    with late.entered():  # this member works on the default stream
        pass
    graphs = Graphs(torch.device("cpu"), "late")
    assert graphs.capture(lambda: None, torch.zeros(1, 4), torch.zeros(1, dtype=torch.long)) is None
    assert "no exclusive CUDA stream is left" in graphs.report
    del taken
    assert ModelStream(CUDA)._stream is not None


# ── others who wait ──────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def test_a_capture_that_another_thread_broke_is_tried_again(
    driver: Driver, runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    driver.waiting_elsewhere = 1
    sequence, expected = opened(runner, 0), opened(plain_of(runner), 0)
    for _ in range(12):
        assert drafted([sequence]) == drafted([expected])
    assert runner.packed is not None
    assert driver.waiting_elsewhere == 0, "it was broken"
    assert runner.packed.graphs.report == "captured"
    assert driver.replays > 10
    assert not driver.allocating
    assert "will be tried again" in caplog.text


@torch.inference_mode()
def test_captures_that_always_fail_are_given_up(driver: Driver, runner: ModelRunner) -> None:
    driver.failing += [RuntimeError(f"a driver's error {n}") for n in range(40)]
    sequence = opened(runner, 0)
    for _ in range(300):
        drafted([sequence], 2)
        sequence.runner.pool  # noqa: B018 the same row all along
        if driver.failing and runner.packed and runner.packed.graphs.reason:
            break
    assert runner.packed is not None
    assert runner.packed.graphs.report.startswith("eager: RuntimeError: a driver's error 3")


@torch.inference_mode()
def test_one_member_that_frees_its_steps_breaks_no_capture_of_another(
    driver: Driver, runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    second = paged_runner(runner.model, runner)
    sequence = opened(second, 1)
    for _ in range(4):
        drafted([sequence])
    freed: list[int] = []

    def free(*_: Any) -> None:
        if driver.capturing and not freed:
            freed.append(driver.captures)
            thread = threading.Thread(target=lambda: (second.free_spare(), second.drop_steps()))
            thread.start()
            thread.join()

    hook = runner.model.model.layers[1].register_forward_hook(free)
    try:
        mine = opened(runner, 0)
        for _ in range(3):
            drafted([mine])
    finally:
        hook.remove()
    assert freed
    assert driver.captures > freed[0]
    assert "a capture failed" not in caplog.text


# ── numbers that drift ───────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def test_a_replay_that_differs_from_a_run_is_not_used_again(
    driver: Driver, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_steps, "_FIRST_CHECK", 8)
    sequence = opened(runner, 0)
    for _ in range(4):
        drafted([sequence])
    assert runner.packed is not None
    assert runner.packed.graphs.report == "captured"
    assert driver.replays > 4
    layer = runner.model.model.layers[0].mlp.down_proj
    before = layer.weight
    layer.weight = torch.nn.Parameter(-3 * before, requires_grad=False)  # a replay still uses the old one
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(8):
                drafted([sequence])
        replays = driver.replays
        drafted([sequence])
    finally:
        layer.weight = before
    assert runner.packed.graphs.report.startswith("eager: ReplayError: a replay gave other numbers")
    assert "runs without CUDA graphs" in caplog.text
    assert driver.replays == replays
    assert runner.forwards["replayed"] >= 8


# ── what the lane counts ─────────────────────────────────────────────────────────────────────────


@pytest.fixture
def lane_members(streams: None, tiny_engine: EnsembleEngine) -> Iterator[list[LocalMember]]:
    with EnsembleEngine(replace(tiny_engine.config, execution="paged", speculation="off")) as engine:
        yield local_members(engine)


def test_the_seconds_of_a_forward_pass_are_measured_on_the_device(
    driver: Driver, lane_members: list[LocalMember], tiny_engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host does not wait for the device, so a clock on the host would stop when the work is queued."""
    driver.a_replay = 5.0
    reported: list[float] = []
    settings = replace(tiny_engine.config, execution="paged", speculation="off")
    answer = open_session(settings, lane_members, [Message("user", "the tides")], SamplingParams(max_tokens=60))
    answer.lane._on_forward = lambda member, answers, seconds, steps=1: reported.append(seconds)
    before, driver.lags = driver.seconds, True
    events = answer.events()
    for _ in range(4):
        next(events)
    assert not reported, "the device has not finished"
    driver.lags = False
    for _ in events:
        pass
    answer.release()
    spent = driver.seconds - before
    assert spent > 10
    assert sum(reported) == pytest.approx(spent)


def test_existing_blocks_count_as_capacity_for_answers(member: LocalMember, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 1 << 32
    runner = ModelRunner(member.runner.model, member.runner.plan)
    monkeypatch.setattr(lane, "free_memory", lambda name: free - runner.pool.memory_bytes)
    monkeypatch.setattr(type(member), "runner", property(lambda self: runner))
    local = LocalLane([member])
    [(name, before)] = local.memory().items()
    opened(runner, 0)
    assert runner.pool.memory_bytes > 0
    assert local.memory() == {name: before}


# ── many answers ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("execution", ["dynamic", pytest.param("paged", marks=pytest.mark.slow)])
def test_greedy_choices_read_from_the_device_once_a_forward_pass(
    driver: Driver, tiny_engine: EnsembleEngine, execution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions, params = [f"{n} moons and tides" for n in range(5)], SamplingParams(max_tokens=40)
    expected = [answer_of(result) for result in tiny_engine.generate_batch(questions, params)]
    picks: list[int] = []
    pick = Sampler.pick
    monkeypatch.setattr(Sampler, "pick", lambda self, *args: picks.append(1) or pick(self, *args))  # type: ignore[func-returns-value]
    with EnsembleEngine(replace(tiny_engine.config, execution=execution)) as engine:
        results = [answer_of(result) for result in engine.generate_batch(questions, params)]
        count = len(picks)
        picks.clear()
        for each in local_members(engine):
            each.runner.reports_argmax = True
        assert [answer_of(result) for result in engine.generate_batch(questions, params)] == results == expected
    assert count > 150
    assert len(picks) < 0.15 * count, "only where the most probable token is forbidden, or a draft is reused"


@pytest.mark.parametrize("execution", ["dynamic", "paged"])
def test_tokens_of_all_answers_are_chosen_together_for_any_rule_and_grammar(
    tiny_engine: EnsembleEngine, execution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: no answer waits for its own token, and each has the same token as on a CPU."""
    prompts = requests(10)
    questions, params = [question for question, _ in prompts], [each for _, each in prompts]
    words = Grammar.regex("([a-f]{2,5} ){3,8}")
    questions += [f"Letters of {n}?" for n in range(4)]
    params += [SamplingParams(max_tokens=24, grammar=words, temperature=n / 2, seed=n) for n in range(4)]
    picks: list[int] = []
    batches: list[int] = []
    pick, together = Sampler.pick, PendingToken.together
    monkeypatch.setattr(Sampler, "pick", lambda self, *args: picks.append(1) or pick(self, *args))  # type: ignore[func-returns-value]
    monkeypatch.setattr(PendingToken, "together", lambda each: batches.append(len(each)) or together(each))  # type: ignore[func-returns-value]
    with EnsembleEngine(replace(tiny_engine.config, execution=execution)) as engine:
        expected = [answer_of(result) for result in engine.generate_batch(questions, params)]
        assert picks
        assert not any(batches)
        picks.clear()
        for member in local_members(engine):
            member.runner.reports_argmax = True
        assert [answer_of(result) for result in engine.generate_batch(questions, params)] == expected
    assert len(picks) < 0.1 * sum(batches), "greedy ones whose most probable token is forbidden"
    assert max(batches) > 3


def test_masks_are_built_on_the_device(tiny_engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host sends a byte for each slot, visible or not, instead of float masks for each kind of layer."""
    sent: list[torch.dtype] = []
    send = upload

    def noted(values: Any, device: torch.device) -> torch.Tensor:
        sent.append(torch.as_tensor(values).dtype)
        return send(values, device)

    monkeypatch.setattr(attention, "upload", noted)
    tiny_engine.generate("The tides", SamplingParams(max_tokens=12))
    assert torch.bool in sent
    assert not any(dtype.is_floating_point for dtype in sent)


# ── streams ──────────────────────────────────────────────────────────────────────────────────────


class Unreferable:
    """A stream like torch's: weak references to it are not cleared, so there must be none."""

    __slots__ = ("cuda_stream",)
    made = 0

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.cuda_stream = Unreferable.made % 32 - 100 * priority
        Unreferable.made += 1


def test_a_stream_belongs_to_its_owner_and_is_freed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Unreferable)
    monkeypatch.setattr(cuda_streams, "_owners", type(cuda_streams._owners)())
    owners: list[Any] = [type("Owner", (), {})() for _ in range(65)]
    streams = [cuda_streams.own_stream(CUDA, owner) for owner in owners]
    assert streams.pop() is None, "there are 32 of each of two priorities"
    assert len({stream.cuda_stream for stream in streams}) == 64
    free = streams[40].cuda_stream
    del owners[40]
    assert cuda_streams.own_stream(CUDA, owners[-1]).cuda_stream == free
