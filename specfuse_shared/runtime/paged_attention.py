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

from specfuse_shared.runtime.packed_layout import PAGE, Layout, Run, Sight


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
        parts: Number of workers that share the slots of a run; only the kernel uses it.
    """
    if layout.runs is not None and not uses_kernel(query.device):
        return plain(query, keys, values, layout, sight, sinks)
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
    if uses_kernel(query.device):
        from specfuse_shared.runtime.paged_kernel import attend

        with torch.cuda.device(query.device):  # Triton launches on the current device
            return attend(query, keys, values, layout, sight, sinks, parts)
    return plain(query, keys, values, layout, sight, sinks)


@_operation.register_fake
def _(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *rest: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], values.shape[-1])


def uses_kernel(device: torch.device) -> bool:
    """Whether the kernel runs on a device."""
    return device.type == "cuda" and has_kernel()


@cache
def has_kernel() -> bool:
    """Whether Triton is installed, which may still be unable to compile. It comes with torch on Linux."""
    return importlib.util.find_spec("triton") is not None


_EXACT_SHAPES = {"cpu"}
"""Devices without a cost for each new shape. On others, numbers of tokens and slots are rounded up."""
_FEWEST_SLOTS = 256


def plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: Layout,
    sight: Sight,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operation in plain torch, answer by answer, in the precision of the model."""
    output = query.new_zeros(*query.shape[:2], values.shape[-1])
    for run in layout.runs if layout.runs is not None else _runs(layout):
        answer, count = run.answer, run.tokens
        tokens, slots = _rounded(run, layout)
        at = torch.arange(slots, device=query.device)
        places = layout.pages[answer].index_select(0, at // PAGE).long() * PAGE + at % PAGE
        # a slot that is not in use may hold NaN of an earlier answer, and 0 · NaN is NaN
        unused = (at >= layout.answers[answer, 1])[:, None, None]
        own_keys = keys.index_select(0, places)
        own_values = values.index_select(0, places).masked_fill(unused, 0.0)
        groups = query.shape[1] // keys.shape[1]
        own_tokens = _padded(query[run.first : run.first + count], tokens)
        rows = own_tokens.unflatten(1, (keys.shape[1], groups))
        scores = torch.einsum("tjgd,kjd->jgtk", rows, own_keys) * sight.scale
        if sight.cap:
            scores = sight.cap * torch.tanh(scores / sight.cap)
        hidden = ~seen(layout, sight, run, tokens, slots)
        scores = scores.float().masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sunk = sinks.float().view(keys.shape[1], groups, 1, 1).expand(-1, -1, tokens, -1)
            shares = torch.cat([scores, sunk], dim=-1).softmax(-1)[..., :-1]
        else:
            shares = scores.softmax(-1)
        attended = torch.einsum("jgtk,kjd->tjgd", shares.to(own_values.dtype), own_values).flatten(1, 2)
        output[run.first : run.first + count] = attended[:count]
    return output


def seen(layout: Layout, sight: Sight, run: Run, tokens: int, slots: int) -> torch.Tensor:
    """Which slots (`tokens`, `slots`) of their answer the tokens of a run see. Further tokens see what the last does,
    and none sees slots that are not in use."""
    rows = _padded(layout.tokens[run.first : run.first + run.tokens], tokens).long()
    tail = _padded(layout.tail[run.first : run.first + run.tokens], tokens)
    base, answer = layout.answers[run.answer, 0], run.answer
    at = torch.arange(slots, device=rows.device)
    in_tail = (at - base).clamp(min=0, max=tail.shape[1] - 1)
    positions = torch.where(at < base, at, layout.tail_positions[answer].index_select(0, in_tail).long())
    visible = at[None] < rows[:, 1:2]
    is_tail = (at >= base) & (at < layout.answers[answer, 1])
    visible |= is_tail[None] & tail.index_select(1, in_tail).bool()
    if sight.window:
        visible &= rows[:, 2:3] - positions[None] < sight.window
    if sight.chunk:
        visible &= rows[:, 2:3] // sight.chunk == positions[None] // sight.chunk
    return visible


def _rounded(run: Run, layout: Layout) -> tuple[int, int]:
    """Numbers of tokens and slots to compute for a run."""
    if layout.pages.device.type in _EXACT_SHAPES:
        return run.tokens, run.slots
    slots = max(_FEWEST_SLOTS, 1 << (run.slots - 1).bit_length())
    return 1 << (run.tokens - 1).bit_length(), min(slots, layout.pages.shape[1] * PAGE)


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """`count` rows: the last one is repeated."""
    missing = count - len(rows)
    return rows if not missing else torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])])


def _runs(layout: Layout) -> list[Run]:
    """Runs of tokens of one answer, without padding, as the device has them."""
    answers = layout.tokens[:, 0].tolist()
    slots = layout.answers[:, 1].tolist()
    runs: list[Run] = []
    for token, answer in enumerate(answers):
        if answer < 0:
            continue
        if runs and token and answers[token - 1] == answer:
            runs[-1] = runs[-1]._replace(tokens=runs[-1].tokens + 1)
        else:
            runs.append(Run(token, 1, answer, slots[answer]))
    return runs


def parts_for(tokens: int, slots: int) -> int:
    """Number of workers that share the slots of a run of tokens: few tokens leave most of a card idle otherwise.

    Measured on an H200 after 512 slots: 16 for one token, 8 up to 8, 4 up to 64, then 1 (4 after 4,096).
    """
    if tokens > 64:
        return 4 if slots > 4096 else 1
    return 16 if tokens == 1 else 8 if tokens <= 8 else 4
