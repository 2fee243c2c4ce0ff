"""Engines over members of plain Python, which answer each question from a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig
from specfuse_shared.candidate import CandidateLogprobs
from specfuse_shared.loading.progress import OnLoadProgress
from specfuse_shared.members.assembly import Assembly
from specfuse_shared.members.stages import Fault, MemberInfo, Open, StageRequest
from tests.support.fake_lane import FakeLane, scripted

Script = Mapping[str, Mapping[str, str]]
"""Member → question → its answer; the answer of "" is for all other questions."""
Samples = Mapping[str, Sequence[str]]
"""Member → its answers to every question at a temperature above 0, for seed 1, seed 2, and so on."""


class ScriptedLane(FakeLane):
    """A lane with one member that looks up its answer by the prompt, identified by the hashes of its words."""

    def __init__(self, member: MemberConfig, fakes: Fakes) -> None:
        super().__init__({member.label: scripted(".")}, fakes.sure, disturb=fakes.disturb, sizes=fakes.sizes)
        self.samples = fakes.samples.get(member.label, ())
        script = fakes.script[member.label].items()
        self.script = {tuple(hash(word) for word in question.split()): text for question, text in script}
        self.of: dict[tuple[int, str], str] = {}
        self.own, self.weight = fakes.likes, member.weight

    def _info(self, name: str) -> MemberInfo:
        return replace(super()._info(name), weight=self.weight)

    def _value(self, key, request):  # type: ignore[no-untyped-def]
        if isinstance(request.op, Open):
            self.of[key] = self.script.get(tuple(request.op.prompt), self.script.get((), "nothing ."))
            if self.samples and not request.op.params.greedy:
                self.of[key] = self.samples[(request.op.params.seed or 0) % len(self.samples) - 1]
        self.says = {request.member: scripted(self.of.get(key, "."))}
        return super()._value(key, request)

    def _verdict(self, member, text, ends):  # type: ignore[no-untyped-def]
        """With `own`, a member gives only its own answer a high probability."""
        if not self.own:
            return super()._verdict(member, text, ends)
        words = text.split() + ["."] * ends
        mine = self.says[member]("", len(words)).split()
        logprobs = (-0.1 if words == mine else -3.0,) * len(words)
        return CandidateLogprobs(text, ends, logprobs, tuple(map(len, words)))


@dataclass
class Fakes:
    """Makes engines, and counts what their members were asked. `disturb` injects faults; `likes`: members like their
    own answers best. `sizes` of members in parameters. `sure`: (member, text) → log p of each word, else −1."""

    script: Script
    disturb: Callable[[StageRequest], Fault | None] = lambda request: None
    likes: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)
    sure: Mapping[tuple[str, str], float] = field(default_factory=dict)
    engines: list[EnsembleConfig] = field(default_factory=list)
    lanes: list[ScriptedLane] = field(default_factory=list)

    def __call__(self, config: EnsembleConfig) -> EnsembleEngine:
        self.engines.append(config)
        return _FakeEngine(config, self)

    @property
    def opened(self) -> int:
        """Number of prompts of all members."""
        return sum(isinstance(request.op, Open) for lane in self.lanes for request in lane.requests)

    @property
    def sampled(self) -> int:
        """Number of prompts with a sampled answer."""
        ops = [request.op for lane in self.lanes for request in lane.requests]
        return sum(isinstance(op, Open) and not op.params.greedy for op in ops)


class _FakeEngine(EnsembleEngine):
    def __init__(self, config: EnsembleConfig, fakes: Fakes) -> None:
        super().__init__(config)
        self.fakes = fakes

    def _assemble(self, on_progress: OnLoadProgress | None) -> Assembly:
        lanes = [ScriptedLane(member, self.fakes) for member in self.config.member_configs]
        self.fakes.lanes += lanes
        return Assembly(tuple(member for lane in lanes for member in lane.parties()), None, tuple(lanes))


def pair_of(first: str, second: str) -> Script:
    """Two members with equal answers to all questions."""
    return {"first": {"": first}, "second": {"": second}}
