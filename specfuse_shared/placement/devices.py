"""The devices of this machine and their free memory, or those of a machine that is only planned."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from specfuse_shared.errors import ConfigError
from specfuse_shared.placement.plan import Device, pool_of

DEVICES_ENV = "SPECFUSE_DEVICES"
"""With the value "cpu", plans see no accelerator: for one that is there but fails, as on hosted runners of macOS."""
_UNITS = {"GB": 10**9, "GIB": 2**30}
_PLANNED = re.compile(r"(?:(\d+)\s*x\s*)?(?:([a-z]+):)?(\d+(?:\.\d+)?)\s*(GB|GiB)", re.IGNORECASE)


def find_devices() -> tuple[Device, ...]:
    """The processor, then the accelerators (CUDA, ROCm, XPU, MPS), unless `$SPECFUSE_DEVICES` leaves them out."""
    total, free = host_memory()
    title = f"{platform.machine()}, {torch.get_num_threads()} threads"
    found = [Device("cpu", "cpu", total, free, _cpu_has_bf16(), title)]
    if has_accelerator():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        found += [_accelerator(kind.type, index) for index in range(torch.accelerator.device_count())]
    return tuple(found)


def has_accelerator() -> bool:
    """Whether torch sees an accelerator that plans may use."""
    return not only_cpu() and bool(torch.accelerator.is_available())


def only_cpu() -> bool:
    """Whether `$SPECFUSE_DEVICES` leaves accelerators out. Raises `ConfigError`."""
    wanted = os.environ.get(DEVICES_ENV, "").strip().lower()
    if wanted not in ("", "cpu"):
        raise ConfigError(f'${DEVICES_ENV} is {wanted!r}: set it to "cpu" to use no accelerator, or unset it')
    return wanted == "cpu"


def planned_devices(text: str) -> tuple[Device, ...]:
    """Devices from a description: "80GB", "4x24GB", "2x24GB,48GB", "xpu:16GB,cpu:64GiB". Raises `ConfigError`.

    GB is 10⁹ bytes. A card that is sold with 24 GB has 24 GiB, of which its driver takes some: GB leaves room for that.
    """
    found: list[Device] = []
    for part in text.split(","):
        match = _PLANNED.fullmatch(part.strip())
        if match is None or match[1] == "0" or not float(match[3]):
            raise ConfigError(f'devices is {text!r}: write them as "80GB", "4x24GB", "2x24GB,48GB" or "24GB,cpu:64GB"')
        kind, size = (match[2] or "cuda").lower(), int(float(match[3]) * _UNITS[match[4].upper()])
        for _ in range(int(match[1] or 1)):
            index = sum(d.kind == kind for d in found)
            found.append(Device(kind if kind == "cpu" else f"{kind}:{index}", kind, size, size))
    return tuple(found)


def free_memory(name: str) -> int:
    """Bytes that are free on a device now; what torch holds but does not use counts as free.

    An Apple GPU has as much as is recommended for it, and not more than other programs leave of main memory.
    """
    device = torch.device(name)
    if device.type in ("cpu", "meta"):
        return host_memory()[1]
    module: Any = torch.get_device_module(device)
    if device.type == "mps":
        used = module.current_allocated_memory()
        unused = max(0, module.driver_allocated_memory() - used)
        return int(max(0, min(module.recommended_max_memory() - used, host_memory()[1] + unused)))
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + unused)


def shared_out(free: Mapping[str, int]) -> dict[str, int]:
    """Of devices that lie in one pool, each gets an equal part of what the roomiest has there, if it has as much."""
    most: dict[str, int] = {}
    for name, size in free.items():
        most[pool_of(name)] = max(size, most.get(pool_of(name), 0))
    lying = Counter(map(pool_of, free))
    return {name: min(size, most[pool_of(name)] // lying[pool_of(name)]) for name, size in free.items()}


def host_memory() -> tuple[int, int]:
    """Bytes of this machine, and those that are free."""
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _accelerator(kind: str, index: int) -> Device:
    module: Any = torch.get_device_module(kind)
    if kind == "mps":
        bf16 = torch.backends.mps.is_macos_or_newer(14, 0)
        return Device("mps", "mps", int(module.recommended_max_memory()), free_memory("mps"), bf16, "Apple GPU")
    name, facts = f"{kind}:{index}", module.get_device_properties(index)
    bf16 = kind != "cuda" or torch.version.hip is not None or facts.major >= 8
    return Device(name, kind, int(facts.total_memory), free_memory(name), bf16, str(facts.name))


def _cpu_has_bf16() -> bool:
    return bool(torch.cpu.get_capabilities().get("avx512_bf16")) if hasattr(torch.cpu, "get_capabilities") else False
