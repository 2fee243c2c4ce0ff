"""Attention over pieces of the slots: equal to attention over all of them, alone and under whole answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from specfuse_shared import EnsembleConfig, EnsembleEngine, SamplingParams
from specfuse_shared.runtime import attention
from specfuse_shared.runtime.attention import additive
from tests.support.against_naive import assert_equals_naive, local_members
from tests.support.tiny import MESSAGES

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A processor is taken for a device that computes many pieces at once; into how many each call split."""
    pieces: list[int] = []
    plainly = attention.split_attention
    monkeypatch.setitem(attention._WORKERS, "cpu", 256)
    monkeypatch.setattr(attention, "split_attention", lambda *args: pieces.append(args[-1]) or plainly(*args))  # type: ignore[func-returns-value]
    return pieces


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("answers", "groups", "queries", "slots", "pieces"),
    [(1, 4, 1, 1024, 8), (3, 2, 5, 2048, 16), (2, 1, 7, 4096, 32), (40, 2, 1, 1024, 2)],
)
def test_pieces_equal_the_whole(
    taken: list[int], dtype: torch.dtype, answers: int, groups: int, queries: int, slots: int, pieces: int
) -> None:
    """Most pieces are hidden from every query, as after a short answer in a long row."""
    torch.manual_seed(0)
    query = torch.randn(answers, 2 * groups, queries, 16, dtype=dtype)
    key, value = torch.randn(2, answers, 2, slots, 16, dtype=dtype)
    visible = torch.rand(answers, queries, slots) < 0.1
    visible[:, :, 300:], visible[:, :, 0] = False, True
    mask = additive(visible, dtype)[:, None]
    result, _ = attention.grouped_kernel(torch.nn.Module(), query, key, value, mask, 0.3)
    keys, values = (t.repeat_interleave(groups, 1).float() for t in (key, value))
    expected = scaled_dot_product_attention(query.float(), keys, values, visible[:, None], scale=0.3)
    assert taken == [pieces]
    torch.testing.assert_close(result.float(), expected.transpose(1, 2), rtol=0, atol=DTYPES[dtype])


@pytest.mark.parametrize(
    ("slots", "size", "answers"),
    [(512, 16, 1), (1024, 12, 1), (1024, 16, 200), (1278, 16, 1)],
    ids=["few slots", "a size that kernels do not take", "many answers", "pieces whose masks are not aligned"],
)
def test_small_attention_is_not_split(taken: list[int], slots: int, size: int, answers: int) -> None:
    query, key = torch.randn(answers, 4, 1, size), torch.randn(answers, 2, slots, size)
    attention.grouped_kernel(torch.nn.Module(), query, key, key, torch.zeros(answers, 1, 1, slots))
    assert taken == []


@pytest.mark.parametrize(
    ("capability", "hip", "dtype", "splits"),
    [
        ((9, 0), None, torch.bfloat16, True),
        ((7, 5), None, torch.bfloat16, False),
        ((7, 5), None, torch.float16, True),
        ((9, 0), None, torch.float64, False),
        ((9, 4), "6.4", torch.bfloat16, False),
    ],
)
def test_cards_whose_library_has_no_such_kernel_do_without(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, dtype: torch.dtype, splits: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert attention._gives_logs.__wrapped__(torch.device("cuda", 0), dtype) is splits


def test_answers_over_pieces_equal_the_naive_round(
    taken: list[int], tiny_engine: EnsembleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_FEWEST_SLOTS", 256)
    config: EnsembleConfig = replace(tiny_engine.config, execution="static")
    with EnsembleEngine(config) as engine:
        params = SamplingParams(max_tokens=60)
        assert_equals_naive(engine.config, local_members(engine), MESSAGES, params, rounds=4)
    assert set(taken) == {2}
