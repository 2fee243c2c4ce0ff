"""Admission counts what cache blocks really hold."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specfuse_shared import EnsembleConfig
from specfuse_shared.members.stages import MemberInfo
from specfuse_shared.runtime.attention import MaskPlan
from specfuse_shared.runtime.kv_cache import TREE_CAPACITY, CacheBlock, CachePool, CacheRow
from specfuse_shared.runtime.static_runner import Graphs, StaticRunner
from specfuse_shared.serving.admission import Budget, Need

SLOT = {n: (torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4)) for n in range(2)}
SLOT_BYTES = 2 * 2 * 2 * 4 * 4
CPU = torch.device("cpu")


def budget(room: int, is_fixed: bool) -> Budget:
    report: Any = None
    info = MemberInfo("m", 1.0, {"cpu": 1.0}, None, False, SLOT_BYTES, 256, 100, report, fixed_blocks=is_fixed)
    return Budget(EnsembleConfig(["m"], max_concurrent=99, reuse_prefixes=False), [info], {"cpu": room})


def written(pool: CachePool, slots: int) -> CacheRow:
    row = pool.row(slots)
    for n, (keys, values) in SLOT.items():
        row.block.layer(n, keys, values)
    row.used = slots - 2
    return row


def test_admitted_answers_never_run_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    room = 70 * 256 * SLOT_BYTES
    zeros = CacheBlock._zeros

    def scarce(block: CacheBlock, layers: int, rows: int, like: torch.Tensor) -> torch.Tensor:
        expected = layers * rows * like.shape[-3] * block.capacity * like.shape[-1] * like.element_size()
        if pool.memory_bytes + expected > room:
            raise torch.OutOfMemoryError("there is no more")
        return zeros(block, layers, rows, like)

    monkeypatch.setattr(CacheBlock, "_zeros", scarce)
    admission, pool, chance = budget(room, is_fixed=True), CachePool(CPU, SLOT), random.Random(5)
    pool.is_fixed = True
    running: list[tuple[Need, CacheRow]] = []
    refused, peak = 0, 0
    for _ in range(600):
        if running and chance.random() < 0.45:
            need, row = running.pop(chance.randrange(len(running)))
            row.free()
            admission.free(need)
            continue
        slots = chance.choice((200, 200, 400, 900))
        need = Need({"m": [256 if slots < 256 else 512 if slots < 512 else 1024]}, {"cpu": 0})
        if not admission.take(need, len(running)):
            refused += 1
            continue
        running.append((need, written(pool, slots)))
        peak = max(peak, pool.memory_bytes)
    assert refused > 20
    assert peak > 0.5 * room, "what there is, is used"


def test_rows_that_grow_stay_within_the_budget() -> None:
    """A row begins with its prompt and moves as its answer grows; a block that it leaves stays for as long as others
    are in it."""
    room = 60 * 256 * SLOT_BYTES
    admission, pool, chance = budget(room, is_fixed=False), CachePool(CPU, SLOT), random.Random(7)
    running: list[tuple[Need, CacheRow, int]] = []
    refused, peak = 0, 0
    for _ in range(1500):
        grows = [each for each in running if each[1].used < each[2]]
        if grows and chance.random() < 0.5:
            _, row, end = chance.choice(grows)
            size = min(end, 2 * row.used)
            row.reserve(size)
            row.used = size
        elif running and chance.random() < 0.5:
            need, row, _ = running.pop(chance.randrange(len(running)))
            row.free()
            admission.free(need)
        else:
            prompt, answer = chance.choice((100, 230, 970)), chance.choice((8, 200, 900))
            need = admission.needs(asked(prompt, answer))
            if not admission.take(need, len(running)):
                refused += 1
                continue
            running.append((need, written(pool, prompt + TREE_CAPACITY), prompt + answer))
        peak = max(peak, pool.memory_bytes)
    assert refused > 20
    assert 0.4 * room < peak <= room


def asked(prompt: int, answer: int) -> Any:
    """The attributes of an answer that admission reads."""
    return SimpleNamespace(
        participants=SimpleNamespace(prompt_tokens={"m": prompt}), max_tokens=answer, max_thinking_tokens=0
    )


def test_graphs_and_their_logits_have_a_reserve() -> None:
    def runner(reason: str | None) -> StaticRunner:
        graphs = Graphs(torch.device("cuda"), "m", reason)
        return StaticRunner(
            lambda *_: torch.empty(0), MaskPlan(("full_attention",), False), CPU, torch.bfloat16, graphs
        )

    assert runner("switched off").reserve_bytes(4096, 128256) == 0
    assert 0.3e9 < runner(None).reserve_bytes(4096, 128256) < 1e9
