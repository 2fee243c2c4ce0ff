"""Errors of a driver over the life of a member's graphs: a graph that is freed alone, a stream with two users, a
thread that waits in between, and numbers that drift. All run on the replacement for CUDA graphs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from specfuse_shared import EnsembleEngine, MemberConfig, Message, SamplingParams
from specfuse_shared.members.local import lane, probe
from specfuse_shared.members.local.lane import LocalLane
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.members.local.sequence import ForwardRequest, feed_together
from specfuse_shared.members.token_tree import Branch
from specfuse_shared.runtime import attention, cuda_streams, kv_cache, model_runner, static_runner
from specfuse_shared.runtime.cuda_streams import ModelStream
from specfuse_shared.runtime.model_runner import ModelRunner, share_memory
from specfuse_shared.runtime.sampler import Sampler, upload
from specfuse_shared.runtime.static_runner import Graphs, StaticStep
from tests.support.against_naive import answer_of, local_members, open_session
from tests.support.captured import drafted, opened
from tests.support.graphs_without_gpu import Driver, driver

__all__ = ["driver"]
CUDA = torch.device("cuda", 0)


def plain_of(runner: ModelRunner) -> ModelRunner:
    return ModelRunner(runner.model, runner.plan, graphs=Graphs(runner.device, "plain", "switched off"))


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """Prompts whose rows are of different capacity, so that a step of each is another one to capture."""
    monkeypatch.setitem(kv_cache._SMALLEST_ROW, "cpu", 64)
    return 10, 70, 150, 280


@pytest.fixture
def streams(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members on the processor have streams, as on a card."""
    for module in (probe, model_runner):
        monkeypatch.setattr(module, "ModelStream", lambda device: ModelStream(CUDA), raising=False)


# ── graphs of a member go together ───────────────────────────────────────────────────────────────


@torch.inference_mode()
def test_no_graph_outlives_another_whose_workspace_it_shares(
    driver: Driver, sizes: tuple[int, ...], runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_runner, "_MOST_STEPS", 6)
    monkeypatch.setattr(static_runner, "_MOST_GRAPHS", 3, raising=False)
    plain = plain_of(runner)
    pairs = [(opened(runner, n, size), opened(plain, n, size)) for n, size in enumerate(sizes)]
    for number in (0, 1, 2, 3, 0, 1, 2, 3, 2, 1, 0):
        for _ in range(4):
            one, second = pairs[number]
            assert drafted([one]) == drafted([second])
    assert not driver.freed
    assert driver.captures > 4, "some were captured again"
    assert runner.static is not None
    assert runner.static.graphs.report == "captured"


@torch.inference_mode()
def test_a_capture_that_gives_other_numbers_takes_no_workspace_along(
    driver: Driver, sizes: tuple[int, ...], runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = plain_of(runner)
    first, first_plain = opened(runner, 0, sizes[0]), opened(plain, 0, sizes[0])
    for _ in range(3):
        assert drafted([first]) == drafted([first_plain])
    captures = driver.captures
    assert captures > 0
    monkeypatch.setattr(static_runner, "_alike", lambda logits, expected: False)
    second, second_plain = opened(runner, 1, sizes[2]), opened(plain, 1, sizes[2])
    for _ in range(3):
        assert drafted([second]) == drafted([second_plain])
        assert drafted([first]) == drafted([first_plain])
    assert driver.captures == captures + 1
    assert not driver.freed
    assert runner.static is not None
    assert runner.static.graphs.report.startswith("eager: ReplayError")


@torch.inference_mode()
def test_a_step_that_is_over_holds_no_masks(driver: Driver, runner: ModelRunner) -> None:
    sequence = opened(runner, 0)
    for _ in range(4):
        drafted([sequence])
    assert runner.static is not None
    steps = [step for step in runner.static._steps.values() if isinstance(step, StaticStep)]
    assert any(step.replay for step in steps)
    assert not any(part.masks for step in steps for part in step.parts)


@torch.inference_mode()
def test_out_of_memory_drops_caches_before_the_steps_of_a_member(driver: Driver, runner: ModelRunner) -> None:
    second = ModelRunner(runner.model, runner.plan, graphs=Graphs(runner.device, "other"))
    share_memory([runner, second])
    for each in (runner, second):
        sequence = opened(each, 0)
        for _ in range(4):
            drafted([sequence])
        sequence.release()  # its block stays, empty
    assert runner.static is not None
    assert second.static is not None
    counts = []
    while second.pool.reclaim_memory():
        counts.append((runner.pool.memory_bytes, runner.static.graphs.count, second.static.graphs.count))
    held = second.static.graphs
    assert [graphs > 0 for graphs in (counts[0][1], counts[0][2])] == [True, True], "only blocks at first"
    assert counts[0][0] == 0
    assert [(a > 0, b > 0) for _, a, b in counts[1:]] == [(False, True), (False, False)]
    assert not driver.freed
    assert held.report == "captured"


# ── streams ──────────────────────────────────────────────────────────────────────────────────────


def test_six_members_have_separate_streams(streams: None, driver: Driver, tiny_engine: EnsembleEngine) -> None:
    """Streams of probes, too: torch has 32, and hands them out cyclically."""
    folders = [config.model for config in tiny_engine.config.member_configs]
    made: list[LocalMember] = []
    for number in range(6):
        config = MemberConfig(str(folders[number % 2]), name=f"m{number}")
        made.append(LocalMember(config, execution="static"))
    used = []
    for each in made:
        assert each.runner.static is not None
        assert each.runner.static.graphs.report == "captured"
        used += [each.runner.stream._stream, each.runner.static.graphs._stream]
    assert None not in used
    assert len({stream.cuda_stream for stream in used}) == 12
    assert next(driver._streams[0]) <= 12, "no more than two a member were made"


def test_without_a_stream_of_its_own_a_member_captures_nothing(driver: Driver) -> None:
    taken = [ModelStream(CUDA) for _ in range(64)]
    assert all(stream._stream is not None for stream in taken)
    late = ModelStream(CUDA)
    assert late._stream is None
    with late.entered():  # works on the default stream
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
    assert runner.static is not None
    assert driver.waiting_elsewhere == 0, "it was broken"
    assert runner.static.graphs.report == "captured"
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
        if driver.failing and runner.static and runner.static.graphs.reason:
            break
    assert runner.static is not None
    assert runner.static.graphs.report.startswith("eager: RuntimeError: a driver's error 3")


@torch.inference_mode()
def test_one_member_that_frees_its_steps_breaks_no_capture_of_another(
    driver: Driver, runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    second = ModelRunner(runner.model, runner.plan, graphs=Graphs(runner.device, "other"))
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
def test_a_replay_that_comes_to_differ_from_a_run_is_replayed_no_more(
    driver: Driver, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(static_runner, "_FIRST_CHECK", 8)
    sequence = opened(runner, 0)
    for _ in range(4):
        drafted([sequence])
    assert runner.static is not None
    assert runner.static.graphs.report == "captured"
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
    assert runner.static.graphs.report.startswith("eager: ReplayError: a replay gave other numbers")
    assert "runs without CUDA graphs" in caplog.text
    assert driver.replays == replays
    assert runner.forwards["replayed"] >= 8


# ── what the lane counts ─────────────────────────────────────────────────────────────────────────


@pytest.fixture
def lane_members(streams: None, tiny_engine: EnsembleEngine) -> Iterator[list[LocalMember]]:
    with EnsembleEngine(replace(tiny_engine.config, execution="static", speculation="off")) as engine:
        yield local_members(engine)


def test_the_seconds_of_a_forward_pass_are_measured_on_the_device(
    driver: Driver, lane_members: list[LocalMember], tiny_engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host does not wait for it: a clock that stops when all is queued would measure nothing."""
    driver.a_replay = 5.0
    reported: list[float] = []
    settings = replace(tiny_engine.config, execution="static", speculation="off")
    answer = open_session(settings, lane_members, [Message("user", "the tides")], SamplingParams(max_tokens=60))
    answer.lane._on_forward = lambda member, answers, seconds, steps=1: reported.append(seconds)
    before, driver.lags = driver.seconds, True
    events = answer.events()
    for _ in range(4):
        next(events)
    assert not reported, "the device is not through yet"
    driver.lags = False
    for _ in events:
        pass
    answer.release()
    spent = driver.seconds - before
    assert spent > 10
    assert sum(reported) == pytest.approx(spent)


def test_existing_blocks_count_as_capacity_for_answers(
    driver: Driver, member: LocalMember, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = 1 << 32
    monkeypatch.setattr(lane, "free_memory", lambda name: there - runner.pool.memory_bytes)
    monkeypatch.setattr(type(member), "runner", property(lambda self: runner))
    local = LocalLane([member])
    [(name, before)] = local.memory().items()
    opened(runner, 0).release()
    assert runner.pool.memory_bytes > 0, "the block stays"
    assert local.memory() == {name: before}


# ── many answers ─────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def test_one_guess_among_nine_answers_keeps_the_pass_in_a_fixed_shape(
    driver: Driver, member: LocalMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_runner, "_DEFAULT_MOST_TOKENS", static_runner.most_tokens(CUDA))
    model, plan = member.runner.model, member.runner.plan
    runner = ModelRunner(model, plan, graphs=Graphs(model.device, "tiny"))
    sequences = [opened(runner, n) for n in range(9)]
    before = runner.forwards["dynamic"]
    guess = Branch(0, tuple(range(30, 40)))
    feed_together([ForwardRequest(c, (Branch(0, (20,)),), guesses=(guess,) * (c is sequences[0])) for c in sequences])
    assert runner.forwards["dynamic"] == before


@pytest.mark.parametrize("execution", ["dynamic", "static"])
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
        request = len(picks)
        picks.clear()
        for each in local_members(engine):
            each.runner.reports_argmax = True
        assert [answer_of(result) for result in engine.generate_batch(questions, params)] == results == expected
    assert request > 150
    assert len(picks) < 0.15 * request, "only where the most probable token is forbidden, or a draft is reused"


def test_masks_are_made_where_they_are_read(tiny_engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent says which slots are seen, a byte each: not the numbers that are added, for each kind of layer."""
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
    """A stream as torch has them: nothing clears a weak reference to it when it goes, so there must be none."""

    __slots__ = ("cuda_stream",)
    made = 0

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.cuda_stream = Unreferable.made % 32 - 100 * priority
        Unreferable.made += 1


def test_a_stream_is_its_owners_and_free_again_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Unreferable)
    monkeypatch.setattr(cuda_streams, "_owners", type(cuda_streams._owners)())
    owners: list[Any] = [type("Owner", (), {})() for _ in range(65)]
    streams = [cuda_streams.own_stream(CUDA, owner) for owner in owners]
    assert streams.pop() is None, "there are 32 of each of two priorities"
    assert len({stream.cuda_stream for stream in streams}) == 64
    free = streams[40].cuda_stream
    del owners[40]
    assert cuda_streams.own_stream(CUDA, owners[-1]).cuda_stream == free
