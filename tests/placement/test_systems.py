"""Macs and machines whose accelerator must not be used, as torch would describe them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specfuse_shared import MemberConfig
from specfuse_shared.errors import ConfigError
from specfuse_shared.loading import planning
from specfuse_shared.placement.plan import ANY_PRECISION, Device, MemberSpec, Split, place
from specfuse_shared.placement.sizing import DEVICES_ENV, find_devices, free_memory, has_accelerator, shared_out
from tests.placement.test_placement import shape_sizes

GIB = 2**30


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Mac of 16 GB with 6 GB free; the GPU's allocated memory can be changed."""
    gpu: Any = SimpleNamespace(
        recommended_max_memory=lambda: int(10.7 * GIB),
        driver_allocated_memory=lambda: gpu.held,
        current_allocated_memory=lambda: gpu.used,
        held=0,
        used=0,
        free=6 * GIB,
    )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: gpu)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: True)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=16 * GIB, available=gpu.free))
    monkeypatch.delenv(DEVICES_ENV, raising=False)
    return gpu


def spec(**settings: Any) -> MemberSpec:
    return MemberSpec("gemma", shape_sizes("gemma-2-9b"), "bfloat16", **settings)


def test_no_member_is_placed_on_mps_by_default(mac: SimpleNamespace) -> None:
    mac.free = 2**40
    devices = [Device("cpu", "cpu", 2**40, 2**40), Device("mps", "mps", 2**40, 2**40)]
    assert place([spec()], devices).of("gemma").place == "cpu"
    assert place([spec(device="mps")], devices).of("gemma").place == "mps"
    assert [d.name for d in find_devices()] == ["cpu", "mps"]


def test_gpus_of_other_kinds_are_used_as_before() -> None:
    devices = [Device("cpu", "cpu", 2**40, 2**40), Device("xpu:0", "xpu", 2**40, 2**40)]
    assert place([spec()], devices).of("gemma").place == "xpu:0"


def test_llama_cpp_has_kernels_for_an_apple_gpu(mac: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "build_offloads", lambda: True)
    assert planning.offloads(MemberConfig("a.gguf"))
    file = planning.LlamaSpec("gemma", shape_sizes("gemma-2-9b"))
    assert file.is_default(Device("mps", "mps", 1, 1))
    monkeypatch.setenv(DEVICES_ENV, "cpu")
    assert not planning.offloads(MemberConfig("a.gguf"))


def test_an_environment_variable_restricts_plans_to_the_cpu(
    mac: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On hosted runners of macOS torch sees MPS, and each allocation there fails."""
    monkeypatch.setenv(DEVICES_ENV, "cpu")
    monkeypatch.setattr(torch, "get_device_module", lambda device: pytest.fail("the GPU was asked"))
    assert [d.name for d in find_devices()] == ["cpu"]
    assert not has_accelerator()


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_variable_is_no_restriction(value: str, mac: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workflow that sets the variable for one system leaves it empty on the others."""
    monkeypatch.setenv(DEVICES_ENV, value)
    assert [d.name for d in find_devices()] == ["cpu", "mps"]


@pytest.mark.parametrize("value", ["mps", "none", "0"])
def test_another_value_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICES_ENV, value)
    with pytest.raises(ConfigError, match=rf"SPECFUSE_DEVICES is '{value}': set it to \"cpu\""):
        find_devices()


# ── one memory ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Weights:
    """A model of `size` bytes, and nothing else."""

    size: int
    kv_values: int = 0
    tied: int = 0
    vocabulary: int = 0
    context: int | None = 64

    def weights(self, number_format: str, quantization: str | None) -> int:
        return self.size

    def split(self, room: Mapping[str, int], number_format: str, quantization: str | None) -> Split | None:
        return None if sum(room.values()) < self.size else Split({}, {name: 1 / len(room) for name in room})


def sized(name: str, gib: float, device: str, **settings: Any) -> MemberSpec:
    return MemberSpec(name, Weights(int(gib * GIB)), "bfloat16", device=device, **settings)


def test_memory_of_a_mac_is_counted_once(mac: SimpleNamespace) -> None:
    """Both its GPU and its processor could take 6 GiB, but not both of them."""
    devices = find_devices()
    assert [d.free for d in devices] == [6 * GIB, 6 * GIB]
    assert place([sized("one", 3, "mps"), sized("two", 2, "cpu")], devices).fits
    both = place([sized("one", 3, "mps"), sized("two", 3, "cpu")], devices)
    assert not both.fits
    assert both.used("mps") + both.used("cpu") <= 6 * GIB
    offloaded = place([sized("one", 8, "mps", offload=True)], devices)
    assert offloaded.of("one").place == "mps+disk", "main memory is the same memory"
    assert offloaded.used("mps") <= 6 * GIB
    cards = [devices[0], Device("cuda:0", "cuda", 6 * GIB, 6 * GIB)]
    assert place([sized("one", 3, "cuda"), sized("two", 3, "cpu")], cards).fits


def test_torchs_unused_memory_on_a_mac_is_free(mac: SimpleNamespace) -> None:
    mac.used, mac.held, mac.free = 2 * GIB, 5 * GIB, 4 * GIB
    assert free_memory("mps") == 7 * GIB
    mac.free = 60 * GIB
    assert free_memory("mps") == int(10.7 * GIB) - 2 * GIB
    mac.used = mac.held = 12 * GIB
    assert free_memory("mps") == 0


def test_answers_on_a_mac_use_one_memory() -> None:
    assert shared_out({"cpu": 6, "mps": 5}) == {"cpu": 3, "mps": 3}
    assert shared_out({"cpu": 6, "mps": 2}) == {"cpu": 3, "mps": 2}
    alone = {"cpu": 6, "cuda:0": 5, "cuda:1": 4}
    assert shared_out(alone) == alone


def test_members_on_mps_are_not_quantised_by_default() -> None:
    devices = [Device("mps", "mps", 2**40, 2**40), Device("cpu", "cpu", 2**40, 2**40)]
    roomy = place([spec(device="mps", quantizations=ANY_PRECISION)], devices)
    tight = place([spec(device="mps", quantizations=ANY_PRECISION)], [Device("mps", "mps", 9 * GIB, 9 * GIB)])
    chosen = place([spec(device="mps", quantizations=("8bit",))], devices)
    assert roomy.of("gemma").quantization is None
    assert not tight.fits
    assert chosen.of("gemma").quantization == "8bit"
