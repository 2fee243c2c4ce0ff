"""What members need and devices have, and the plan of who goes where. Knows no model and no torch.

What a member needs on a device, in bytes:

    need = 1.1 · (W + B·C·K + T·V·4)

    W  its weights, in the number format and quantisation that they have there
    B  answers at once                   (`Workload.answers`)
    C  context of each, tokens           (`Workload.context`, or the member's own limit)
    K  keys and values of one token, over all layers; windows count as whole layers, as in the engine's caches
    T  tokens whose logits a round keeps (`Workload.draft_tokens` · B: every candidate of every member)
    V  vocabulary; logits are compared in 4 bytes each
    1.1  for activations, the allocator's gaps and what nobody counts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from specfuse_shared.errors import PlacementError

RESERVE = 1.1
LOGIT_BYTES = 4
ANSWERS, CONTEXT = 1, 4096
"""What a plan makes room for unless told otherwise; more answers share what is left."""
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Device:
    """A device of torch: `name` ("cuda:0"), `kind` ("cuda"), its memory and what is free of it, in bytes."""

    name: str
    kind: str
    total: int
    free: int
    bf16: bool = True
    title: str = ""

    @property
    def pool(self) -> str:
        """The memory that it lies in: an Apple GPU has none of its own."""
        return pool_of(self.name)


def pool_of(device: str) -> str:
    """The memory that a device of this name lies in; devices of one pool take from each other."""
    return "cpu" if device.partition(":")[0] in ("cpu", "mps") else device


@dataclass(frozen=True, slots=True)
class Workload:
    """What a plan makes room for: `answers` at once, `context` tokens each, `draft_tokens` in a round of one."""

    answers: int = ANSWERS
    context: int = CONTEXT
    draft_tokens: int = 10


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a member needs, without the reserve; `total` is with it."""

    weights: int
    caches: int
    logits: int

    @property
    def total(self) -> int:
        return int(RESERVE * (self.weights + self.caches + self.logits))


@dataclass(frozen=True, slots=True)
class Split:
    """A member in parts: the device of each module, and each device's share of the weights."""

    modules: Mapping[str, str]
    shares: Mapping[str, float]


class Sizes(Protocol):
    """The sizes of a model. `kv_values`: numbers that a token adds to its caches. `context`: tokens, if limited.

    `tied`: numbers that the output layer shares with the embedding.
    """

    @property
    def kv_values(self) -> int: ...

    @property
    def tied(self) -> int: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def context(self) -> int | None: ...

    def weights(self, number_format: str, quantization: str | None) -> int:
        """Bytes of all weights."""
        ...

    def split(self, room: Mapping[str, int], number_format: str, quantization: str | None) -> Split | None:
        """Layers dealt out to devices with so many bytes for weights, in their order; None if there is not enough."""
        ...


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """A member that wants a place.

    `quantizations`: those that it allows, the widest first; None is none. `fixed`: it cannot be
    quantised, or is so already. `stored`: the number format of its checkpoint, if that is known.
    """

    name: str
    sizes: Sizes
    stored: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    quantizations: tuple[str | None, ...] = (None,)
    offload: bool = False
    max_context: int | None = None
    fixed: bool = False

    def is_default(self, device: Device) -> bool:
        """Whether it may be put on an accelerator that nobody named: not on MPS, where nobody has run the engine."""
        return device.kind not in ("cpu", "mps")

    def need(self, device: Device, quantization: str | None, workload: Workload) -> MemoryNeed:
        """What this member needs on a device."""
        number_format, sizes = self.number_format(device), self.sizes
        limits = [n for n in (self.max_context or workload.context, sizes.context) if n]
        cached = workload.answers * min(limits) * sizes.kv_values
        # an output layer is packed where the processor's matrix library knows bfloat16, and the embedding is not
        plain = (device.kind, number_format, quantization) == ("cpu", "bfloat16", None)
        packed = plain and (device.bf16 or _packs_bf16())
        twice = sizes.tied if packed else 0
        return MemoryNeed(
            weights=sizes.weights(number_format, quantization) + twice * VALUE_BYTES[number_format],
            caches=cached * VALUE_BYTES[number_format],
            logits=workload.answers * workload.draft_tokens * sizes.vocabulary * LOGIT_BYTES,
        )

    def number_format(self, device: Device) -> str:
        """The format of weights and caches: as chosen, else as stored, as far as the device calculates in it.

        Half precision without bfloat16 is float16 on an accelerator and float32 on a processor; accelerators never
        get float32 unless it was chosen.
        """
        on_cpu = device.kind == "cpu"
        if (self.stored if self.dtype == "auto" else self.dtype) == "float16":
            return "float32" if on_cpu else "float16"
        if self.dtype != "auto":
            return self.dtype
        if on_cpu:
            return "bfloat16" if device.bf16 and self.stored == "bfloat16" else "float32"
        return "bfloat16" if device.bf16 else "float16"


@dataclass(frozen=True, slots=True)
class Assignment:
    """A member's place; without one, `memory` is empty and the rest is what it would need.

    `modules`: module → device, as transformers takes it ("" is the whole model). `memory`: device → bytes with the
    reserve. `caches`: device → share of keys, values and logits.
    """

    member: str
    number_format: str
    quantization: str | None
    need: MemoryNeed
    modules: Mapping[str, str] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    caches: Mapping[str, float] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return "+".join(self.memory)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every member goes; `advice` says what would help the ones without a place."""

    devices: tuple[Device, ...]
    workload: Workload
    assignments: tuple[Assignment, ...]
    advice: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return all(a.memory for a in self.assignments)

    @property
    def problem(self) -> str | None:
        """Why there is no place, and what would help."""
        if self.fits:
            return None
        lacking = [f"{a.member} ({format_bytes(a.need.total)})" for a in self.assignments if not a.memory]
        free = ", ".join(f"{d.name} {format_bytes(d.free)}" for d in self.devices)
        total = format_bytes(sum(a.need.total for a in self.assignments))
        return (
            f"no device has room for {', '.join(lacking)}: the members need {total} in all, with caches and a reserve "
            f"of 10 %, and there is {free}. What would help: {'; '.join(self.advice)}"
        )

    def of(self, member: str) -> Assignment:
        """A member's place. Raises `PlacementError` if any member has none."""
        if (problem := self.problem) is not None:
            raise PlacementError(problem)
        return next(a for a in self.assignments if a.member == member)

    def used(self, device: str) -> int:
        """Bytes planned on a device, with the reserve."""
        return sum(a.memory.get(device, 0) for a in self.assignments)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        data = asdict(self)
        for told, assignment in zip(data["assignments"], self.assignments, strict=True):
            told["need"]["total"] = assignment.need.total
        for told, device in zip(data["devices"], self.devices, strict=True):
            told["planned"] = self.used(device.name)
        return {**data, "fits": self.fits, "problem": self.problem}


def format_bytes(count: float) -> str:
    """Bytes as a person reads them."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _packs_bf16() -> bool:
    """Whether the matrix library of this machine's processor takes bfloat16, also where it computes in float32."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
