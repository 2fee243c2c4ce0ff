"""`paged_attention` as a kernel in Triton. Its interpreter (TRITON_INTERPRET=1) runs it on a processor, for tests."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from specfuse_shared.runtime.packed_layout import PAGE, WORKER_ROWS, Layout, Sight

_SLOTS = 32
"""Slots of a worker's turn."""


@triton.jit
def _attend(
    Query, Keys, Values, Out, Peaks, Sums, Tokens, Answers, Pages, Tail, TailPositions, Blocks,
    scale, cap, window, chunk, pages_of, tail_width, query_stride, key_stride, value_stride,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr, VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr,
    PAGE: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """A run of tokens, one head of keys, one part of the slots: unnormalised output, peak and sum of exponentials."""
    block, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(Blocks + block * 2 + 1)
    if count > 0:
        first = tl.load(Blocks + block * 2)
        answer = tl.load(Tokens + first * 3)
        base = tl.load(Answers + answer * 2)
        total = tl.load(Answers + answer * 2 + 1)
        row = tl.arange(0, ROWS)
        size = tl.arange(0, SIZE_PADDED)
        value = tl.arange(0, VALUE_PADDED)
        turn = tl.arange(0, SLOTS)
        token = first + row // GROUPS
        query_head = head * GROUPS + row % GROUPS
        there = row // GROUPS < count
        prefix = tl.load(Tokens + token * 3 + 1, mask=there, other=0)
        position = tl.load(Tokens + token * 3 + 2, mask=there, other=0)
        query = tl.load(
            Query + token[:, None] * query_stride + query_head[:, None] * SIZE + size[None, :],
            mask=there[:, None] & (size < SIZE)[None, :],
            other=0.0,
        )
        each = tl.cdiv(tl.cdiv(total, SLOTS), PARTS) * SLOTS
        low = part * each
        high = tl.minimum(low + each, total)
        peak = tl.full([ROWS], -float("inf"), tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        summed = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
        for start in range(low, high, SLOTS):
            slot = start + turn
            used = slot < high
            page = tl.load(Pages + answer * pages_of + slot // PAGE, mask=used, other=0)
            place = page.to(tl.int64) * PAGE + slot % PAGE
            key = tl.load(
                Keys + place[None, :] * key_stride + head * SIZE + size[:, None],
                mask=used[None, :] & (size < SIZE)[:, None],
                other=0.0,
            )
            score = tl.dot(query, key, input_precision="ieee") * scale
            if CAPPED:
                score = cap * (2 / (1 + tl.exp(-2 * score / cap)) - 1)
            in_tree = slot >= base
            in_tail = used & in_tree
            named = tl.load(
                Tail + token[:, None] * tail_width + (slot - base)[None, :],
                mask=there[:, None] & in_tail[None, :],
                other=0,
            )
            tail_position = tl.load(TailPositions + answer * tail_width + slot - base, mask=in_tail, other=0)
            key_position = tl.where(in_tree, tail_position, slot)
            visible = used[None, :] & ((slot[None, :] < prefix[:, None]) | (named != 0))
            if window > 0:
                visible = visible & (position[:, None] - key_position[None, :] < window)
            if chunk > 0:
                visible = visible & (position[:, None] // chunk == key_position[None, :] // chunk)
            score = tl.where(visible, score, -float("inf"))
            higher = tl.maximum(peak, tl.max(score, 1))
            safe = tl.where(higher == -float("inf"), 0.0, higher)
            share = tl.exp(score - safe[:, None])
            fade = tl.exp(peak - safe)
            weight = weight * fade + tl.sum(share, 1)
            cached = tl.load(
                Values + place[:, None] * value_stride + head * VALUE + value[None, :],
                mask=used[:, None] & (value < VALUE)[None, :],
                other=0.0,
            )
            summed = summed * fade[:, None] + tl.dot(share.to(cached.dtype), cached, input_precision="ieee")
            peak = higher
        at = (token * (HEADS * GROUPS) + query_head) * PARTS + part
        tl.store(Out + at[:, None] * VALUE + value[None, :], summed, mask=there[:, None] & (value < VALUE)[None, :])
        tl.store(Peaks + at, peak, mask=there)
        tl.store(Sums + at, weight, mask=there)


@triton.jit
def _merge(
    Out, Peaks, Sums, Sinks, Merged,
    ALL_HEADS: tl.constexpr, VALUE: tl.constexpr, VALUE_PADDED: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The output of one token and head from its parts; zero where no part has a sum. NaN stays."""
    at = tl.program_id(0)
    part = tl.arange(0, PARTS)
    value = tl.arange(0, VALUE_PADDED)
    peak = tl.load(Peaks + at * PARTS + part)
    weight = tl.load(Sums + at * PARTS + part)
    peak = tl.where(weight != 0, peak, -float("inf"))
    top = tl.max(peak, 0)
    sink = -float("inf")
    if SINKS:
        sink = tl.load(Sinks + at % ALL_HEADS).to(tl.float32)
        top = tl.maximum(top, sink)
    safe = tl.where(top == -float("inf"), 0.0, top)
    fade = tl.where(weight != 0, tl.exp(peak - safe), 0.0)
    out = tl.load(
        Out + (at * PARTS + part)[:, None] * VALUE + value[None, :],
        mask=(weight != 0)[:, None] & (value < VALUE)[None, :],
        other=0.0,
    )
    whole = tl.sum(weight * fade, 0)
    if SINKS:
        whole += tl.exp(sink - safe)
    merged = tl.sum(out * fade[:, None], 0) / tl.where(whole != 0, whole, 1.0)
    tl.store(Merged + at * VALUE + value, merged.to(Merged.dtype.element_ty), mask=value < VALUE)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: Layout,
    sight: Sight,
    sinks: torch.Tensor | None,
    parts: int,
) -> torch.Tensor:
    """`paged_attention` by the kernel. A worker has a row for each token of the longest run and each of its heads of
    queries, which may be more in one layer than in another."""
    tokens, heads, size = query.shape
    key_heads, value = keys.shape[1], values.shape[-1]
    groups = heads // key_heads
    query = query.contiguous()
    out = query.new_empty(tokens * heads * parts, value, dtype=torch.float32)
    peaks = query.new_zeros(tokens * heads * parts, dtype=torch.float32)
    sums = query.new_zeros(tokens * heads * parts, dtype=torch.float32)
    merged = query.new_empty(tokens, heads, value)
    padded: dict[str, Any] = {
        "VALUE": value,
        "VALUE_PADDED": max(16, triton.next_power_of_2(value)),
        "PARTS": parts,
    }
    _attend[(len(layout.blocks), key_heads, parts)](
        query, keys, values, out, peaks, sums, layout.tokens, layout.answers, layout.pages, layout.tail,
        layout.tail_positions, layout.blocks, sight.scale, sight.cap, sight.window, sight.chunk,
        layout.pages.shape[1], layout.tail.shape[1], query.stride(0), keys.stride(0), values.stride(0),
        GROUPS=groups, SIZE=size, SIZE_PADDED=max(16, triton.next_power_of_2(size)),
        ROWS=max(WORKER_ROWS, triton.next_power_of_2(layout.longest * groups)),
        SLOTS=_SLOTS, HEADS=key_heads, PAGE=PAGE, CAPPED=sight.cap > 0, **padded,
    )  # fmt: skip
    _merge[(tokens * heads,)](
        out, peaks, sums, merged if sinks is None else sinks, merged, ALL_HEADS=heads, SINKS=sinks is not None, **padded
    )
    return merged
