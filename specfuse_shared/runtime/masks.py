"""Which slots the layers of an architecture see, and how a model takes its masks.

Symbols: Q queries, K slots, position = place in the token sequence (≠ slot once a tree is cached).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

KINDS: tuple[str, ...] = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """How a model takes its masks: one for all layers, or a mapping by layer kind (`as_mapping`)."""

    kinds: tuple[str, ...]
    as_mapping: bool
    window: int | None = None
    chunk: int | None = None

    def restrict(self, kind: str, visible: torch.Tensor, query_at: torch.Tensor, key_at: torch.Tensor) -> torch.Tensor:
        """`visible` (…, Q, K) without what layers of this kind never see; places of queries (…, Q) and slots (…, K)."""
        queries, keys = query_at[..., :, None], key_at[..., None, :]
        if kind == "sliding_attention" and self.window is not None and key_at.shape[-1] > self.window:
            return visible & (queries - keys < self.window)
        if kind == "chunked_attention" and self.chunk is not None and key_at.shape[-1] > self.chunk:
            return visible & (queries // self.chunk == keys // self.chunk)
        return visible

    def is_plain(self, kind: str, slots: int) -> bool:
        """Whether layers of this kind see everything before a query, among so many slots."""
        reach = {"sliding_attention": self.window, "chunked_attention": self.chunk}.get(kind)
        return reach is None or slots <= reach

    def markers(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor | dict[str, torch.Tensor]:
        """What the model is given as masks: empty ones whose last dimension tells the attention which kind it is."""
        made = {k: torch.zeros(1, 1, 1, n + 1, device=device, dtype=dtype) for n, k in enumerate(self.kinds)}
        return made if self.as_mapping else made[self.kinds[0]]


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


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where `visible`, else half the smallest number: kernels multiply it by log₂ e, which must stay finite."""
    hidden = torch.finfo(dtype).min / 2
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, hidden)
