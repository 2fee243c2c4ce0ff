"""Compare an engine's answer with the naive rounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from specfuse_shared import EnsembleConfig, EnsembleEngine, Message, SamplingParams
from specfuse_shared.events import EnsembleResult, Event
from specfuse_shared.fusion.participants import Participant
from specfuse_shared.fusion.session import AnswerSession
from specfuse_shared.loading.progress import OnLoadProgress
from specfuse_shared.members.assembly import Assembly, assemble
from specfuse_shared.members.local.lane import LaneThread, LocalLane
from specfuse_shared.members.local.member import InProcessMember, LocalMember
from specfuse_shared.members.local.session import LocalSession
from specfuse_shared.members.stages import Close, Op, StageRequest, StageResult
from specfuse_shared.members.work import Work
from specfuse_shared.types import FinishReason, RoundRecord
from tests.support.naive import NaiveMember, NaiveRound, naive_rounds

SCORES: tuple[dict[str, str], ...] = ({}, {"score": "mean_logprob"}, {"per": "byte"})
"""Settings of the scores that are compared with the naive rounds."""
FAULT_ROW = "fault"
"""Name of a test's property: the injected fault, its time and its target, and the effect."""
"""The injected faults and their effects, for the summary of the run."""


def local_members(engine: EnsembleEngine) -> list[LocalMember]:
    """The loaded models of an engine, in the members' order."""
    lanes = [lane._lane if isinstance(lane, LaneThread) else lane for lane in engine.load()._assembly.lanes]
    results: dict[str, Any] = {
        name: member for lane in lanes if isinstance(lane, LocalLane) for name, member in lane.local.items()
    }
    return [results[name] for name in engine.config.names]


class EngineOver(EnsembleEngine):
    """An engine over members that another engine has loaded, which saves half a minute for real ones. Their cached
    prefixes are dropped first."""

    def __init__(self, loaded: EnsembleEngine, config: EnsembleConfig) -> None:
        super().__init__(config)
        self._loaded = local_members(loaded)

    def _assemble(self, on_progress: OnLoadProgress | None) -> Assembly:
        for member in self._loaded:
            member.runner.free_spare()
        return assemble(self._loaded, self._metrics.forward)


def with_settings(config: EnsembleConfig, **settings: Any) -> EnsembleConfig:
    return replace(config, **settings)


@dataclass
class Side:
    """A member's lane's state of an answer, and its session's state."""

    session: LocalSession
    participant: Participant

    @property
    def drafted(self) -> int:
        return self.participant.drafted


class OpenAnswer:
    """One answer of members in this thread, without a scheduler: its session, and the lane that it asks."""

    def __init__(
        self,
        config: EnsembleConfig,
        members: Sequence[InProcessMember],
        messages: list[Message],
        params: SamplingParams,
    ) -> None:
        self.lane = LocalLane(members)
        self._found: list[StageResult] = []
        self.lane.reply_to(self._found.extend)
        self._session = AnswerSession(config, [member.member for member in members], messages, params)
        self._work = Work(self._session.run())

    def release(self) -> None:
        """Free the caches; the members stay."""
        self.lane.submit([StageRequest(0, name, Close()) for name in self.lane.local])
        self.lane.step()

    @property
    def text(self) -> str:
        return self._session.text

    @property
    def rounds(self) -> list[RoundRecord]:
        return list(self._session.rounds)

    @property
    def finished(self) -> bool:
        return self._session.finished

    @property
    def participants(self) -> dict[str, Side]:
        sides = self._session.participants.by_name
        return {name: Side(entry[0], sides[name]) for name, entry in self.lane._sessions.items()}

    def events(self) -> Iterator[Event]:
        """Its events in order; stages run when the next event is requested."""
        self._work.resume()
        while self._work.pending is not None:
            yield from self._taken()
            self._work.resume(self._results(self._work.pending.ops))
        if self._work.error is not None:
            raise self._work.error
        yield from self._taken()

    def _results(self, ops: Mapping[str, Op]) -> dict[str, StageResult]:
        self._found.clear()
        self.lane.submit([StageRequest(0, name, op) for name, op in ops.items()])
        while len(self._found) < len(ops):
            self.lane.step()
        return {result.member: result for result in self._found}

    def _taken(self) -> Iterator[Event]:
        while self._session.events:
            yield self._session.events.popleft()


def open_session(
    config: EnsembleConfig, members: Sequence[InProcessMember], messages: list[Message], params: SamplingParams
) -> OpenAnswer:
    return OpenAnswer(config, members, messages, params)


def run_rounds(answer: OpenAnswer, count: int) -> list[RoundRecord]:
    """At most `count` rounds of an answer, which stays open."""
    events = answer.events()
    while not answer.finished and len(answer.rounds) < count:
        next(events)
    return answer.rounds


@contextmanager
def eager(members: list[LocalMember]) -> Iterator[None]:
    """Run the reference with the library's eager attention instead of the engine's."""
    before = [m.runner.model.config._attn_implementation for m in members]
    for member in members:
        member.runner.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        for member, name in zip(members, before, strict=True):
            member.runner.model.set_attn_implementation(name)


def assert_equals_naive(
    config: EnsembleConfig,
    members: Sequence[InProcessMember],
    messages: list[Message],
    params: SamplingParams,
    rounds: int,
    tolerance: float = 1e-3,
    kind: type[NaiveMember] = NaiveMember,
) -> list[RoundRecord]:
    """Same candidates, scores, winners, segments and active members, round by round; returns the engine's."""
    session = open_session(config, members, messages, params)
    records = run_rounds(session, rounds)
    session.release()
    fused = [r for r in records if len(r.active) > 1]
    with eager([member for member in members if isinstance(member, LocalMember)]):
        naive: list[NaiveRound] = []
        for result in naive_rounds(config, members, messages, params, kind):
            naive.append(result)
            if len(naive) == len(fused):
                break
    assert len(naive) == len(fused) > 0
    for record, reference in zip(fused, naive, strict=True):
        _assert_round(record, reference, tolerance)
    return records


def _assert_round(record: RoundRecord, reference: NaiveRound, tolerance: float) -> None:
    drafted = {name: (c.text, c.ends) for c in record.candidates for name in c.drafters}
    spoken = {n: d for n, d in reference.candidates.items() if d[0] or d[1]}
    assert drafted == spoken, f"round {record.index}"
    assert list(record.present) == reference.active
    assert (record.winner, record.text) == (reference.winner, reference.segment), f"round {record.index}"
    assert record.verified == bool(reference.scores)
    for candidate in record.candidates:
        for name, score in candidate.scores.items():
            expected = reference.scores[name][f"{candidate.text}|{candidate.ends}"]
            assert abs(score - expected) <= tolerance, f"round {record.index}: {name} on {candidate.text!r}"


def assert_equals_naive_with_absences(
    config: EnsembleConfig,
    members: Sequence[InProcessMember],
    question: str,
    params: SamplingParams,
    result: EnsembleResult,
) -> None:
    """The rounds of a result equal the naive method's without the members that were late, as recorded."""
    records = result.rounds[:-1] if result.finish_reason is FinishReason.LENGTH else result.rounds  # cut at max_tokens
    absences = [record.absent for record in records]
    with eager([member for member in members if isinstance(member, LocalMember)]):
        naive = naive_rounds(config, members, [Message("user", question)], params, absences=absences)
        for record, reference in zip(records, naive, strict=False):
            _assert_round(record, reference, 1e-3)


async def stalls_of_the_loop(stalls: list[float]) -> None:
    """Tick every 10 ms until cancelled; the delay of each tick in seconds."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.01)
        stalls.append(time.perf_counter() - before - 0.01)


def answer_of(result: EnsembleResult) -> tuple[str, list[str]]:
    return result.text, [r.winner for r in result.rounds]
