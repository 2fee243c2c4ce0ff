"""Attention of packed tokens over pages of slots: one operation for drafts, token trees and prompts of any answers.

All tokens of all answers lie in one row. A token sees the first slots of its answer (its linear prefix), and in the
answer's tail those that a mask names: its own ancestors in the token tree. Two versions of the operation exist: plain
torch, and a kernel in Triton for CUDA and ROCm, which splits the slots among many workers (FlashDecoding, Dao et al.
2023).

Symbols: T tokens, A answers, H heads, G heads of queries for each of the J heads of keys (H = G · J), D head size,
N slots of the arena, P pages of an answer, W slots of its tail.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch

from specfuse_shared.runtime.packed_layout import PAGE, Layout, Sight


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: Layout,
    sight: Sight,
    sinks: torch.Tensor | None = None,
    parts: int = 1,
) -> torch.Tensor:
    """Attention output (T, H, D of the values).

    Args:
        query: (T, H, D).
        keys: (N, J, D), the arena of one layer.
        values: (N, J, D of the values).
        layout: Where the tokens lie.
        sight: What the layer does besides.
        sinks: (H): logits that take part in each softmax without a value (gpt-oss).
        parts: Number of workers that share the slots of a run; a kernel's affair.
    """
    at = layout
    return torch.ops.specfuse.paged_attention(  # type: ignore[no-any-return]
        query, keys, values, at.tokens, at.answers, at.pages, at.tail, at.tail_positions, at.blocks,
        at.longest, sinks, sight.scale, sight.cap, sight.window, sight.chunk, parts,
    )  # fmt: skip


@torch.library.custom_op("specfuse::paged_attention", mutates_args=())
def _operation(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tokens: torch.Tensor,
    answers: torch.Tensor,
    pages: torch.Tensor,
    tail: torch.Tensor,
    tail_positions: torch.Tensor,
    blocks: torch.Tensor,
    longest: int,
    sinks: torch.Tensor | None,
    scale: float,
    cap: float,
    window: int,
    chunk: int,
    parts: int,
) -> torch.Tensor:
    layout = Layout(tokens, answers, pages, tail, tail_positions, blocks, longest)
    sight = Sight(scale, cap, window, chunk)
    if query.device.type == "cuda" and has_kernel():
        from specfuse_shared.runtime.paged_kernel import attend

        return attend(query, keys, values, layout, sight, sinks, parts)
    return plain(query, keys, values, layout, sight, sinks)


@_operation.register_fake
def _(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *rest: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], values.shape[-1])


@cache
def has_kernel() -> bool:
    """Whether Triton is installed, which comes with torch for CUDA and ROCm on Linux."""
    return importlib.util.find_spec("triton") is not None


def seen(layout: Layout, sight: Sight, token: int, count: int) -> torch.Tensor:
    """Which slots (count, K) of their answer the `count` tokens from `token` on see; K slots are in use."""
    rows = layout.tokens[token : token + count].long()
    answer = int(rows[0, 0])
    base, total = (int(n) for n in layout.answers[answer])
    slots = torch.arange(total, device=rows.device)
    in_tail = (slots - base).clamp(min=0, max=layout.tail.shape[1] - 1)
    positions = torch.where(slots < base, slots, layout.tail_positions[answer, in_tail].long())
    visible = slots[None] < rows[:, 1:2]
    visible |= (slots >= base)[None] & layout.tail[token : token + count][:, in_tail].bool()
    if sight.window:
        visible &= rows[:, 2:3] - positions[None] < sight.window
    if sight.chunk:
        visible &= rows[:, 2:3] // sight.chunk == positions[None] // sight.chunk
    return visible


def plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: Layout,
    sight: Sight,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operation in plain torch, answer by answer, in the precision of the model; waits for the device."""
    output = query.new_zeros(*query.shape[:2], values.shape[-1])
    for first, count in _runs(layout.tokens[:, 0].tolist()):
        answer = int(layout.tokens[first, 0])
        total = int(layout.answers[answer, 1])
        places = torch.arange(total, device=query.device)
        slots = layout.pages[answer, places // PAGE].long() * PAGE + places % PAGE
        own_keys, own_values = keys.index_select(0, slots), values.index_select(0, slots)
        groups = query.shape[1] // keys.shape[1]
        rows = query[first : first + count].unflatten(1, (keys.shape[1], groups))
        scores = torch.einsum("tjgd,kjd->jgtk", rows, own_keys) * sight.scale
        if sight.cap:
            scores = sight.cap * torch.tanh(scores / sight.cap)
        hidden = ~seen(layout, sight, first, count)
        scores = scores.float().masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sunk = sinks.float().view(keys.shape[1], groups, 1, 1).expand(-1, -1, count, -1)
            shares = torch.cat([scores, sunk], dim=-1).softmax(-1)[..., :-1]
        else:
            shares = scores.softmax(-1)
        output[first : first + count] = torch.einsum("jgtk,kjd->tjgd", shares.to(own_values.dtype), own_values).flatten(
            1, 2
        )
    return output


def _runs(answers: list[int]) -> list[tuple[int, int]]:
    """Runs of tokens of one answer: the first token and their number; padding has none."""
    runs: list[tuple[int, int]] = []
    for token, answer in enumerate(answers):
        if answer < 0:
            continue
        if runs and token and answers[token - 1] == answer:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((token, 1))
    return runs


def parts_for(tokens: int, slots: int) -> int:
    """Number of workers that share the slots of a run of tokens: few tokens leave most of a card idle otherwise.

    Measured on an H200 behind 512 slots: 16 for one token, 8 up to 8, 4 up to 64, then 1 (4 behind 4,096).
    """
    if tokens > 64:
        return 4 if slots > 4096 else 1
    return 16 if tokens == 1 else 8 if tokens <= 8 else 4
