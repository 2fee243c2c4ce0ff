"""Engines over lanes of plain Python."""

from __future__ import annotations

from specfuse_shared import EnsembleConfig, EnsembleEngine
from specfuse_shared.loading.progress import OnLoadProgress
from specfuse_shared.members.assembly import Assembly
from tests.support.fake_lane import FakeLane, scripted
from tests.support.slow_lane import SlowLane

TALE, OTHER = "the sea follows the moon and the moon follows the sun .", "the sea is wide and blue ."


class FakeEngine(EnsembleEngine):
    """An engine over fake lanes: one for each group of members."""

    def __init__(self, *lanes: FakeLane | SlowLane, **settings: object) -> None:
        names = [info.name for lane in lanes for info in lane.members]
        super().__init__(EnsembleConfig(names, segment_tokens=3, first_segment_tokens=None, exit="never", **settings))
        self.lanes = lanes

    def _assemble(self, on_progress: OnLoadProgress | None) -> Assembly:
        return Assembly(tuple(member for lane in self.lanes for member in lane.parties()), None, self.lanes)


def two(**settings: object) -> tuple[FakeLane, FakeLane]:
    """Two members in separate lanes, which both prefer the text TALE."""
    likes = {(name, f" {' '.join(TALE.split()[n : n + 3])}"): -0.1 for name in "ab" for n in range(0, 12, 3)}
    return (
        FakeLane({"a": scripted(TALE)}, likes, **settings),
        FakeLane({"b": scripted(OTHER)}, likes, **settings),
    )
