"""What answers may know of an engine's lanes and load."""

from __future__ import annotations

from collections.abc import Callable

from specfuse_shared.fusion.participants import Traffic
from specfuse_shared.members.assembly import Assembly
from specfuse_shared.serving.telemetry.metrics import Metrics


def traffic_of(assembly: Assembly, metrics: Metrics, answers: Callable[[], int]) -> Traffic:
    """What answers may know of the engine's lanes when they choose who leads."""
    lane_of = {info.name: n for n, lane in enumerate(assembly.lanes) for info in lane.members}
    devices = [[d for info in lane.members for d in info.devices] for lane in assembly.lanes]
    # a device elsewhere is named with its lane: "name/cuda:0"
    slow = ("cpu", "disk")
    fast = [n for n, own in enumerate(devices) if own and not any(d.rpartition("/")[2] in slow for d in own)]
    elsewhere = frozenset(info.name for lane in assembly.lanes for info in lane.members if not info.devices)
    return Traffic(lane_of, answers, metrics.step_seconds, frozenset(fast), elsewhere)
