"""A broken part is reported immediately: to new callers, to waiting callers, and by a server's health."""

from __future__ import annotations

import logging
import pickle
import queue
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specfuse_shared import EnsembleEngine, SamplingParams
from specfuse_shared.candidate import CandidateLogprobs
from specfuse_shared.errors import EngineClosedError, MemberLoadError
from specfuse_shared.loading.gguf import gguf_head
from specfuse_shared.members.local.lane import LaneThread
from specfuse_shared.members.pipe import Answered, PipedLane, Ready
from specfuse_shared.members.stages import CacheUse, Closed, Fault, StageRequest, StageResult, Think
from specfuse_shared.serving.engine import lease_engine
from tests.support.elections import elect
from tests.support.fake_engine import TALE, FakeEngine, two
from tests.support.fake_lane import FakeLane, scripted

# ── engines ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def broken() -> Iterator[FakeEngine]:
    """An engine that answered once before its lane broke."""
    lane = FakeLane({"a": scripted(TALE)})
    with FakeEngine(lane) as engine:
        engine.generate("x", SamplingParams(max_tokens=5))
        lane.disturb = lambda request: Fault("SystemExit", "killed", is_fatal=True)
        with pytest.raises(EngineClosedError, match="SystemExit: killed"):
            engine.generate("x", SamplingParams(max_tokens=5))
        lane.disturb = lambda request: None
        yield engine


def test_a_broken_engine_is_closed_with_the_reason(broken: FakeEngine) -> None:
    assert broken.closed
    assert "SystemExit: killed" in str(broken.failure)
    assert broken.failure is not None
    assert broken.failure.public == "the engine's worker stopped"
    with pytest.raises(EngineClosedError, match="worker stopped"):
        broken.generate("x", SamplingParams(max_tokens=5))


def test_a_closed_engine_is_not_reported_as_broken() -> None:
    engine = FakeEngine(FakeLane({"a": scripted(TALE)}))
    engine.load()
    assert not engine.closed
    engine.close()
    assert engine.closed
    assert engine.failure is None


def test_a_lease_never_gets_a_broken_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeEngine] = []

    def make(config: Any) -> EnsembleEngine:
        made.append(FakeEngine(FakeLane({"a": scripted(TALE)})))
        made[-1].config = config
        return made[-1]

    monkeypatch.setattr("specfuse_shared.serving.engine.EnsembleEngine", make)
    config = FakeEngine(FakeLane({"a": scripted(TALE)}), max_concurrent=7).config
    first = lease_engine(config)
    first.engine.generate("x", SamplingParams(max_tokens=5))
    with lease_engine(config) as lease:
        assert lease.engine is first.engine
    made[0].lanes[0].disturb = lambda request: Fault("SystemExit", "killed", is_fatal=True)
    with pytest.raises(EngineClosedError):
        first.engine.generate("x", SamplingParams(max_tokens=5))
    with lease_engine(config) as fresh:
        assert fresh.engine is made[1]
        assert fresh.engine.generate("x", SamplingParams(max_tokens=50)).text == " " + TALE.removesuffix(" .")
        assert made[0].lanes[0].closed, "the broken engine's lane is closed"
    first.close()


def test_a_lane_that_breaks_while_idle_is_detected() -> None:
    lane = FakeLane({"a": scripted(TALE)})
    with FakeEngine(lane) as engine:
        engine.generate("x", SamplingParams(max_tokens=5))
        lane.fault = Fault("SystemExit", "killed", is_fatal=True)
        assert engine.closed
        assert "killed" in str(engine.failure)


def test_members_of_a_lost_lane_are_named_while_others_answer() -> None:
    first, second = two()
    with FakeEngine(first, second) as engine:
        assert engine.load().lost_members == ()
        second.fault = Fault("EOFError", "gone")
        second.disturb = lambda request: second.fault
        result = engine.generate("x", SamplingParams(max_tokens=50))
        assert result.text == " " + TALE.removesuffix(" .")
        assert engine.lost_members == ("b",)
        assert not engine.closed
        second.fault, second.disturb = None, lambda request: None
        assert engine.lost_members == ()


def test_a_lane_with_an_ended_thread_reports_it(tiny_engine: EnsembleEngine) -> None:
    class Dying:
        """A lane whose first step ends its thread."""

        local = next(lane for lane in tiny_engine.load()._assembly.lanes if hasattr(lane, "local")).local
        wait_seconds = 0.0

        def reply_to(self, reply: object) -> None:
            pass

        def step(self) -> None:
            raise SystemExit("killed")

        def close(self) -> None:
            pass

    lane = LaneThread(Dying())
    lane.close()
    assert lane.fault == Fault("SystemExit", "killed", lane.fault.details, is_fatal=True)


# ── pipes ────────────────────────────────────────────────────────────────────────────────────────


class Wire:
    """The coordinator's end of a pipe: it always receives these messages."""

    def __init__(self, *messages: object, unsendable: bool = False) -> None:
        self.inbox: queue.Queue[object] = queue.Queue()
        self.messages, self.unsendable = messages, unsendable
        self.inbox.put(Ready((), {}))

    def send(self, message: object, /) -> None:
        if message is None:  # the other end closes
            self.inbox.put(EOFError())
        if not isinstance(message, tuple):
            return
        if self.unsendable:
            raise pickle.PicklingError("it cannot cross")
        for each in self.messages:
            self.inbox.put(each)

    def recv(self) -> Any:
        result = self.inbox.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        self.inbox.put(EOFError())


ASKED = StageRequest(1, "a", Think(1, 1))


def pending_stage(wire: Wire) -> tuple[PipedLane, list[StageResult]]:
    """The result of a requested stage."""
    lane, results, answered = PipedLane("a", wire), list[StageResult](), threading.Event()

    def reply(result: Any) -> None:
        results.extend(result)
        answered.set()

    lane.reply_to(reply)
    lane.submit([ASKED])
    assert answered.wait(10), "no caller may wait for a lane that is gone"
    return lane, results


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (EOFError(), "EOFError"),
        (OSError("broken pipe"), "EOFError"),
        (RuntimeError("CUDA error: device-side assert triggered"), "RuntimeError"),
        (pickle.UnpicklingError("half a message"), "UnpicklingError"),
        ("nonsense", "AttributeError"),
        (Answered((), CacheUse(), (("a",),)), "TypeError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_failure_of_a_pipes_reader_is_a_fault_of_its_stages(message: object, kind: str) -> None:
    lane, [result] = pending_stage(Wire(message))
    assert result.error is not None
    assert result.error.kind == kind
    assert not result.error.is_fatal
    assert lane.fault == result.error
    late: list[StageResult] = []
    lane.reply_to(late.extend)
    lane.submit([ASKED])
    assert [each.error for each in late] == [result.error]
    lane.close()


def test_an_unrequested_result_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    unknown, expected = (Answered((StageResult(n, "a", Closed()),), CacheUse(), ()) for n in (99, 1))
    with caplog.at_level(logging.WARNING, "specfuse_shared.members.pipe"):
        lane, [result] = pending_stage(Wire(unknown, expected))
    assert (result.answer, result.value, lane.fault) == (1, Closed(), None)
    assert "was not asked" in caplog.text
    lane.close()


def test_an_object_that_cannot_be_pickled_fails_alone() -> None:
    lane, [result] = pending_stage(Wire(unsendable=True))
    assert result.error is not None
    assert result.error.kind == "PicklingError"
    assert lane.fault is None
    lane.close()


# ── numbers and files that lie ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lie", [float("nan"), float("inf"), 800.0, 5.0])
def test_an_election_rejects_values_that_are_no_probabilities(lie: float) -> None:
    good, bad = "good", "bad!"

    def row(first: float, second: float) -> list[CandidateLogprobs]:
        return [CandidateLogprobs(text, False, [p], [4]) for text, p in ((good, first), (bad, second))]

    honest = elect([row(-0.1, -3.0), row(-0.1, -3.0)], [[0], [1]])
    lied = elect([row(-0.1, -3.0), row(-3.0, lie)], [[0], [1]])
    assert honest.winner == lied.winner == 0
    assert lied.scores[1][1] == 0.0


def head(*entries: bytes, count: int = 1) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, count) + b"".join(entries)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


CONTEXT = text(b"llama.context_length") + struct.pack("<II", 4, 4096)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "requires a buffer"),
        (b"GGML" + head()[4:], "does not begin with GGUF"),
        (head(), "requires a buffer"),
        (head(text(b"k"), struct.pack("<I", 99)), "unknown kind 99"),
        (head(text(b"k"), struct.pack("<I", 9), struct.pack("<IQ", 9, 1) * 3000), "unknown kind 9"),
        (head(text(b"k"), struct.pack("<IQ", 8, 1 << 62)), "a text of"),
        (head(text(b"k"), struct.pack("<IIQ", 9, 4, 1 << 62), CONTEXT, count=2), "broken"),
        (head(CONTEXT, count=1 << 62), "entries"),
    ],
)
def test_an_invalid_header_of_a_gguf_file_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(data)
    with pytest.raises(MemberLoadError, match=says):
        gguf_head(file)
    engine = EnsembleEngine([str(file)])
    assert engine.context_limit is None
    with pytest.raises(MemberLoadError, match=r"m\.gguf"):
        engine.load()


def test_the_header_of_a_gguf_file_has_the_context_limit(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    scalars = text(b"s") + struct.pack("<IIQ4H", 9, 2, 4, *range(4))
    strings = text(b"t") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"b")
    file.write_bytes(head(scalars, strings, CONTEXT, count=3))
    assert gguf_head(file).context == 4096
    assert gguf_head(file).values["s"] == (0, 1, 2, 3)
