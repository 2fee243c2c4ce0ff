"""Which members share a lane: those of one accelerator; those on the processor share out its cores.

Small steps gain little from more cores, because waking a thread costs as much as what it takes over; so members on a
processor run beside each other, each lane with its own cores.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

import torch

from specfuse_shared.members.local.base import InProcessMember


def lanes_of(members: Sequence[InProcessMember]) -> list[tuple[list[InProcessMember], int | None]]:
    """Members that take turns, and the cores of each such lane where the processor has several; None: no limit.

    A core is never shared, so with more members than cores some take turns, the large ones by themselves.
    """
    lanes: dict[tuple[str, ...], list[InProcessMember]] = defaultdict(list)
    for member in members:
        lanes[devices_of(member)].append(member)
    on_cpu = lanes.pop(("cpu",), [])
    on_devices: list[tuple[list[InProcessMember], int | None]] = [(lane, None) for lane in lanes.values()]
    core_count = cores()
    count = min(len(on_cpu), core_count)
    shared: list[list[InProcessMember]] = [[] for _ in range(count)]
    for member in sorted(on_cpu, key=_size, reverse=True):
        min(shared, key=lambda lane: sum(map(_size, lane))).append(member)
    return on_devices + [(lane, core_count // count if count > 1 else None) for lane in shared]


def cores() -> int:
    """How many cores torch uses in this thread."""
    return torch.get_num_threads()


def use_cores(count: int) -> None:
    """Let torch use so many cores in this thread, which keeps to them from now on; others stay as they are."""
    with _setting_cores:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        # that is also what threads made later would begin with, unless another thread says otherwise
        other = threading.Thread(target=torch.set_num_threads, args=(before,))
        other.start()
        other.join()


_setting_cores = threading.Lock()


def devices_of(member: InProcessMember) -> tuple[str, ...]:
    """The devices on which a member computes."""
    return tuple(member.devices)


def _size(member: InProcessMember) -> int:
    return member.report.memory_bytes
