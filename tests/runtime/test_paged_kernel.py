"""The operation over pages: Triton's kernel, run by its interpreter on a processor, gives what plain torch gives.

Without Triton, or without TRITON_INTERPRET=1, only the plain version is tested; `.ci/run extras` has both.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from specfuse_shared.runtime.packed_layout import PAGE, Layout, Run, Sight
from specfuse_shared.runtime.paged_attention import paged_attention, parts_for, plain, seen

PARENTS = (-1, 0, 1, -1, 3, 0)
"""Of the token tree of the second answer."""
WIDTH = 16
TREE = Run(1, 6, 1, 27)
"""The tokens of that tree."""
INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


def layout(groups: int) -> Layout:
    """A draft after 37 slots, a token tree after 21 slots, a prompt of 9 tokens, and padding."""
    generator = torch.Generator().manual_seed(1)
    pages = (torch.randperm(63, generator=generator) + 1)[:24].view(3, 8).int()
    tokens, tail, positions = [(0, 38, 37)], [[0] * WIDTH], torch.zeros(3, WIDTH, dtype=torch.int32)
    for node in range(len(PARENTS)):
        line = [node]
        while PARENTS[line[-1]] >= 0:
            line.append(PARENTS[line[-1]])
        tokens.append((1, 21, 20 + len(line)))
        tail.append([int(n in line) for n in range(WIDTH)])
        positions[1, node] = 20 + len(line)
    tokens += [(2, n + 1, n) for n in range(9)] + [(-1, 0, 0)] * 3
    tail += [[0] * WIDTH] * 12
    each = max(1, 16 // groups)
    spans = ((0, 1), (1, 6), (7, 9))
    runs = [(start + n, min(each, count - n)) for start, count in spans for n in range(0, count, each)]
    runs += [(0, 0)] * (len(tokens) - len(runs))
    answers = torch.tensor([[38, 38], [21, 27], [9, 9]], dtype=torch.int32)
    as_tensor = torch.tensor
    return Layout(
        as_tensor(tokens, dtype=torch.int32),
        answers,
        pages,
        as_tensor(tail, dtype=torch.uint8),
        positions,
        as_tensor(runs, dtype=torch.int32),
        each,
    )


def arena(key_heads: int, size: int, value: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(64 * PAGE, key_heads, n, generator=generator) for n in (size, value))  # type: ignore[return-value]


def queries(heads: int, size: int, tokens: int) -> torch.Tensor:
    return torch.randn(tokens, heads, size, generator=torch.Generator().manual_seed(3))


def test_the_plain_version_equals_the_librarys_attention_over_visible_slots() -> None:
    at, (keys, values) = layout(4), arena(2, 64, 64)
    query = queries(8, 64, len(at.tokens))
    result = paged_attention(query, keys, values, at, Sight(0.125))
    for first, count, answer in ((0, 1, 0), (1, 6, 1), (7, 9, 2)):
        total = int(at.answers[answer, 1])
        slots = [int(at.pages[answer, n // PAGE]) * PAGE + n % PAGE for n in range(total)]
        expected = scaled_dot_product_attention(
            query[first : first + count].transpose(0, 1)[None],
            keys[slots].transpose(0, 1)[None],
            values[slots].transpose(0, 1)[None],
            attn_mask=seen(at, Sight(0.125), Run(first, count, answer, total), count, total),
            enable_gqa=True,
        )[0].transpose(0, 1)
        torch.testing.assert_close(result[first : first + count], expected)
    assert not result[16:].any(), "padding has no output"


def test_a_token_of_a_tree_attends_to_the_text_before_it_and_its_own_branch() -> None:
    visible = seen(layout(4), Sight(1.0), TREE, 6, 27)
    assert visible[:, :21].all()
    assert visible[:, 21:].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [1, 0, 0, 0, 0, 1],
    ]
    window = seen(layout(4), Sight(1.0, window=3), TREE, 6, 27)
    assert window[2].nonzero().flatten().tolist() == [21, 22, 23], "positions 21 to 23"
    assert window[5].nonzero().flatten().tolist() == [20, 21, 26], "positions 20, 21 and 22"
    chunk = seen(layout(4), Sight(1.0, chunk=11), TREE, 6, 27)
    assert chunk[1].nonzero().flatten().tolist() == [22], "position 22 begins a chunk"


def test_slots_of_few_tokens_are_divided_among_more_workers() -> None:
    assert [parts_for(n, 512) for n in (1, 8, 64, 65)] == [16, 8, 4, 1]
    assert parts_for(1600, 8192) == 4


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
@pytest.mark.parametrize("parts", [1, 4, 16])
@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "value", "sight", "has_sinks"),
    [
        (8, 2, 64, 64, Sight(0.125), False),
        (8, 8, 64, 64, Sight(0.125), False),
        (4, 1, 128, 128, Sight(0.09), False),
        (8, 2, 96, 96, Sight(0.1), False),
        (8, 2, 256, 256, Sight(0.06, cap=30.0), False),
        (8, 2, 64, 64, Sight(0.125, window=12), False),
        (8, 2, 64, 64, Sight(0.125, chunk=8), False),
        (8, 4, 64, 64, Sight(0.125), True),
        (8, 4, 64, 64, Sight(0.125, cap=5.0, window=12), True),
        (14, 2, 64, 64, Sight(0.125), False),
        (4, 2, 48, 32, Sight(0.14), False),
        (24, 1, 64, 64, Sight(0.125), True),
    ],
)
def test_the_kernel_equals_plain_torch(
    heads: int, key_heads: int, size: int, value: int, sight: Sight, has_sinks: bool, parts: int
) -> None:
    from specfuse_shared.runtime.paged_kernel import attend

    at, (keys, values) = layout(heads // key_heads), arena(key_heads, size, value)
    query = queries(heads, size, len(at.tokens))
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(4)) if has_sinks else None
    expected = plain(query, keys, values, at, sight, sinks)
    torch.testing.assert_close(attend(query, keys, values, at, sight, sinks, parts), expected, atol=1e-5, rtol=1e-4)
    half = replace(sight, window=2)
    torch.testing.assert_close(
        attend(query, keys, values, at, half, sinks, parts),
        plain(query, keys, values, at, half, sinks),
        atol=1e-5,
        rtol=1e-4,
    )


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
def test_the_kernel_supports_more_query_heads_than_the_runs_were_sized_for() -> None:
    from specfuse_shared.runtime.paged_kernel import attend

    at, (keys, values) = layout(2), arena(1, 64, 64)
    query = queries(12, 64, len(at.tokens))
    torch.testing.assert_close(
        attend(query, keys, values, at, Sight(0.125), None, 4),
        plain(query, keys, values, at, Sight(0.125)),
        atol=1e-5,
        rtol=1e-4,
    )
