"""Admission counts the real size of cache blocks."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specfuse_shared import EnsembleConfig
from specfuse_shared.errors import RequestError
from specfuse_shared.members.stages import MemberInfo
from specfuse_shared.runtime.attention import MaskPlan
from specfuse_shared.runtime.cuda_graphs import Graphs
from specfuse_shared.runtime.kv_cache import TREE_CAPACITY, CachePool, CacheRow
from specfuse_shared.runtime.packed_steps import PackedRunner
from specfuse_shared.runtime.pages import PageArena
from specfuse_shared.serving.admission import Budget, Need

SLOT = {n: (torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4)) for n in range(2)}
SLOT_BYTES = 2 * 2 * 2 * 4 * 4
CPU = torch.device("cpu")


def budget(room: int) -> Budget:
    report: Any = None
    info = MemberInfo("m", 1.0, {"cpu": 1.0}, None, False, SLOT_BYTES, 256, 100, report)
    return Budget(EnsembleConfig(["m"], max_concurrent=99, reuse_prefixes=False), [info], {"cpu": room})


def written(pool: CachePool, slots: int) -> CacheRow:
    row = pool.row(slots)
    for n, (keys, values) in SLOT.items():
        row.block.layer(n, keys, values)
    row.used = slots - 2
    return row


def test_growing_rows_stay_within_the_budget() -> None:
    """A row moves to another block as its answer grows; the old block stays as long as other rows use it."""
    capacity = 60 * 256 * SLOT_BYTES
    admission, pool, chance = budget(capacity), CachePool(CPU, SLOT), random.Random(7)
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
            need = admission.needs(answer_of(prompt, answer))
            if not admission.take(need, len(running)):
                refused += 1
                continue
            running.append((need, written(pool, prompt + TREE_CAPACITY), prompt + answer))
        peak = max(peak, pool.memory_bytes)
    assert refused > 20
    assert 0.4 * capacity < peak <= capacity


def answer_of(prompt: int, answer: int) -> Any:
    """The attributes of an answer that admission reads."""
    return SimpleNamespace(
        participants=SimpleNamespace(prompt_tokens={"m": prompt}), max_tokens=answer, max_thinking_tokens=0
    )


def test_memory_is_reserved_for_graphs_and_their_logits() -> None:
    def runner(reason: str | None) -> PackedRunner:
        graphs, plan = Graphs(torch.device("cuda"), "m", reason), MaskPlan(("full_attention",), False)
        arena = PageArena(SLOT, 4)
        return PackedRunner(lambda *_: torch.empty(0), plan, CPU, torch.bfloat16, graphs, arena, 1, True, 4)

    assert runner("switched off").reserve_bytes(4096, 128256) == 0
    assert 0.3e9 < runner(None).reserve_bytes(4096, 128256) < 1e9


def test_pages_are_taken_from_the_bytes_for_caches() -> None:
    report: Any = None
    info = MemberInfo("m", 1.0, {"cpu": 1.0}, None, False, 100, 16, 10_000, report, cache_tokens=8500)
    config = EnsembleConfig(["m"], cache_bytes=1_000_000, reuse_prefixes=False)
    admission = Budget(config, [info], {"cpu": 1 << 40})
    assert admission.limits == {"cpu": 150_000}
    with pytest.raises(RequestError, match="cache_bytes"):
        admission.needs(answer_of(100, 100))


def test_the_cache_of_llama_cpp_is_not_taken_from_the_bytes_for_caches() -> None:
    """The cache of llama.cpp has a separate limit, and no pages."""
    report: Any = None
    info = MemberInfo("m", 1.0, {"cpu": 1.0}, None, False, 100, 1, 1000, report, cache_tokens=16_384)
    config = EnsembleConfig(["m"], cache_bytes=1_000_000, reuse_prefixes=False)
    admission = Budget(config, [info], {"cpu": 1 << 40})
    assert admission.limits == {"cpu": 1_000_000}
    admission.needs(answer_of(100, 100))


def test_an_answer_beyond_the_pages_is_refused_before_it_starts() -> None:
    report: Any = None
    info = MemberInfo("m", 1.0, {"cpu": 1.0}, None, False, 100, 16, 100, report, cache_tokens=2048)
    admission = Budget(EnsembleConfig(["m"]), [info], {"cpu": 1 << 30})
    assert admission.needs(answer_of(1000, 900)).tokens["m"] <= 2048
    with pytest.raises(RequestError, match=r"may need 2\d\d\d tokens of cache in member 'm', whose pages hold 2048"):
        admission.needs(answer_of(1000, 1100))
