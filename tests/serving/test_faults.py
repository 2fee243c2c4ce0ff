"""Faults in one member or one request at every stage: no hang, no lost text, no effect on concurrent answers."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, SamplingParams
from specfuse_shared.errors import EngineClosedError, GenerationError, MemberLoadError
from specfuse_shared.events import EnsembleResult, FinishEvent, SegmentEvent, WarningEvent
from specfuse_shared.members.assembly import Assembly
from specfuse_shared.members.local.lane import LocalLane
from specfuse_shared.runtime.out_of_memory import is_out_of_memory
from tests.support.against_naive import FAULT_ROW, local_members
from tests.support.faults import FAULTS, fault_in

POISONED, NEIGHBOUR = "Tell me about the poisoned well.", "How do the tides follow the moon?"
PARAMS = SamplingParams(max_tokens=40)
STAGES = ("prefill", "draft", "verify", "commit")
TABLE: list[tuple[str, str, str, str]] = []


@dataclass
class Outcome:
    result: EnsembleResult | None
    warnings: list[WarningEvent]
    shown: str
    error: GenerationError | None


@pytest.fixture(scope="module")
def engine(tiny_engine: EnsembleEngine) -> Iterator[EnsembleEngine]:
    with EnsembleEngine(replace(tiny_engine.config, exit="never", segment_tokens=5)) as made:
        yield made.load()


@pytest.fixture(autouse=True)
def record_faults(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Record the injected faults and their effects for the summary of the run."""
    before = len(TABLE)
    yield
    for row in TABLE[before:]:
        record_property(FAULT_ROW, row)


def outcome_of(events: Any) -> Outcome:
    warnings, output, result, error = [], "", None, None
    try:
        for event in events:
            if isinstance(event, WarningEvent):
                warnings.append(event)
            elif isinstance(event, SegmentEvent):
                output += event.text
            elif isinstance(event, FinishEvent):
                result = event.result
    except GenerationError as failure:
        error = failure
    return Outcome(result, warnings, output, error)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", FAULTS)
def test_a_faulty_member_leaves_and_the_answer_continues(engine: EnsembleEngine, stage: str, kind: str) -> None:
    with fault_in(engine, stage, FAULTS[kind], only=None):
        result = outcome_of(engine.stream(NEIGHBOUR, PARAMS))
    [warning] = result.warnings
    assert warning.member == "base"
    # a segment is committed with the next draft, which also reads a NaN of the prompt
    assert warning.stage == ("draft" if stage == "commit" or (stage, kind) == ("prefill", "NaN") else stage)
    assert result.result is not None
    assert result.shown == result.result.text != ""
    if stage != "commit":  # a follower may first commit in the last round: the leader depends on measured seconds
        assert result.result.rounds[-1].active == ("chat",)
    exits = [e for r in result.result.rounds for e in r.exits]
    assert [(e.member, e.reason) for e in exits] == [("base", "fault")]
    TABLE.append((kind, stage, "a member", f"left in {warning.stage}; {len(result.shown)} characters by the other one"))
    healthy = outcome_of(engine.stream(NEIGHBOUR, PARAMS))
    assert not healthy.warnings, "the fault ended with its request"


NEIGHBOURS = [f"{NEIGHBOUR} {n}" for n in range(3)]


@pytest.fixture(scope="module")
def undisturbed(engine: EnsembleEngine) -> list[str]:
    """The neighbours' answers without a fault."""
    return [engine.generate(question, PARAMS).text for question in NEIGHBOURS]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", FAULTS)
def test_one_poisoned_request_fails_alone(
    engine: EnsembleEngine, undisturbed: list[str], stage: str, kind: str
) -> None:
    with fault_in(engine, stage, FAULTS[kind], only="poisoned"):
        streams = [engine.stream(question, PARAMS) for question in (*NEIGHBOURS, POISONED)]
        results = [outcome_of(stream) for stream in streams]
    assert [each.shown for each in results[:3]] == undisturbed
    assert not any(each.warnings for each in results[:3])
    assert [w.member for w in results[3].warnings] == ["base"]
    assert results[3].result is not None
    TABLE.append((kind, stage, "one request", "its member left; three neighbours byte for byte as before"))


@pytest.mark.parametrize("kind", FAULTS)
def test_the_error_without_remaining_members_names_the_last_one_and_has_the_text(
    tiny_engine: EnsembleEngine, kind: str
) -> None:
    base = tiny_engine.config.member_configs[1]
    config = EnsembleConfig(
        members=[replace(base, name=n) for n in ("one", "two")],
        segment_tokens=5,
        first_segment_tokens=None,
        exit="never",
    )
    with EnsembleEngine(config) as engine:
        calls = {m.name: iter(range(10_000)) for m in local_members(engine)}
        for m in local_members(engine):
            plain, fault = m.runner.step, FAULTS[kind]

            def step(segments: Any, m: Any = m, plain: Any = plain, fault: Any = fault) -> Any:
                result = plain(segments)
                return [fault(rows) for rows in result] if next(calls[m.name]) > 20 else result

            m.runner.step = step  # type: ignore[method-assign]
        result = outcome_of(engine.stream(NEIGHBOUR, replace(PARAMS, max_tokens=300)))
        assert result.error is not None
        assert result.error.member in ("one", "two")
        assert result.error.text == result.shown != ""
        assert result.error.member in str(result.error)
    TABLE.append((kind, "any", "all members", "GenerationError with the text so far"))


def test_loading_can_be_retried_after_a_failed_member(tiny_engine: EnsembleEngine) -> None:
    base = tiny_engine.config.member_configs[1]
    with EnsembleEngine(EnsembleConfig(members=[base, MemberConfig("/nowhere/model")])) as engine:
        for _ in range(2):
            with pytest.raises(MemberLoadError, match="/nowhere/model"):
                engine.generate("x")
    TABLE.append(("missing files", "load", "a member", "MemberLoadError that names it, each time"))


def test_members_are_closed_if_loading_is_interrupted_after_their_weights(
    tiny_engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(assembly: Assembly) -> None:
        raise KeyboardInterrupt

    def noted(lane: LocalLane) -> None:
        closed.append(lane)
        close(lane)

    closed: list[LocalLane] = []
    close = LocalLane.close
    monkeypatch.setattr(LocalLane, "close", noted)
    with EnsembleEngine(tiny_engine.config) as engine, monkeypatch.context() as patch:
        patch.setattr(Assembly, "read_vocabularies", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.load()
        assert {name for lane in closed for name in lane.local} == set(tiny_engine.config.names)
        patch.undo()
        assert engine.generate("x", SamplingParams(max_tokens=2)).usage.completion_tokens == 2


def test_out_of_memory_first_splits_the_batch(engine: EnsembleEngine) -> None:
    runner = local_members(engine)[0].runner
    plain, refused, sizes = runner.step, [], []

    def step(segments: Any) -> Any:
        if len(segments) > 2:
            refused.append(len(segments))
            raise torch.OutOfMemoryError("injected: out of memory")
        sizes.append(len(segments))
        return plain(segments)

    questions = [f"{NEIGHBOUR} {n}" for n in range(5)]
    expected = [engine.generate(question, PARAMS).text for question in questions]
    runner.step = step  # type: ignore[method-assign]
    try:
        results = engine.generate_batch(questions, PARAMS)
    finally:
        del runner.step
    assert [r.text for r in results if isinstance(r, EnsembleResult)] == expected
    assert refused
    assert max(sizes) == 2
    TABLE.append(("out of memory", "any", "big batches", f"split into halves {len(refused)} times, same answers"))


def test_out_of_memory_then_drops_cached_prefixes(engine: EnsembleEngine) -> None:
    engine.generate(NEIGHBOUR, PARAMS)
    runner = local_members(engine)[0].runner
    plain = runner.step

    def step(segments: Any) -> Any:
        if runner.prefixes.memory_bytes:
            raise torch.OutOfMemoryError("injected: out of memory")
        return plain(segments)

    assert runner.prefixes.memory_bytes > 0
    runner.step = step  # type: ignore[method-assign]
    try:
        result = outcome_of(engine.stream("Another question altogether", PARAMS))
    finally:
        del runner.step
    assert result.result is not None
    assert not result.warnings
    TABLE.append(("out of memory", "any", "prefix cache", "dropped, then the answer continues unharmed"))


def test_a_policy_that_raises_fails_its_own_answer_only(tiny_engine: EnsembleEngine) -> None:
    calls = iter(range(100))

    def exit_policy(totals: Any, round_index: int) -> Any:
        if next(calls) == 2:
            raise ZeroDivisionError("user code")
        from specfuse_shared.policies import never

        return never(totals, round_index)

    with EnsembleEngine(replace(tiny_engine.config, exit=exit_policy)) as engine:
        result = outcome_of(engine.stream(NEIGHBOUR, PARAMS))
        assert result.error is not None
        assert "ZeroDivisionError: user code" in str(result.error)
        assert result.error.text.startswith(result.shown)
        assert outcome_of(engine.stream(NEIGHBOUR, PARAMS)).result is not None


def test_a_dying_worker_ends_every_waiting_call(tiny_engine: EnsembleEngine) -> None:
    with EnsembleEngine(replace(tiny_engine.config, max_concurrent=1)) as engine:
        runner = local_members(engine)[0].runner
        plain, steps = runner.step, iter(range(5))

        def dies(segments: Any) -> Any:
            if next(steps, None) is None:
                raise SystemExit("worker killed")
            return plain(segments)

        runner.step = dies  # type: ignore[method-assign]
        streams = [engine.stream(f"{NEIGHBOUR} {n}", PARAMS) for n in range(3)]
        for stream in streams:
            with pytest.raises(EngineClosedError, match="worker stopped"):
                list(stream)
        with pytest.raises(EngineClosedError, match="worker stopped"):
            engine.generate("x")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("MPS backend out of memory (MPS allocated: 17.90 GB, max allowed: 18.13 GB)"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OSError("Cannot allocate memory (os error 12)"),
    ],
)
def test_every_kind_of_memory_error_is_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), OSError(2, "no such file"), ValueError("memory")])
def test_other_errors_are_not_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)
