"""Fusion and the scheduler with lanes of plain Python: requests, their order, and the effects of faults."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from specfuse_shared import SamplingParams
from specfuse_shared.errors import EngineClosedError, GenerationError, RequestTimeoutError
from specfuse_shared.events import FinishEvent, SegmentEvent, StartEvent, WarningEvent
from specfuse_shared.members.stages import Close, Commit, Draft, DraftAlone, Fault, Open, StageRequest, Verify
from tests.support.fake_engine import OTHER, TALE, FakeEngine, two
from tests.support.fake_lane import FakeLane, scripted

STAGES = ("prefill", "draft", "verify")


@contextmanager
def fake(*lanes: FakeLane, **settings: object) -> Iterator[FakeEngine]:
    with FakeEngine(*lanes, **settings) as engine:
        yield engine
    assert all(lane.closed for lane in lanes)


def test_a_round_asks_every_member_to_draft_and_verify_and_drafts_carry_commits() -> None:
    first, second = two()
    with fake(first, second) as engine:
        result = engine.generate("help me", SamplingParams(max_tokens=50))
        assert not first.answers
        assert not second.answers
    assert result.text == " " + TALE.removesuffix(" .")
    kinds = [type(request.op) for request in first.requests]
    assert kinds[:5] == [Open, Draft, Verify, Draft, Verify]
    assert kinds[-1] is Close
    assert kinds == [type(request.op) for request in second.requests]
    [_, draft, *_] = [request.op for request in second.requests if isinstance(request.op, Draft)]
    assert draft.commit == " the sea follows"
    assert result.usage.members["b"].prompt == 2


def test_other_members_commit_while_one_member_drafts() -> None:
    lane = FakeLane({"a": scripted(TALE), "b": scripted(OTHER)}, may_guess=True)
    with fake(lane) as engine:
        assert engine.generate("help me", SamplingParams(max_tokens=50)).text == " " + TALE.removesuffix(" .")
    [led, commit, follower] = [request for request in lane.requests if not isinstance(request.op, (Open, Verify))][2:5]
    assert isinstance(led.op, Draft)
    assert isinstance(follower.op, Draft)
    assert (led.op.commit, commit.op, follower.op.commit) == (" the sea follows", Commit(" the sea follows"), "")
    assert led.member != commit.member == follower.member


def test_text_that_may_fill_a_context_is_committed_separately() -> None:
    retained, limit, alone = SamplingParams(max_tokens=50), 100, 0
    with fake(FakeLane({"a": scripted(TALE), "b": scripted(OTHER)})) as engine:
        expected = engine.generate("help me", retained)
    lane = FakeLane({"a": scripted(TALE), "b": scripted(OTHER)}, context_limit=limit)
    with fake(lane) as engine:
        assert engine.generate("help me", retained).text == expected.text
    assert not any(isinstance(request.op, Commit) for request in lane.requests), "the cache holds the whole answer"
    for limit in range(26, 60, 3):
        lane = FakeLane({"a": scripted(TALE), "b": scripted(OTHER)}, context_limit=limit)
        with fake(lane) as engine:
            result, room = engine.generate("help me", retained), 8 * engine.config.longest_segment
        counts = [2 + len(expected.text[: record.start].split()) for record in expected.rounds]
        assert len(result.rounds) == sum(used + room <= limit for used in counts)
        committed = [op.text if isinstance(op, Commit) else op.commit for op in lane.ops("a", Commit, Draft)]
        assert "".join(committed) == expected.text[: len("".join(committed))]
        alone += len(lane.ops("a", Commit))
    assert alone, "some contexts were nearly full"


def test_requests_of_concurrent_answers_to_a_lane_are_submitted_together() -> None:
    lane = FakeLane({"a": scripted(TALE)}, waiting=[])
    with fake(lane, max_concurrent=3) as engine:
        streams = [engine.stream(f"question {n}", SamplingParams(max_tokens=20)) for n in range(3)]
        limit = time.monotonic() + 10
        while len(lane.waiting or ()) < 3:
            assert time.monotonic() < limit
            time.sleep(0.001)
        waiting, lane.waiting = lane.waiting or [], []
        before = len(lane.submissions)
        lane.reply([lane._run(request) for request in waiting])
        while not lane.waiting:
            assert time.monotonic() < limit
            time.sleep(0.001)
        assert [len(requests) for requests in lane.submissions[before:]] == [3], "three answers, one submission"
        lane.release()
        assert all(isinstance(list(stream)[-1], FinishEvent) for stream in streams)


@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_removes_its_member_from_one_answer_only(stage: str) -> None:
    def disturb(request: StageRequest) -> Fault | None:
        return Fault("RuntimeError", "injected") if request.op.stage == stage and request.answer == 1 else None

    first, second = two()
    second.disturb = disturb
    with fake(first, second) as engine:
        events = list(engine.stream("help me", SamplingParams(max_tokens=50)))
        [warning] = [event for event in events if isinstance(event, WarningEvent)]
        assert (warning.member, warning.stage) == ("b", stage)
        assert isinstance(events[-1], FinishEvent)
        assert events[-1].result.text == " " + TALE.removesuffix(" .")
        assert [type(r.op) for r in second.requests if r.answer == 1][-1] is Close
        assert not engine.generate("and again", SamplingParams(max_tokens=50)).warnings


@pytest.mark.parametrize("stage", STAGES)
def test_the_error_without_remaining_members_names_the_last_one_and_its_stage(stage: str) -> None:
    lane = FakeLane({"a": scripted(TALE), "b": scripted(OTHER)})
    lane.disturb = lambda request: Fault("RuntimeError", "injected", "deep down") if request.op.stage == stage else None
    with fake(lane) as engine, pytest.raises(GenerationError, match=f"failed in {stage}: injected") as failure:
        engine.generate("help me", SamplingParams(max_tokens=50))
    assert failure.value.__notes__ == ["deep down"]


def test_a_broken_lane_ends_the_engine() -> None:
    first, second = two()
    second.disturb = lambda request: Fault("SystemExit", "killed", is_fatal=True)
    engine = FakeEngine(first, second)
    with pytest.raises(EngineClosedError, match=r"worker stopped \(LaneDiedError: SystemExit: killed\)"):
        engine.generate("help me")
    engine.close()
    assert first.closed
    assert second.closed


def test_cancelling_and_timeouts_close_sessions_during_a_stage() -> None:
    lane = FakeLane({"a": scripted(TALE)}, waiting=[])
    with fake(lane, max_concurrent=2) as engine:
        stream = engine.stream("never", SamplingParams(max_tokens=20))
        with pytest.raises(RequestTimeoutError):
            engine.generate("too late", SamplingParams(max_tokens=20), timeout=0.05)
        stream.close()  # type: ignore[attr-defined]
        assert engine.metrics().running == 2, "their memory is in use until the lane reports otherwise"
        lane.release()
        limit = time.monotonic() + 10
        while engine.metrics().running:
            assert time.monotonic() < limit
            time.sleep(0.001)
        assert not lane.answers
        assert isinstance(next(engine.stream("after all", SamplingParams(max_tokens=20))), StartEvent)


@pytest.mark.parametrize("names", ["a", "ab"])
@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 11), (11, 11), (12, 16), (16, 16), (17, 20)])
def test_no_member_ends_its_turn_before_min_tokens(names: str, min_tokens: int, expected: int) -> None:
    script = scripted(TALE + " and on and on . and on and on and on")
    lane = FakeLane(dict.fromkeys(names, script))
    with fake(lane) as engine:
        result = engine.generate("help me", SamplingParams(max_tokens=20, min_tokens=min_tokens))
    assert result.usage.completion_tokens == expected
    assert result.finish_reason == ("length" if expected == 20 else "stop")
    holds = [request.op.min_tokens_left for request in lane.requests if isinstance(request.op, (Draft, DraftAlone))]
    assert holds == [max(0, min_tokens - n) for n in range(0, 3 * len(holds) // len(names), 3) for _ in names]


def test_segments_arrive_one_by_one() -> None:
    with fake(*two()) as engine:
        texts = [e.text for e in engine.stream("help me") if isinstance(e, SegmentEvent)]
    assert texts == [" the sea follows", " the moon and", " the moon follows", " the sun"]


def test_a_segment_is_streamed_before_members_commit_it() -> None:
    output, waited = threading.Semaphore(0), list[bool]()

    def disturb(request: StageRequest) -> None:
        if isinstance(request.op, Draft) and request.op.commit and request.member == "a":
            waited.append(output.acquire(timeout=10))

    with fake(*two(disturb=disturb)) as engine:
        for event in engine.stream("help me"):
            if isinstance(event, SegmentEvent):
                output.release()
    assert waited == [True] * 3


def test_fusion_and_text_import_no_tensor_library() -> None:
    modules = "specfuse_shared.fusion.session, specfuse_shared.members.stages, specfuse_shared.text.chat_template"
    script = f"import sys, {modules}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
