"""The deadline of a round: late members are absent from rounds, catch up later, and delay no answer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import pytest

from specfuse_shared import ConfigError, EnsembleConfig, EnsembleEngine, Grammar, SamplingParams
from specfuse_shared.errors import RequestTimeoutError
from specfuse_shared.events import EnsembleResult, Event, ExitEvent, FinishEvent, SegmentEvent, StartEvent, WarningEvent
from specfuse_shared.loading.progress import OnLoadProgress
from specfuse_shared.members.assembly import Assembly
from specfuse_shared.members.local.lane import LaneThread, LocalLane
from specfuse_shared.members.stages import Close, Commit, Draft, DraftAlone, Fault, Open, StageRequest, Verify
from specfuse_shared.policies import ExitDecision
from specfuse_shared.types import MemberAbsence
from tests.support.against_naive import assert_equals_naive_with_absences, local_members
from tests.support.fake_engine import OTHER, TALE, FakeEngine, two
from tests.support.fake_lane import FakeLane, scripted
from tests.support.served import QUESTIONS
from tests.support.serving import until
from tests.support.slow_lane import NEVER, SlowLane

Delay = Callable[[StageRequest], float]

LONG = " ".join(f"word{n}" for n in range(300)) + " ."
PARAMS = SamplingParams(max_tokens=50)
WHOLE_TALE = " " + TALE.removesuffix(" .")


@contextmanager
def fake(*lanes: FakeLane | SlowLane, **settings: object) -> Iterator[FakeEngine]:
    settings = {"round_seconds": 0.05, "round_grace": 0.02, **settings}
    with FakeEngine(*lanes, **settings) as engine:
        yield engine


def of_round(request: StageRequest) -> int:
    return request.op.round_index if isinstance(request.op, Draft | DraftAlone) else 0


def text_of(op: object) -> str:
    """The text that a stage commits."""
    return op.text if isinstance(op, Commit) else op.commit if isinstance(op, Draft) else ""


def absent(result: EnsembleResult) -> list[list[str]]:
    return [[absence.member for absence in record.absent] for record in result.rounds]


def ended(events: Sequence[Event]) -> EnsembleResult:
    assert isinstance(events[-1], FinishEvent)
    return events[-1].result


# ── who is late ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stage", [Open, Draft, Verify])
def test_a_member_that_sleeps_in_a_stage_delays_no_answer(stage: type) -> None:
    first, second = two()
    slow = SlowLane(second, lambda request: NEVER if isinstance(request.op, stage) else 0)
    with fake(first, slow) as engine:
        began = time.monotonic()
        result = engine.generate("help me", PARAMS)
        assert time.monotonic() - began < 5
        assert result.text == WHOLE_TALE
        assert all(names == ["b"] for names in absent(result))
        late = None if stage is Open else "draft" if stage is Draft else "verify"
        assert result.rounds[0].absent == (MemberAbsence("b", late, 3 if late else 0),)
        assert {absence.stage for record in result.rounds[1:] for absence in record.absent} == {None}
        assert result.rounds[0].present == ("a",)
        assert [member.late_rounds for member in result.summary()] == [0, len(result.rounds)]
        assert engine.metrics().late_rounds == {"b": len(result.rounds)}
        until(lambda: not engine.metrics().running)
        assert not second.answers, "the caches of a late member are freed"


def test_without_a_deadline_all_members_are_waited_for() -> None:
    first, second = two()
    slow = SlowLane(second, lambda request: 0.1 if of_round(request) == 1 else 0)
    with fake(first, slow, round_seconds=None) as engine:
        assert not any(absent(engine.generate("help me", PARAMS)))


def test_members_that_all_exceed_the_deadline_get_the_grace_period() -> None:
    first, second = two()

    def delay(request: StageRequest) -> float:
        return 0.1 + 0.05 * (request.member == "b") if isinstance(request.op, Draft) else 0

    with fake(SlowLane(first, delay), SlowLane(second, delay), round_seconds=0.02, round_grace=2.0) as engine:
        assert not any(absent(engine.generate("help me", PARAMS)))
    first, second = two()
    with fake(SlowLane(first, delay), SlowLane(second, delay), round_seconds=0.02, round_grace=0) as engine:
        result = engine.generate("help me", PARAMS)
        assert "b" in absent(result)[0]
        assert all(record.present for record in result.rounds), "a round has a member"


def test_an_answer_without_any_response_ends_at_its_timeout() -> None:
    first, second = two()
    with (
        fake(*(SlowLane(lane, lambda request: NEVER) for lane in (first, second))) as engine,
        pytest.raises(RequestTimeoutError),
    ):
        engine.generate("help me", PARAMS, timeout=0.3)


def test_members_of_one_lane_are_never_late_to_each_other() -> None:
    lane = FakeLane({"a": scripted(TALE), "b": scripted(OTHER)})
    slow = SlowLane(lane, lambda request: 0.2 if request.member == "b" and of_round(request) == 1 else 0)
    with fake(slow) as engine:
        assert not any(absent(engine.generate("help me", PARAMS)))
    lane = FakeLane({"a": scripted(TALE), "b": scripted(OTHER)})
    slow = SlowLane(lane, lambda request: 0.2 if request.member == "b" and of_round(request) == 1 else 0)
    with fake(slow, FakeLane({"c": scripted(OTHER)})) as engine:
        assert not any(absent(engine.generate("help me", PARAMS))), "nor to others, where one of them has answered"
    lane = FakeLane({"a": scripted(TALE), "b": scripted(OTHER)})
    slow = SlowLane(lane, lambda request: 0.2 if of_round(request) == 1 else 0)
    with fake(slow, FakeLane({"c": scripted(LONG)})) as engine:
        assert absent(engine.generate("help me", PARAMS))[0] == ["a", "b"], "but together they can be"


def test_a_leader_that_is_late_does_not_keep_the_others_from_drafting() -> None:
    first = FakeLane({"a": scripted(TALE)}, may_guess=True)
    second = FakeLane({"b": scripted(OTHER)}, may_guess=True)
    for lead, lane in (("a", first), ("b", second)):
        lanes = [
            SlowLane(each, lambda r: NEVER if of_round(r) else 0) if each is lane else each for each in (first, second)
        ]
        with fake(*lanes) as engine:
            engine.load()
            engine._scheduler.lane_stats = replace(
                engine._scheduler.lane_stats, step_seconds=lambda: {"a": 1.0, "b": 1.0}
            )
            result = engine.generate("help me", PARAMS)
            assert {name for names in absent(result) for name in names} == {lead}


# ── coming back ──────────────────────────────────────────────────────────────────────────────────


def test_a_member_that_is_late_every_third_round_returns_and_commits_missed_text() -> None:
    first, second = FakeLane({"a": scripted(LONG)}), FakeLane({"b": scripted(LONG)})
    drafts = itertools.count(1)
    slow = SlowLane(second, lambda request: 0.15 * (of_round(request) > 0 and next(drafts) % 3 == 0))
    steady = SlowLane(first, lambda request: 0.02 if isinstance(request.op, Draft) else 0)
    with fake(steady, slow, late_rounds=1000) as engine:
        result = engine.generate("help me", SamplingParams(max_tokens=90))
    assert result.text == " " + " ".join(LONG.split()[:90])
    missed = [bool(names) for names in absent(result)]
    assert missed[:3] == [False, False, True]
    assert missed.count(False) > 5, "the member returns"
    assert missed.count(True) > 5, "the member is late again"
    stages = {absence.stage for record in result.rounds for absence in record.absent}
    assert stages == {"draft", None}, "a busy member also misses the next round"
    text = "".join(text_of(op) for op in second.ops("b", Commit, Draft))
    assert result.text.startswith(text)
    assert len(text.split()) > 60


def test_a_late_prefill_delays_no_round() -> None:
    first, second = FakeLane({"a": scripted(LONG)}), FakeLane({"b": scripted(LONG)})
    slow = SlowLane(second, lambda request: 0.3 if isinstance(request.op, Open) else 0)
    steady = SlowLane(first, lambda request: 0.03 if isinstance(request.op, Draft) else 0)
    with fake(steady, slow, late_rounds=1000) as engine:
        events = list(engine.stream("help me", SamplingParams(max_tokens=90)))
    assert isinstance(events[0], StartEvent)
    missed = [bool(names) for names in absent(ended(events))]
    assert missed[0]
    assert not missed[-1], "it takes part once it has read the prompt"


def test_the_answer_waits_for_a_late_member_if_all_others_fail() -> None:
    first, second = two()
    first.disturb = lambda request: Fault("RuntimeError", "injected") if of_round(request) == 2 else None
    slow = SlowLane(second, lambda request: 0.4 if of_round(request) == 1 else 0)
    with fake(first, slow) as engine:
        result = engine.generate("help me", PARAMS)
    assert [exit.member for record in result.rounds for exit in record.exits] == ["a"]
    assert [record.winner for record in result.rounds] == ["a", *["b"] * (len(result.rounds) - 1)]
    [draft, *_] = second.ops("b", Commit)
    assert draft.text == result.rounds[0].text, "it continues after the text of the others"
    assert second.ops("b", DraftAlone)


def test_all_members_on_time_fail_to_verify_while_one_is_late() -> None:
    lanes = [FakeLane({name: scripted(text)}) for name, text in (("a", TALE), ("b", OTHER), ("c", LONG))]
    for lane in lanes[:2]:
        lane.disturb = lambda request: Fault("RuntimeError", "injected") if isinstance(request.op, Verify) else None
    slow = SlowLane(lanes[2], lambda request: 0.3 if of_round(request) == 1 else 0)
    with fake(lanes[0], lanes[1], slow) as engine:
        result = engine.generate("help me", PARAMS)
    assert result.text == " " + " ".join(LONG.split()[:50])


# ── leaving ──────────────────────────────────────────────────────────────────────────────────────


def test_a_member_that_stays_late_leaves_like_a_failed_one() -> None:
    first, second = FakeLane({"a": scripted(LONG)}), FakeLane({"b": scripted(LONG)})
    slow = SlowLane(second, lambda request: NEVER if of_round(request) == 2 else 0)
    steady = SlowLane(first, lambda request: 0.03 if isinstance(request.op, Draft) else 0)
    with fake(steady, slow, late_rounds=4) as engine:
        events = list(engine.stream("help me", SamplingParams(max_tokens=90)))
        result = ended(events)
        [exit_event] = [event.exit for event in events if isinstance(event, ExitEvent)]
        [warning] = [event for event in events if isinstance(event, WarningEvent)]
        until(lambda: not engine.metrics().running)
        assert engine.metrics().faults == {"b": 1}
    assert (exit_event.member, exit_event.reason) == ("b", "late")
    assert (warning.member, warning.stage, warning.kind) == ("b", "draft", "TimeoutError")
    assert "was late for" in warning.message
    rounds = sum(bool(names) for names in absent(result))
    assert rounds >= 4
    assert result.rounds[-1].active == ("a",)
    assert result.text == " " + " ".join(LONG.split()[:90])
    assert [type(op) for op in second.ops("b", Close)] == [Close]


def test_many_short_rounds_alone_do_not_make_a_member_leave() -> None:
    first, second = FakeLane({"a": scripted(LONG)}), FakeLane({"b": scripted(LONG)})
    slow = SlowLane(second, lambda request: NEVER if of_round(request) == 2 else 0)
    with fake(first, slow, late_rounds=4, round_seconds=0.5) as engine:
        result = engine.generate("help me", SamplingParams(max_tokens=90))
    assert sum(bool(names) for names in absent(result)) > 20
    assert not any(record.exits for record in result.rounds), "it had no time to return"


@pytest.mark.parametrize("sleeper", ["a", "c"])
def test_an_exited_member_does_not_count_as_a_response_in_a_round_with_a_deadline(sleeper: str) -> None:
    """Its cache is freed concurrently with the next stages; an earlier version waited for it and ended the engine."""
    first, second = two()
    third = FakeLane({"c": scripted(TALE)})

    def leaves(totals: Sequence[float], round_index: int) -> ExitDecision:
        return ExitDecision((), (1,) if len(totals) == 3 else ())

    def delay(request: StageRequest) -> float:
        return 0.3 if request.member == sleeper and of_round(request) == 2 else 0

    lanes = [SlowLane(lane, delay) for lane in (first, second, third)]
    with fake(*lanes) as engine:
        engine.config = replace(engine.config, exit=leaves)
        result = engine.generate("help me", PARAMS)
        assert result.text == WHOLE_TALE
        assert [leaving.member for record in result.rounds for leaving in record.exits] == ["b"]
        assert [sleeper] in absent(result)
        until(lambda: not engine.metrics().running)


# ── many ─────────────────────────────────────────────────────────────────────────────────────────


def test_two_hundred_answers_at_once_with_one_slow_member() -> None:
    first, second = two()
    random = Random(5)
    slow = SlowLane(second, lambda request: NEVER if isinstance(request.op, Draft) and random.random() < 0.3 else 0)
    with fake(first, slow, max_concurrent=200) as engine:
        began = time.monotonic()
        results = engine.generate_batch([f"question {n}" for n in range(200)], PARAMS)
        assert time.monotonic() - began < 20
        assert {result.text for result in results if isinstance(result, EnsembleResult)} == {WHOLE_TALE}
        assert 0 < sum(any(absent(result)) for result in results if isinstance(result, EnsembleResult)) <= 200
        until(lambda: not engine.metrics().running)
        assert not first.answers
        assert not second.answers


# ── exactness ────────────────────────────────────────────────────────────────────────────────────


class EngineInTwoLanes(EnsembleEngine):
    """Loaded members, each in a separate lane; the stages of the second one are late by `delay`."""

    def __init__(self, loaded: EnsembleEngine, delay: Delay, **settings: object) -> None:
        super().__init__(replace(loaded.config, **settings))
        self._loaded, self._delay = local_members(loaded), delay

    def _assemble(self, on_progress: OnLoadProgress | None) -> Assembly:
        lanes = [LaneThread(LocalLane([member], on_forward=self._metrics.forward)) for member in self._loaded]
        for member in self._loaded:
            member.runner.free_spare()
        return Assembly(tuple(m.member for m in self._loaded), None, (lanes[0], SlowLane(lanes[1], self._delay)))


@pytest.mark.parametrize("stage", [Draft, Verify])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"first_segment_tokens": 20},
        {"feedback_limit": 1.5, "exit": "entropy", "min_active": 2},
        {"speculation": "off"},
    ],
    ids=["plain", "early looks", "limit and exit", "no guesses"],
)
def test_rounds_with_late_members_equal_naive_rounds_without_them(
    tiny_engine: EnsembleEngine, stage: type, settings: dict[str, object]
) -> None:
    random, recorded = Random(3), 0
    deadline = {"round_seconds": 0.15, "round_grace": 0.1, "late_rounds": 1000}

    def delay(request: StageRequest) -> float:
        return 0.5 if isinstance(request.op, stage) and random.random() < 0.25 else 0

    with EngineInTwoLanes(tiny_engine, delay, **deadline, **settings) as engine:
        members = local_members(tiny_engine)
        for question in QUESTIONS[:2]:
            params = SamplingParams(max_tokens=60)
            result = engine.generate(question, params)
            recorded += sum(absence.stage is not None for record in result.rounds for absence in record.absent)
            assert_equals_naive_with_absences(engine.config, members, question, params, result)
    assert recorded > 1, "members were late"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=40, grammar=Grammar.json_schema({"properties": {"n": {"type": "integer"}}})),
        SamplingParams(max_tokens=30, logprobs=True, top_logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=30, temperature=1.0, seed=7, ignore_eos=True),
    ],
    ids=["grammar", "logprobs", "sampled"],
)
@pytest.mark.parametrize("late", ["chat", "base"])
def test_other_answers_end_well_with_late_members(
    tiny_engine: EnsembleEngine, params: SamplingParams, late: str
) -> None:
    random = Random(4)

    def delay(request: StageRequest) -> float:
        return 0.4 if isinstance(request.op, Draft) and random.random() < 0.4 else 0

    config = tiny_engine.config if late == "base" else replace(tiny_engine.config, reference="base")
    with EngineInTwoLanes(tiny_engine, delay, round_seconds=0.15, reference=config.reference) as engine:
        for question in QUESTIONS[:2]:
            result = engine.generate(question, params)
            assert result.text == "".join(record.text for record in result.rounds)[: len(result.text)]
            if params.grammar is not None:
                assert params.grammar.accepts(result.text) if hasattr(params.grammar, "accepts") else result.text
            if params.logprobs:
                assert result.logprobs is not None
                assert b"".join(bytes(token.bytes) for token in result.logprobs).decode() == result.text


# ── settings ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "settings",
    [
        {"round_seconds": 0},
        {"round_seconds": -1.0},
        {"round_seconds": float("nan")},
        {"round_seconds": "1"},
        {"round_grace": -0.1},
        {"round_grace": None},
        {"late_rounds": 0},
    ],
)
def test_a_wrong_deadline_is_refused(settings: dict[str, object]) -> None:
    [name] = settings
    with pytest.raises(ConfigError, match=f"EnsembleConfig.{name}"):
        EnsembleConfig(["a", "b"], **settings)


def test_a_stream_shows_a_segment_before_a_late_member_has_begun() -> None:
    first, second = two()
    with fake(first, SlowLane(second, lambda request: NEVER if isinstance(request.op, Open) else 0)) as engine:
        texts = [event.text for event in engine.stream("help me", PARAMS) if isinstance(event, SegmentEvent)]
    assert "".join(texts) == WHOLE_TALE
