"""Admission of answers: a budget of memory, and a limit on their number.

Also returns unused memory to the system.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from specfuse_shared.config import EnsembleConfig
from specfuse_shared.errors import RequestError
from specfuse_shared.fusion.session import AnswerSession, ScoringSession
from specfuse_shared.members.local.session import MOST_GUESSED
from specfuse_shared.members.stages import MemberInfo
from specfuse_shared.placement.plan import LOGIT_BYTES
from specfuse_shared.placement.sizing import only_cpu
from specfuse_shared.runtime.kv_cache import TREE_CAPACITY, grown, row_capacity
from specfuse_shared.runtime.mps import empty_cache

_PREFIX_SHARE = 0.125
"""Share of the memory for answers that holds prefixes of past answers."""
_BRANCHES = 5
"""Branches of an answer besides one candidate per member: its prefix, its own draft, guesses."""


@dataclass(frozen=True, slots=True)
class Need:
    """Maximum needs of an answer.

    `rows`: for each member the capacities of its cache row, the final one last. `tokens`: for each member with a
    preallocated cache instead, tokens of it. `logits`: bytes on each device.
    """

    rows: Mapping[str, Sequence[int]] = field(default_factory=dict)
    logits: Mapping[str, int] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Block:
    """The rows of one capacity of a member: the number in use, and the number that their block has memory for."""

    used: int = 0
    size: int = 0


class Budget:
    """Bytes for running answers on each device, and the maximum number of answers.

    An answer's need on a device: each member's cache row for its prompt and longest answer, and the logits of a
    round's candidates and of a guess (tokens · vocabulary · 4 bytes). Rows come in blocks that double, and a block
    counts in full. A row that grows leaves its block, which other rows may keep alive. So smaller blocks count as
    well. `free`: bytes for answers on each device.
    """

    def __init__(self, config: EnsembleConfig, members: Sequence[MemberInfo], free: Mapping[str, int]) -> None:
        self._config = config
        self._members = tuple(members)
        self._sharing = Counter(device for m in members for device in m.devices)
        pages = Counter[str]()  # taken at load, while answers still need memory for logits
        for member in (m for m in self._members if m.has_pages):
            for device, share in member.devices.items():
                pages[device] += int(share * (member.cache_tokens or 0) * member.bytes_per_token)
        total = config.cache_bytes
        self.limits = {d: max(0, total - pages[d]) if total else free[d] for d in self._sharing}
        self._of = {m.name: m for m in self._members}
        self._blocks: dict[tuple[str, int], _Block] = defaultdict(_Block)
        self._logits: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        branches = len(self._members) + _BRANCHES
        row_limits = [m.cache_branches // branches for m in self._members if m.cache_branches]
        self.most_answers = max(1, min([config.max_concurrent, *row_limits]))

    def prefix_bytes(self, member: MemberInfo) -> int:
        """Bytes in which a member remembers prefixes of past answers."""
        shares = [self.limits[device] / self._sharing[device] / share for device, share in member.devices.items()]
        return int(self._prefix_share * min(shares, default=0))

    def needs(self, session: AnswerSession | ScoringSession) -> Need:
        """The maximum needs of the answer. Raises `RequestError` if they exceed the budget of an idle engine."""
        rows: dict[str, Sequence[int]] = {}
        tokens: dict[str, int] = {}
        logits: Counter[str] = Counter()
        prompts = session.participants.prompt_tokens
        drafted = self._config.max_candidate_tokens * len(prompts)
        for member in (m for m in self._members if m.name in prompts):
            tried = drafted + (MOST_GUESSED if member.may_guess and self._config.speculation == "auto" else 0)
            slots = prompts[member.name] + session.max_tokens + tried
            slots += session.max_thinking_tokens if member.thinks else 0
            if member.context_limit is not None:
                slots = min(slots, member.context_limit)
            if member.cache_tokens is not None:
                if member.has_pages:
                    slots = max(slots, prompts[member.name] + TREE_CAPACITY)
                    slots = -(-slots // member.smallest_row) * member.smallest_row
                    if slots > member.cache_tokens:
                        raise RequestError(
                            f"the answer may need {slots} tokens of cache in member {member.name!r}, whose pages hold "
                            f"{member.cache_tokens}: shorten the prompt, lower max_tokens, or raise "
                            "EnsembleConfig(cache_bytes=…)"
                        )
                tokens[member.name] = min(slots, member.cache_tokens)
            else:
                rows[member.name] = _grown(prompts[member.name] + TREE_CAPACITY, slots, member)
            for device, share in member.devices.items():
                logits[device] += int(share * tried * member.vocabulary_size * LOGIT_BYTES)
        alone = Counter(logits)
        for name, capacities in rows.items():
            alone.update(self._bytes(name, capacities[-1], 1))
        for device, amount in alone.items():
            if amount > self._room(device):
                raise RequestError(
                    f"the answer may need {amount / 2**30:.2f} GiB of cache on {device}, and only "
                    f"{self._room(device) / 2**30:.2f} GiB are available for all answers: shorten the prompt, lower "
                    f"max_tokens, or raise EnsembleConfig(cache_bytes=…)"
                )
        return Need(rows, dict(logits), tokens)

    def take(self, need: Need, running: int) -> bool:
        """Reserve the needs if they fit next to `running` answers; whether they did."""
        if running >= self.most_answers or not self._has_tokens(need):
            return False
        taken: dict[str, list[int]] = defaultdict(list)
        self._logits.update(need.logits)
        self._tokens.update(need.tokens)
        for name, capacities in need.rows.items():
            for capacity in capacities:
                if not self._add_row(name, capacity, alone=not running):
                    self.free(Need(taken, need.logits, need.tokens))
                    return False
                taken[name].append(capacity)
        if running and not self._has_capacity():
            self.free(need)
            return False
        return True

    def free(self, need: Need) -> None:
        self._logits.subtract(need.logits)
        self._tokens.subtract(need.tokens)
        for name, capacity in ((name, capacity) for name, row in need.rows.items() for capacity in row):
            block = self._blocks[name, capacity]
            block.used -= 1
            if not block.used:  # it is freed with its last row
                block.size = 0

    def _has_tokens(self, need: Need) -> bool:
        """Whether preallocated caches have enough free tokens."""
        rooms = {name: self._of[name].cache_tokens or 0 for name in need.tokens}
        return all(self._tokens[name] + count <= rooms[name] for name, count in need.tokens.items())

    def _add_row(self, name: str, capacity: int, alone: bool) -> bool:
        """Add one row; whether it fits, with a larger block if it is full.

        `alone`: no other answer runs. Then the row is added in any case.
        """
        block = self._blocks[name, capacity]
        size = block.size
        if block.used == size:
            block.size = grown(size)
        if alone or block.size == size or self._has_capacity():
            block.used += 1
            return True
        block.size = size
        return False

    def _has_capacity(self) -> bool:
        reserved = Counter(self._logits)
        for (name, capacity), block in self._blocks.items():
            reserved.update(self._bytes(name, capacity, block.size))
        return all(amount <= self._room(device) for device, amount in reserved.items())

    def _bytes(self, name: str, capacity: int, rows: int) -> dict[str, int]:
        """Bytes of a number of rows on each of a member's devices."""
        member = self._of[name]
        size = rows * capacity * member.bytes_per_token
        return {device: int(share * size) for device, share in member.devices.items()}

    @property
    def _prefix_share(self) -> float:
        return _PREFIX_SHARE if self._config.reuse_prefixes else 0.0

    def _room(self, device: str) -> float:
        return self.limits[device] * (1 - self._prefix_share)


def _grown(first: int, slots: int, member: MemberInfo) -> list[int]:
    """Capacities that a row passes through from `first` slots to `slots`."""
    last = row_capacity(max(first, slots), member.smallest_row)
    sizes = [last]
    while sizes[0] > row_capacity(first, member.smallest_row):
        sizes.insert(0, sizes[0] // 2)
    return sizes


KERNELS_ENV, KERNELS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", 128
"""oneDNN compiles a kernel for each shape of a matrix product and keeps 1,024 of them. So memory grew by about 20 MiB
with each demo engine that was loaded, used and closed. With this limit it stays constant, at the same speed."""
TRIM_SECONDS = 5.0
"""Seconds without an answer, after which freed memory is returned to the system."""


def bound_kernels() -> None:
    """Limit the kernels that oneDNN keeps, unless the environment sets a limit.

    oneDNN reads it at the first matrix product.
    """
    os.environ.setdefault(KERNELS_ENV, str(KERNELS))


def release() -> None:
    """Collect the garbage of a closed engine, and return free memory of the process and of its devices."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available() and not only_cpu():
        empty_cache()
    trim()


def settle() -> None:
    """Have the garbage collector skip all present objects: the libraries and models of a process that has loaded all.

    Otherwise it searches about 400,000 objects every few rounds of many answers. Each search stops all answers for
    0.35 s.
    """
    gc.collect()
    gc.freeze()


def trim() -> None:
    """Return free memory of the process to the system, which glibc would keep. Takes about 0.1 s for a gigabyte."""
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libraries than glibc have none
        if malloc_trim is not None:
            malloc_trim(0)


class IdleTrim:
    """Trims memory after some seconds without an answer; trimming earlier would slow the next answer."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def busy(self) -> None:
        """Stop the timer: an answer begins, or the engine is closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def idle(self) -> None:
        """Start the timer: the last answer is over."""
        self.busy()
        self._timer = threading.Timer(TRIM_SECONDS, trim)
        self._timer.daemon = True
        self._timer.start()
