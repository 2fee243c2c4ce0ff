"""Attention over a cached context and a token tree: which slot a query may see, and a fast kernel call for it.

Symbols: Q queries, K cache slots, position = place in the token sequence (≠ slot once a tree is cached).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "specfuse_grouped_sdpa"
_MOST_FOLDED_QUERIES = 128

LayerKind = Literal["full_attention", "sliding_attention", "chunked_attention"]
KINDS: tuple[str, ...] = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """How a model takes its masks: one for all layers, or a mapping by layer kind (`as_mapping`)."""

    kinds: tuple[str, ...]
    as_mapping: bool
    window: int | None = None
    chunk: int | None = None

    def masks(
        self, visible: torch.Tensor, query_at: torch.Tensor, key_at: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks (1, 1, Q, K) from `visible` (Q, K) and the positions of queries (Q) and slots (K).

        Additive in the model's dtype, because eager attention misreads boolean masks.
        """
        by_kind = {kind: _additive(self._restrict(kind, visible, query_at, key_at), dtype) for kind in self.kinds}
        return by_kind if self.as_mapping else by_kind[self.kinds[0]]

    def _restrict(self, kind: str, visible: torch.Tensor, query_at: torch.Tensor, key_at: torch.Tensor) -> torch.Tensor:
        if kind == "sliding_attention" and self.window is not None and key_at.numel() > self.window:
            return visible & (query_at[:, None] - key_at[None, :] < self.window)
        if kind == "chunked_attention" and self.chunk is not None and key_at.numel() > self.chunk:
            return visible & (query_at[:, None] // self.chunk == key_at[None, :] // self.chunk)
        return visible


def plans_for(config: Any) -> list[MaskPlan]:
    """Mask plans worth probing for a text configuration, likeliest first; empty for recurrent architectures."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    kinds = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if any(kind not in KINDS for kind in kinds):
        return []
    single = [MaskPlan(("full_attention",), False)]
    if window is not None:
        single.insert(0, MaskPlan(("sliding_attention",), False, window))
    return [MaskPlan(kinds, True, window, chunk), *single] if kinds else single


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[None, None]


def grouped_attention(
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
    if attention_mask is None or groups == 1 or queries > _MOST_FOLDED_QUERIES or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    out = scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], groups * queries, query.shape[-1]),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, groups, 1),
        scale=scaling,
    )
    return out.reshape(batch, heads, queries, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
