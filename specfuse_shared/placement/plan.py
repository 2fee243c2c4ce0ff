"""The plan that assigns members to devices, by their needs and the devices' memory. Uses no model and no torch.

A member's need on a device, in bytes:

    need = 1.1 · (W + B·C·K + T·V·4)

    W  its weights, in the number format and quantisation that they have there
    B  answers at once                   (`Workload.answers`)
    C  context of each, tokens           (`Workload.context`, or the member's own limit)
    K  keys and values of one token, over all layers; windows count as whole layers, as in the engine's caches
    T  tokens whose logits a round keeps (`Workload.draft_tokens` · B: every candidate of every member)
    V  vocabulary; logits are compared in 4 bytes each
    1.1  for activations, gaps of the allocator and other use

A member is placed whole if possible, the largest first, on an empty device or the one with the most free memory, so
that as many members as possible run at the same time. If that leaves a member out, members are packed tightly. A
member that may be quantised is quantised only if no wider format fits. The last resort is to split a member over
devices of one kind, or to offload parts to main memory or the disk if the settings allow it. The same sizes always
give the same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import Any, Protocol

from specfuse_shared.errors import PlacementError

RESERVE = 1.1
LOGIT_BYTES = 4
ANSWERS, CONTEXT = 1, 4096
"""Default workload of a plan; more answers share the remaining memory."""
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Device:
    """A torch device: `name` ("cuda:0"), `kind` ("cuda"), its total and free memory in bytes."""

    name: str
    kind: str
    total: int
    free: int
    bf16: bool = True
    title: str = ""

    @property
    def pool(self) -> str:
        """The memory pool of the device: an Apple GPU uses main memory."""
        return pool_of(self.name)


def pool_of(device: str) -> str:
    """The memory that a device of this name lies in; devices of one pool take from each other."""
    return "cpu" if device.partition(":")[0] in ("cpu", "mps") else device


@dataclass(frozen=True, slots=True)
class Workload:
    """Planned load: `answers` at once, `context` tokens each, `draft_tokens` in a round of one."""

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

    def split(self, free_bytes: Mapping[str, int], number_format: str, quantization: str | None) -> Split | None:
        """Layers assigned to devices in order, within each device's bytes for weights; None if they do not fit."""
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
        """Whether the planner may choose an accelerator itself: not MPS, where the engine has never run."""
        return device.kind not in ("cpu", "mps")

    def need(self, device: Device, quantization: str | None, workload: Workload) -> MemoryNeed:
        """This member's need on a device."""
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
        """The format of weights and caches: as chosen, else as stored, if the device computes in it.

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
    """A member's device. For a member without one, `memory` is empty and the rest is its need.

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
        """Why no device fits, and possible remedies."""
        if self.fits:
            return None
        lacking = [f"{a.member} ({format_bytes(a.need.total)})" for a in self.assignments if not a.memory]
        free = ", ".join(f"{d.name} {format_bytes(d.free)}" for d in self.devices)
        total = format_bytes(sum(a.need.total for a in self.assignments))
        return (
            f"no device has enough memory for {', '.join(lacking)}: "
            f"the members need {total} in all, with caches and a reserve "
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
        for entry, assignment in zip(data["assignments"], self.assignments, strict=True):
            entry["need"]["total"] = assignment.need.total
        for entry, device in zip(data["devices"], self.devices, strict=True):
            entry["planned"] = self.used(device.name)
        return {**data, "fits": self.fits, "problem": self.problem}


def format_bytes(count: float) -> str:
    """Bytes as a person reads them."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _packs_bf16() -> bool:
    """Whether the matrix library of this machine's processor takes bfloat16, also where it computes in float32."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


DISK = "disk"
ANY_PRECISION = (None, "8bit", "4bit")
_SHORT_CONTEXT = 1024

Precisions = tuple[str | None, ...]
"""The quantisation of each member."""


def place(specs: Sequence[MemberSpec], devices: Sequence[Device], workload: Workload | None = None) -> Plan:
    """A place for every member, or a plan without one for some, which says what would help.

    Raises `PlacementError` for a device that is not there.
    """
    planner = _Planner(specs, devices, workload or Workload())
    if (plan := planner.any()) is not None:
        return planner.plan(plan)
    return replace(planner.plan(planner.best_partial()), advice=tuple(_advice(planner)))


@dataclass(slots=True)
class _Attempt:
    """An attempt: who has a place, what is left of each device, and who has none yet."""

    free_bytes: dict[str, int]
    pools: dict[str, int]
    """What is left of each pool of memory, in which one device or several lie."""
    placed: dict[str, Assignment] = field(default_factory=dict)
    outside: list[tuple[MemberSpec, str | None]] = field(default_factory=list)
    tenants: Counter[str] = field(default_factory=Counter)

    def put(self, assignment: Assignment) -> None:
        self.placed[assignment.member] = assignment
        for name, amount in assignment.memory.items():
            self.tenants[name] += 1
            if name in self.free_bytes:
                self.free_bytes[name] -= amount
                self.pools[pool_of(name)] -= amount
        for name, free_bytes in self.free_bytes.items():
            self.free_bytes[name] = min(free_bytes, self.pools[pool_of(name)])


class _Planner:
    def __init__(self, specs: Sequence[MemberSpec], devices: Sequence[Device], workload: Workload) -> None:
        self.devices = tuple(devices)
        self.workload = workload
        self._choices = {r.name: candidates(r, self.devices) for r in specs}
        self.specs = tuple(self._widest_on_mps(r) for r in specs)
        self._needs: dict[tuple[str, str, str | None], MemoryNeed] = {}
        self._depth = max((len(r.quantizations) for r in self.specs), default=0)

    def any(self) -> _Attempt | None:
        """Every member in a place, if there is a way."""
        return self.whole() or self.in_parts()

    def whole(self) -> _Attempt | None:
        """Every member on one device, at the widest precisions that allow it."""
        if not self._packed(self._at(self._depth - 1)):
            return None
        return next(filter(None, map(self._packed, self._ladder())), None)

    def in_parts(self) -> _Attempt | None:
        """Split members that fit nowhere over devices of one kind, then offload them if they allow it."""
        for ways in ([self._split], [self._split, self._offloaded]):
            for level in range(self._depth):
                attempt = self._pack(self._at(level), roomiest=False)
                if all(self._put(attempt, *unplaced, ways) for unplaced in attempt.outside):
                    return attempt
        return None

    def best_partial(self) -> _Attempt:
        return self._pack(self._at(self._depth - 1), roomiest=False)

    def plan(self, attempt: _Attempt) -> Plan:
        """Members in their own order; those that were left outside have an empty place."""
        placed = dict(attempt.placed)
        for spec, quantization in attempt.outside:
            device = self._choices[spec.name][0]
            placed.setdefault(spec.name, self._assignment(spec, device, quantization))
        return Plan(self.devices, self.workload, tuple(placed[r.name] for r in self.specs))

    def _widest_on_mps(self, spec: MemberSpec) -> MemberSpec:
        """A member that may be on MPS is quantised there only if that was chosen: the libraries are newer there than
        those that are supported, and slow."""
        may_be = any(d.kind == "mps" for d in self._choices[spec.name])
        return replace(spec, quantizations=spec.quantizations[:1]) if may_be else spec

    # ── precisions ───────────────────────────────────────────────────────────────────────────────

    def _at(self, level: int) -> Precisions:
        return tuple(r.quantizations[min(level, len(r.quantizations) - 1)] for r in self.specs)

    def _ladder(self) -> Iterator[Precisions]:
        """Precisions, the widest first: as few members as possible one step down, those that lose the least."""
        yield self._at(0)
        for level in range(self._depth - 1):
            wide, narrow = self._at(level), self._at(level + 1)
            lost = {n: self._lost(n, wide[n], narrow[n]) for n in range(len(wide)) if wide[n] != narrow[n]}
            for count in range(1, len(lost) + 1):
                for down in sorted(combinations(lost, count), key=lambda chosen: sum(lost[n] for n in chosen)):
                    yield tuple(narrow[n] if n in down else wide[n] for n in range(len(wide)))

    def _lost(self, number: int, wide: str | None, narrow: str | None) -> int:
        spec = self.specs[number]
        device = self._choices[spec.name][0]
        return self._need(spec, device, wide).weights - self._need(spec, device, narrow).weights

    # ── whole members ────────────────────────────────────────────────────────────────────────────

    def _packed(self, precisions: Precisions) -> _Attempt | None:
        for roomiest in (True, False):
            attempt = self._pack(precisions, roomiest)
            if not attempt.outside:
                return attempt
        return None

    def _pack(self, precisions: Precisions, roomiest: bool) -> _Attempt:
        """Chosen devices first, then the largest member; onto the roomiest device or into the tightest gap."""
        pools: dict[str, int] = {}
        for d in self.devices:
            pools[d.pool] = max(d.free, pools.get(d.pool, 0))
        attempt = _Attempt({d.name: d.free for d in self.devices}, pools)

        def order(entry: tuple[MemberSpec, str | None]) -> tuple[bool, int]:
            spec, quantization = entry
            largest = max(self._need(spec, d, quantization).total for d in self._choices[spec.name])
            return spec.device == "auto", -largest

        for spec, quantization in sorted(zip(self.specs, precisions, strict=True), key=order):
            device = self._best(attempt, spec, quantization, roomiest)
            if device is None:
                attempt.outside.append((spec, quantization))
            else:
                whole = self._assignment(spec, device, quantization)
                memory, caches = {device.name: whole.need.total}, {device.name: 1.0}
                attempt.put(replace(whole, modules={"": device.name}, memory=memory, caches=caches))
        return attempt

    def _best(self, attempt: _Attempt, spec: MemberSpec, quantization: str | None, roomiest: bool) -> Device | None:
        ranked = []
        for index, device in enumerate(self._choices[spec.name]):
            free = attempt.free_bytes[device.name] - self._need(spec, device, quantization).total
            rank = (attempt.tenants[device.name], -free) if roomiest else (0, free)
            if free >= 0:
                ranked.append((rank, index))
        return self._choices[spec.name][min(ranked)[1]] if ranked else None

    # ── members in parts ─────────────────────────────────────────────────────────────────────────

    def _put(
        self,
        attempt: _Attempt,
        spec: MemberSpec,
        quantization: str | None,
        ways: Sequence[Callable[[_Attempt, MemberSpec, str | None], Assignment | None]],
    ) -> bool:
        placed = next(filter(None, (way(attempt, spec, quantization) for way in ways)), None)
        if placed is not None:
            attempt.put(placed)
        return placed is not None

    def _split(self, attempt: _Attempt, spec: MemberSpec, quantization: str | None) -> Assignment | None:
        """Over as few devices of one kind as possible, the roomiest; caches go along with the layers."""
        for kind in dict.fromkeys(d.kind for d in self._choices[spec.name]):
            same = [d for d in self._choices[spec.name] if d.kind == kind]
            same.sort(key=lambda d: -attempt.free_bytes[d.name])
            for count in range(2, len(same) + 1):
                chosen = [d for d in same[:count] if attempt.free_bytes[d.name] > 0]
                assignment = self._assignment(spec, same[0], quantization)
                need = assignment.need
                part = need.weights / (need.weights + need.caches + need.logits) / RESERVE
                free_bytes = {d.name: int(attempt.free_bytes[d.name] * part) for d in chosen}
                split = spec.sizes.split(free_bytes, assignment.number_format, quantization)
                if split is not None:
                    memory = {name: int(share * need.total) for name, share in split.shares.items()}
                    return replace(assignment, modules=split.modules, memory=memory, caches=split.shares)
        return None

    def _offloaded(self, attempt: _Attempt, spec: MemberSpec, quantization: str | None) -> Assignment | None:
        """One device computes and holds the caches; layers beyond it wait in main memory, the rest on the disk."""
        if not spec.offload or quantization is not None:
            return None
        main = max(self._choices[spec.name], key=lambda d: attempt.free_bytes[d.name])
        assignment = self._assignment(spec, main, quantization)
        need = assignment.need
        extra = need.caches + need.logits
        free_bytes = {main.name: attempt.free_bytes[main.name] / RESERVE - extra}
        beside_it = [d for d in self.devices if d.kind == "cpu" and d.pool != main.pool]
        free_bytes |= {d.name: attempt.free_bytes[d.name] / RESERVE for d in beside_it}
        whole = {name: int(free) for name, free in free_bytes.items() if free > 0}
        split = spec.sizes.split({**whole, DISK: need.weights}, assignment.number_format, quantization)
        if split is None or main.name not in split.shares:
            return None
        amounts = {n: share * need.weights + (extra if n == main.name else 0) for n, share in split.shares.items()}
        memory = {name: int(RESERVE * amount) for name, amount in amounts.items()}
        return replace(assignment, modules=split.modules, memory=memory, caches={main.name: 1.0})

    def _assignment(self, spec: MemberSpec, device: Device, quantization: str | None) -> Assignment:
        need = self._need(spec, device, quantization)
        return Assignment(spec.name, spec.number_format(device), quantization, need)

    def _need(self, spec: MemberSpec, device: Device, quantization: str | None) -> MemoryNeed:
        key = spec.name, spec.number_format(device), quantization
        if key not in self._needs:
            self._needs[key] = spec.need(device, quantization, self.workload)
        return self._needs[key]


def candidates(spec: MemberSpec, devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices that a member may be put on: the default accelerators, else the processor; or those it names."""
    if spec.device == "auto":
        return tuple(filter(spec.is_default, devices)) or tuple(d for d in devices if d.kind == "cpu") or tuple(devices)
    device_name = spec.device.removesuffix(":0") if spec.device in ("cpu:0", "mps:0") else spec.device
    matching = tuple(d for d in devices if device_name in (d.name, d.kind))
    if not matching:
        there = ", ".join(d.name for d in devices)
        raise PlacementError(f"member {spec.name!r}: there is no device {spec.device!r}; there are {there}")
    return matching


# ── advice ───────────────────────────────────────────────────────────────────────────────────────


def _advice(planner: _Planner) -> Iterator[str]:
    """Changes that would let every member be placed; each was tried."""
    specs, workload = planner.specs, planner.workload

    def fits(chosen: Sequence[MemberSpec], workload: Workload = workload) -> bool:
        return _Planner(chosen, planner.devices, workload).whole() is not None

    def most(chosen: Sequence[MemberSpec]) -> list[MemberSpec]:
        """The larger ones, without which the rest fits."""
        by_size = sorted(chosen, key=lambda r: -r.sizes.weights("bfloat16", None))
        return next((by_size[:n] for n in range(1, len(by_size)) if fits(by_size[n:])), by_size)

    if fits([replace(r, dtype="bfloat16") if r.dtype in ("auto", "float32") else r for r in specs]):
        yield 'dtype="bfloat16"'
    quantised = [r if r.fixed else replace(r, quantizations=ANY_PRECISION) for r in specs]
    if fits(quantised):
        yield 'quantization="auto", which takes the widest precision that fits'
    if fits(specs, replace(workload, context=_SHORT_CONTEXT)):
        yield f"max_context={_SHORT_CONTEXT}, a shorter context"
    without, fewer = most(specs), most(quantised)
    how = ' with quantization="auto"' if len(fewer) < len(without) else ""
    if len(gone := fewer if how else without) < len(specs):
        yield f"leaving out {', '.join(r.name for r in gone)}{how}"
    offloading = [replace(r, offload=True) for r in specs]
    if offloading != list(specs) and _Planner(offloading, planner.devices, workload).in_parts():
        yield "offload=True, which keeps layers in main memory or on the disk and is very slow"
    yield "smaller models or more memory"
