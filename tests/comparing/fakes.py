"""Engines over members of plain Python, which answer each question with what a script tells them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from specfuse_shared import EnsembleConfig, EnsembleEngine
from specfuse_shared.loading.pretrained import OnProgress
from specfuse_shared.members.assembly import Assembly
from specfuse_shared.members.stages import Fault, Open, StageRequest
from tests.engine.fake_lane import FakeLane, scripted

Script = Mapping[str, Mapping[str, str]]
"""Member → question → what it says; "" is said to any other question."""


class ScriptedLane(FakeLane):
    """A lane whose one member looks its answer up by the prompt, which it knows by the hashes of its words."""

    def __init__(self, name: str, script: Mapping[str, str], disturb: Callable[[StageRequest], Fault | None]) -> None:
        super().__init__({name: scripted(".")}, disturb=disturb)
        self.script = {tuple(hash(word) for word in question.split()): said for question, said in script.items()}
        self.of: dict[tuple[int, str], str] = {}

    def _value(self, key, request):  # type: ignore[no-untyped-def]
        if isinstance(request.op, Open):
            self.of[key] = self.script.get(tuple(request.op.prompt), self.script.get((), "nothing ."))
        self.says = {request.member: scripted(self.of.get(key, "."))}
        return super()._value(key, request)


@dataclass
class Fakes:
    """Makes engines, and counts what their members were asked. `disturb` injects faults."""

    script: Script
    disturb: Callable[[StageRequest], Fault | None] = lambda request: None
    engines: list[EnsembleConfig] = field(default_factory=list)
    lanes: list[ScriptedLane] = field(default_factory=list)

    def __call__(self, config: EnsembleConfig) -> EnsembleEngine:
        self.engines.append(config)
        return _FakeEngine(config, self)

    @property
    def opened(self) -> int:
        """Prompts that were read, over all members."""
        return sum(isinstance(request.op, Open) for lane in self.lanes for request in lane.asked)


class _FakeEngine(EnsembleEngine):
    def __init__(self, config: EnsembleConfig, fakes: Fakes) -> None:
        super().__init__(config)
        self.fakes = fakes

    def _assemble(self, on_progress: OnProgress | None) -> Assembly:
        lanes = [ScriptedLane(name, self.fakes.script[name], self.fakes.disturb) for name in self.config.names]
        self.fakes.lanes += lanes
        return Assembly(tuple(member for lane in lanes for member in lane.parties()), None, tuple(lanes))


def pair_of(first: str, second: str) -> Script:
    """Two members that say the same to everything."""
    return {"first": {"": first}, "second": {"": second}}
