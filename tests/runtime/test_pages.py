"""Pages of a cache: shared prefixes, copies before writing, and a full arena."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specfuse_shared import EnsembleEngine, SamplingParams
from specfuse_shared.errors import MemberLoadError
from specfuse_shared.members.local import probe
from specfuse_shared.members.local.lane import LocalLane
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.runtime.kv_cache import PrefixCache
from specfuse_shared.runtime.model_runner import ModelRunner
from specfuse_shared.runtime.out_of_memory import is_out_of_memory
from specfuse_shared.runtime.packed_layout import PAGE
from specfuse_shared.runtime.pages import OutOfPagesError, PageArena, PagedRow
from tests.support.against_naive import local_members


def arena(pages: int) -> PageArena:
    return PageArena({n: (torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 5)) for n in range(2)}, pages)


def filled(made: PageArena, count: int) -> PagedRow:
    """An answer whose slot n holds n + 1."""
    row = made.row()
    row.reserve(count)
    for keys, values in made.layers.values():
        for slot in range(count):
            keys[row.place(slot)] = slot + 1
            values[row.place(slot)] = slot + 1
    row.used = count
    return row


def content(row: PagedRow, layer: int = 1) -> list[float]:
    keys, values = row.arena.layers[layer]
    assert [float(values[place].mean()) for place in row.places(0, row.used)] == pytest.approx(
        [float(keys[place].mean()) for place in row.places(0, row.used)]
    )
    return [float(keys[place].mean()) for place in row.places(0, row.used)]


def test_kept_slots_follow_the_prefix() -> None:
    row = filled(arena(5), 40)
    row.keep(18, [20, 25, 39])
    assert content(row) == [*range(1, 19), 21, 26, 40]
    row.keep(3, [3, 4])
    assert content(row) == [1, 2, 3, 4, 5], "no weight changes"


def test_whole_pages_of_a_prefix_are_shared_and_the_last_one_is_copied() -> None:
    made = arena(12)
    first = filled(made, 40)
    free = made.free_pages
    second = made.row()
    second.load(first, 36)
    assert free - made.free_pages == 1, "two whole pages are shared, four slots of a third copied"
    assert second.pages[:2] == first.pages[:2]
    assert content(second) == content(first)[:36]
    first.free()
    assert content(second) == list(range(1, 37))
    second.free()
    second.free()
    assert made.free_pages == 11
    assert not any(made.owners)


def test_a_page_of_two_answers_is_copied_before_one_of_them_writes() -> None:
    made = arena(12)
    first = filled(made, 32)
    second = made.row()
    second.load(first, 32)
    second.keep(10, [31])
    assert content(second) == [*range(1, 11), 32]
    assert content(first) == list(range(1, 33))
    second.used = 4
    second.reserve(20)
    assert set(second.pages).isdisjoint(first.pages), "the next tokens are written to new pages"


def test_without_a_free_page_cached_prefixes_are_evicted_before_memory_is_out() -> None:
    made = arena(4)
    row, prefixes = filled(made, 20), PrefixCache(limit=10**6)
    prefixes.store(row, list(range(20)))
    assert made.free_pages == 0, "one whole page is shared, one copied"

    made.reclaim_pages = prefixes.drop_oldest
    made.row().reserve(16)
    with pytest.raises(OutOfPagesError, match=r"all 3 pages of the cache \(16 tokens each\) are in use") as error:
        made.row().reserve(1)
    assert is_out_of_memory(error.value)
    assert made.free_pages == 0, "no partial result was used"


def test_a_cached_prefix_can_be_shared_while_it_is_evicted_for_its_last_page() -> None:
    made = arena(5)
    ended, prefixes = filled(made, 36), PrefixCache(limit=10**6)
    prefixes.store(ended, list(range(36)))
    ended.free()
    answer = filled(made, 10)
    made.reclaim_pages = prefixes.drop_oldest
    row = made.row()
    assert made.free_pages == 0
    with pytest.raises(OutOfPagesError):  # its last page must be copied, and no page is free
        prefixes.fill(row, [*range(36), 99])
    assert row.used == 0
    answer.free()
    assert made.free_pages == 4, "the failed attempt kept no page"


def test_pages_shared_by_cached_prefixes_count_once() -> None:
    made = arena(20)
    row, prefixes = filled(made, 48), PrefixCache(limit=10**6)
    ids = list(range(48))
    prefixes.store(row, ids[:40])
    prefixes.store(row, [*ids[:36], 77])
    page = PAGE * made.bytes_per_slot
    assert prefixes.memory_bytes == 4 * page, "two pages that both have, and the last one of each"


def test_prefixes_of_ended_and_running_answers_are_stored_once() -> None:
    made = arena(20)
    ended, prefixes = filled(made, 50), PrefixCache(limit=10**6)
    ids = list(range(50))
    prefixes.store(ended, ids)
    ended.free()
    used = 19 - made.free_pages
    rows = [made.row() for _ in range(3)]
    for row in rows:
        assert prefixes.fill(row, [*ids[:48], 99, 98]) == 48
        assert content(row) == list(range(1, 49))
    assert 19 - made.free_pages == used, "48 slots are three whole pages"
    assert prefixes.reused_tokens == 3 * 48
    for row in rows:
        row.free()
    prefixes.shrink()
    assert made.free_pages == 19
    assert PAGE == 16


def test_a_lane_allocates_fewer_pages_if_memory_is_low(
    tiny_engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory for any page it raises an error."""
    plainly, limit = ModelRunner.open_arena, 40

    def scarce(runner: ModelRunner, pages: int) -> None:
        if pages > limit:
            raise torch.OutOfMemoryError("injected: out of memory")
        plainly(runner, pages)

    monkeypatch.setattr(ModelRunner, "open_arena", scarce)
    monkeypatch.setattr(probe, "_PAGES", 30)
    with EnsembleEngine(replace(tiny_engine.config, execution="paged")) as engine:
        assert all(20 < member.runner.pool.pages <= 40 for member in local_members(engine.load()))
        assert engine.generate("Tides?", SamplingParams(max_tokens=5)).text
    folder = tiny_engine.config.member_configs[0]
    member = LocalMember(folder, execution="paged")
    limit = 2
    with pytest.raises(MemberLoadError, match="there is no memory for its cache on cpu"):
        LocalLane([member])
