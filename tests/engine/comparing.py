"""Hold an engine's answer against the naive rounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from specfuse_shared import EnsembleConfig, EnsembleEngine, Message, SamplingParams
from specfuse_shared.fusion.session import AnswerSession
from specfuse_shared.members.local import LocalMember
from specfuse_shared.results import EnsembleResult
from specfuse_shared.serving.scheduler import run_alone
from specfuse_shared.types import RoundRecord
from tests.engine.naive import NaiveRound, naive_rounds

SCORES = ({}, {"score": "stretch"}, {"score": "stretch", "per": "byte", "stretch": "word"})
"""Settings of the scores that are held against the naive rounds."""
FAULT_ROW = "fault"
"""Name of a test's property: what was injected, when, into what, and what happened."""
"""What the fault tests injected and saw, for the summary of the run."""


def local_members(engine: EnsembleEngine) -> list[LocalMember]:
    members = engine.load()._members
    assert all(isinstance(m, LocalMember) for m in members)
    return [m for m in members if isinstance(m, LocalMember)]


def with_settings(config: EnsembleConfig, **settings: Any) -> EnsembleConfig:
    return replace(config, **settings)


def open_session(
    config: EnsembleConfig, members: list[LocalMember], messages: list[Message], params: SamplingParams
) -> AnswerSession:
    return AnswerSession(config, members, messages, params)


def run_rounds(session: AnswerSession, count: int) -> list[RoundRecord]:
    """At most `count` rounds of a session, which stays open."""
    events = run_alone(session)
    while not session.finished and len(session.rounds) < count:
        next(events)
    return list(session.rounds)


@contextmanager
def eager(members: list[LocalMember]) -> Iterator[None]:
    """The reference runs on the library's plainest attention, not on the engine's."""
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
    members: list[LocalMember],
    messages: list[Message],
    params: SamplingParams,
    rounds: int,
    tolerance: float = 1e-3,
) -> list[RoundRecord]:
    """Same candidates, scores, winners, segments and active members, round by round; returns the engine's."""
    session = open_session(config, members, messages, params)
    records = run_rounds(session, rounds)
    session.release()
    fused = [r for r in records if len(r.active) > 1]
    with eager(members):
        naive: list[NaiveRound] = []
        for found in naive_rounds(config, members, messages, params):
            naive.append(found)
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
    assert list(record.active) == reference.active
    assert (record.winner, record.text) == (reference.winner, reference.segment), f"round {record.index}"
    assert record.verified == bool(reference.scores)
    for candidate in record.candidates:
        for name, score in candidate.scores.items():
            expected = reference.scores[name][f"{candidate.text}|{candidate.ends}"]
            assert abs(score - expected) <= tolerance, f"round {record.index}: {name} on {candidate.text!r}"


async def stalls_of_the_loop(stalls: list[float]) -> None:
    """Tick every 10 ms until cancelled; how much later than that each tick came, in seconds."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.01)
        stalls.append(time.perf_counter() - before - 0.01)


def answer_of(result: EnsembleResult) -> tuple[str, list[str]]:
    return result.text, [r.winner for r in result.rounds]
