"""Attention over given keys and values: the engine's own kernel, and the model's plain one."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.attention.bias import CausalBias
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_MOST_FOLDED_QUERIES = 128


def choose_kernels(device: torch.device) -> None:
    """Settings of the library for the whole process, where a member is on `device`.

    cuDNN's attention plans for every new shape, 0.4 s each on the cards where torch prefers it; every prompt is one.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


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
    if attention_mask is None or groups == 1 or queries > _MOST_FOLDED_QUERIES or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    out = scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], groups * queries, query.shape[-1]),
        key,
        value,
        attn_mask=attention_mask if queries == 1 else attention_mask.repeat(1, 1, groups, 1),
        scale=scaling,
    )
    return out.reshape(batch, heads, queries, value.shape[-1]).transpose(1, 2).contiguous(), None


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
