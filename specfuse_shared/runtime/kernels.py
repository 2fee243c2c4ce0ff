"""Attention over given keys and values: the engine's own kernel, and the model's plain one."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch.nn.attention.bias import CausalBias
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_MOST_FOLDED_QUERIES = 128
_WORKERS = {"cuda": 256}
"""Blocks of queries and heads that a device computes at once, about: with fewer, the slots are split among them."""
_FEWEST_SLOTS, _FEWEST_SLOTS_OF_A_PIECE = 1024, 128
_QUERIES_OF_A_WORKER = 64
_ALIGNED = 8
"""The library's kernels for devices want sizes of heads, and rows of a mask, that are a multiple of this."""


def choose_kernels(device: torch.device) -> None:
    """Settings of the library for the whole process, where a member is on `device`.

    cuDNN's attention plans for every new shape, 0.4 s each on the cards where torch prefers it; every prompt is one.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def masks_lower_right(device: torch.device) -> bool:
    """Whether a device is known to have a kernel for queries at the end of their keys that takes no mask.

    On a CPU there is none. On ROCm such kernels have masked from the upper left corner, and MPS was wrong or crashed
    with some lengths (pytorch #149132, #174861): these and all others get masks.
    """
    return device.type == "cuda" and torch.version.hip is None


def grouped_kernel(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention that never copies keys and values for grouped-query heads.

    Folds the G query heads of a key head into the query dimension: (B, H, Q, D) → (B, H/G, G·Q, D). Long queries
    (prefill) and plain causal calls go to the library's own function.
    """
    batch, heads, queries, _ = query.shape
    groups = heads // key.shape[1]
    if isinstance(attention_mask, CausalBias):
        out = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=groups > 1)
        return out.transpose(1, 2).contiguous(), None
    if attention_mask is None or queries > _MOST_FOLDED_QUERIES or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    pieces = _pieces(batch * key.shape[1], groups * queries, key)
    if groups == pieces == 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    folded = query.reshape(batch, key.shape[1], groups * queries, query.shape[-1])
    mask = attention_mask if queries == 1 else attention_mask.repeat(1, 1, groups, 1)
    if pieces > 1:
        out = split_attention(folded, key, value, mask, scaling, pieces)
    else:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, queries, value.shape[-1]).transpose(1, 2).contiguous(), None


def split_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    pieces: int,
) -> torch.Tensor:
    """Attention (B, H, Q, D) over equal pieces of the slots at once, for few queries behind many slots.

    A masked kernel goes through all K slots in turn for each head of each answer, which leaves most of a large card
    idle. Here each piece s gives its output o_s and the logarithm l_s of its sum of exponentials, and the whole is
    Σ_s softmax_s(l) o_s (FlashDecoding, Dao et al. 2023). `query` (B, H, Q, D), `key` and `value` (B, H, K, D) without
    gaps, `mask` (B, 1, 1 or Q, K) additive and finite.
    """
    batch, heads, queries, size = query.shape
    slots = key.shape[2] // pieces
    keys, values = (t.view(batch * heads, pieces, slots, t.shape[-1]) for t in (key, value))
    asked = query.reshape(batch * heads, 1, queries, size).expand(-1, pieces, -1, -1)
    bias = mask.reshape(*mask.shape[:3], pieces, slots).transpose(2, 3).expand(-1, heads, -1, -1, -1)
    bias = bias.reshape(batch * heads, pieces, mask.shape[2], slots).expand(-1, -1, queries, -1)
    out, logs = _WITH_LOGS[query.device.type](asked, keys, values, bias, scaling)
    shares = logs[:, :, :queries].softmax(1)
    return (out * shares[..., None]).sum(1).to(query.dtype).view(batch, heads, queries, -1)


def _pieces(heads: int, queries: int, key: torch.Tensor) -> int:
    """Into how many pieces the slots are split for so many heads of all answers, and queries of each; 1: not at all."""
    slots, most = key.shape[2], _WORKERS.get(key.device.type, 0)
    busy, pieces = heads * -(-queries // _QUERIES_OF_A_WORKER), 1
    fits = slots >= _FEWEST_SLOTS and key.shape[-1] % _ALIGNED == 0 and key.is_contiguous()
    if not fits or not _gives_logs(key.device, key.dtype):
        return 1
    while 2 * pieces * busy <= most and _splits(slots, 2 * pieces):
        pieces *= 2
    return pieces


def _splits(slots: int, pieces: int) -> bool:
    """Whether each piece is long enough, and its mask begins where the library's kernels want it."""
    return slots % (pieces * _ALIGNED) == 0 and slots >= pieces * _FEWEST_SLOTS_OF_A_PIECE


def _on_cuda(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, scale=scaling)
    return found[0], found[1]


def _on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask, scale=scaling)
    return found[0], found[1]


_WITH_LOGS = {"cuda": _on_cuda, "cpu": _on_cpu}
"""Attention of the library that also gives the logarithms of the sums (B, H, Q or more)."""
_OLDEST = {torch.float32: (7, 0), torch.float16: (7, 0), torch.bfloat16: (8, 0)}
"""The compute capability from which on CUDA devices have such a kernel for these numbers."""


@cache
def _gives_logs(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda":
        return device.type in _WITH_LOGS
    if torch.version.hip is not None or dtype not in _OLDEST:
        return False
    return torch.cuda.get_device_capability(device) >= _OLDEST[dtype]


def eager_kernel(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """The model's own plain attention (soft caps, attention sinks), which always wants a mask."""
    if attention_mask is None or isinstance(attention_mask, CausalBias):
        queries, slots = query.shape[2], key.shape[2]
        hidden = torch.ones(queries, slots, dtype=torch.bool, device=query.device).triu(1 + slots - queries)
        attention_mask = query.new_zeros(1, 1, queries, slots).masked_fill_(hidden, torch.finfo(query.dtype).min)
    own = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    found: tuple[torch.Tensor, Any] = own(module, query, key, value, attention_mask, **kwargs)
    return found
