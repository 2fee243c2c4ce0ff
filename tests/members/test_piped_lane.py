"""A lane in another process gives the same answers as in this one, byte for byte; its process can die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess

import pytest
import torch

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, SamplingParams
from specfuse_shared.events import FinishEvent, SegmentEvent, WarningEvent
from specfuse_shared.loading.progress import OnLoadProgress
from specfuse_shared.members.assembly import Assembly, assemble, distant_member
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.members.pipe import PipedLane, serve_members
from tests.support.whole_answers import ASKED, everything

CORES = max(1, torch.get_num_threads() // 2)

pytestmark = pytest.mark.slow


class Elsewhere(EnsembleEngine):
    """An engine whose members named in `distant` run in other processes."""

    def __init__(self, config: EnsembleConfig, distant: Sequence[str]) -> None:
        super().__init__(config)
        self.distant = distant
        self.processes: list[BaseProcess] = []

    def _assemble(self, on_progress: OnLoadProgress | None) -> Assembly:
        here = [LocalMember(m) for m in self.config.member_configs if m.name not in self.distant]
        local = assemble(here, self._metrics.forward) if here else Assembly(())
        pipes = {name: self._start(self._config_of(name)) for name in self.distant}
        results = {member.name: member for member in local.members}
        results |= {n: distant_member(self._config_of(n), pipe.members[0]) for n, pipe in pipes.items()}
        members = tuple(results[name] for name in self.config.names)
        return Assembly(members, local.own, (*local.others, *pipes.values()))

    def _start(self, member: MemberConfig) -> PipedLane:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve_members, args=(theirs, [member], "dynamic", CORES), name=member.label, daemon=True
        )
        process.start()
        theirs.close()
        self.processes.append(process)
        return PipedLane(member.label, ours, self._metrics.forward)

    def _config_of(self, name: str) -> MemberConfig:
        return next(member for member in self.config.member_configs if member.label == name)


@contextmanager
def elsewhere(config: EnsembleConfig, distant: Sequence[str]) -> Iterator[Elsewhere]:
    with Elsewhere(config, distant) as engine:
        yield engine
    for process in engine.processes:
        process.join(20)
        assert process.exitcode is not None, "a closed engine has ended its processes"


@pytest.fixture(scope="module")
def apart(tiny_engine: EnsembleEngine) -> Iterator[Elsewhere]:
    """An engine with every member in a separate process."""
    with elsewhere(tiny_engine.config, ("chat", "base")) as engine:
        yield engine.load()


def test_members_in_other_processes_give_the_same_answers(tiny_engine: EnsembleEngine, apart: Elsewhere) -> None:
    plain = replace(tiny_engine.config, speculation="off")  # the leader depends on the members of a lane
    with EnsembleEngine(plain) as engine, elsewhere(plain, ("chat", "base")) as distant:
        expected = [everything(engine.generate(*each)) for each in ASKED]
        assert [everything(distant.generate(*each)) for each in ASKED] == expected
    together = apart.generate_batch([question for question, _ in ASKED], [params for _, params in ASKED])
    assert [everything(result)["text"] for result in together] == [each["text"] for each in expected]
    assert [report.name for report in apart.describe()] == ["chat", "base"]
    assert set(apart.metrics().forwards) == {"chat", "base"}


def test_a_distant_members_cached_prefix_is_not_read_again(apart: Elsewhere) -> None:
    first = apart.generate("You know the sea. " * 6, SamplingParams(max_tokens=10))
    before = apart.metrics().reused_prompt_tokens
    assert apart.generate("You know the sea. " * 6, SamplingParams(max_tokens=10)).text == first.text
    assert apart.metrics().reused_prompt_tokens > before
    assert apart.metrics().prefix_bytes > 0


def test_a_cancelled_answer_frees_the_caches_of_other_processes(apart: Elsewhere) -> None:
    stream = apart.stream("Never stop", SamplingParams(max_tokens=400))
    next(event for event in stream if isinstance(event, SegmentEvent))
    stream.close()  # type: ignore[attr-defined]
    limit = time.monotonic() + 30
    while apart.metrics().running:
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert apart.metrics().cache_bytes == 0


def test_a_member_whose_process_dies_leaves_and_local_ones_continue(tiny_engine: EnsembleEngine) -> None:
    with elsewhere(tiny_engine.config, ("base",)) as engine:
        events = engine.stream("How do the tides follow the moon?", SamplingParams(max_tokens=200))
        segment = next(event for event in events if isinstance(event, SegmentEvent))
        engine.processes[0].kill()
        rest = list(events)
        [warning] = [event for event in rest if isinstance(event, WarningEvent)]
        assert warning.member == "base"
        assert warning.message.endswith("left the answer: the process of base is gone")
        assert isinstance(rest[-1], FinishEvent)
        assert rest[-1].result.text.startswith(segment.text)
        assert rest[-1].result.rounds[-1].active == ("chat",)
        again = engine.generate("Still there?", SamplingParams(max_tokens=10))
        assert [fault.member for fault in again.warnings] == ["base"]


def test_a_stopped_process_makes_its_member_late_and_a_killed_one_makes_it_fail(
    tiny_engine: EnsembleEngine,
) -> None:
    deadline = replace(tiny_engine.config, round_seconds=0.2, round_grace=0.1, late_rounds=2000)
    with elsewhere(deadline, ("base",)) as engine:
        for how in (signal.SIGCONT, signal.SIGKILL):
            events = engine.stream("How do the tides follow the moon?", SamplingParams(max_tokens=300, min_tokens=300))
            segments = [next(event for event in events if isinstance(event, SegmentEvent))]
            os.kill(engine.processes[0].pid or 0, signal.SIGSTOP)
            late = next(event for event in events if isinstance(event, SegmentEvent) and _late(event) == ["base"])
            os.kill(engine.processes[0].pid or 0, how)
            rest = [late, *events]
            last = rest[-1]
            assert isinstance(last, FinishEvent)
            assert last.result.text.startswith(segments[0].text)
            if how is signal.SIGCONT:
                assert not last.result.warnings
            else:
                assert [(fault.member, fault.stage) for fault in last.result.warnings] in ([("base", "draft")], [])
        again = engine.generate("Still there?", SamplingParams(max_tokens=10))
        assert [fault.member for fault in again.warnings] == ["base"]


def _late(event: SegmentEvent) -> list[str]:
    return [absence.member for absence in event.record.absent] if event.record is not None else []
