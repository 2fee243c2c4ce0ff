"""Forward passes of one causal language model: prefill, a step over a token tree, a plain step. No text, no policy."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from specfuse_shared.attention import MaskPlan

PREFILL_CHUNK = 1024


class ModelRunner:
    """Runs `model` (a causal LM in eval mode).

    `plan` None: the model cannot score packed branches. `one_by_one`: its cache takes a single token at a time
    (Mamba), so `append` feeds them in turn.
    """

    def __init__(self, model: Any, plan: MaskPlan | None = None, one_by_one: bool = False) -> None:
        self.model, self.plan, self._one_by_one = model, plan, one_by_one
        self.device, self.dtype = model.device, model.dtype
        parameters = inspect.signature(model.forward).parameters
        self._can_skip_logits = "logits_to_keep" in parameters
        self._cache_argument = "past_key_values" if "past_key_values" in parameters else "cache_params"
        self._takes_positions = "position_ids" in parameters

    def keep_last(self, count: int) -> dict[str, int]:
        """Arguments that spare the vocabulary projection of all but the last `count` tokens, where the model can."""
        return {"logits_to_keep": count} if self._can_skip_logits else {}

    def prefill(self, ids: Sequence[int], cache: Any) -> torch.Tensor:
        """Feed a whole prompt in chunks; logits (V) after its last token."""
        logits = torch.empty(0)
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[start : start + PREFILL_CHUNK]
            mask = None
            if start:
                positions = torch.arange(start + len(chunk), device=self.device)
                visible = positions[None, :] <= positions[start:, None]
                mask = self._masks(visible, positions)
            at = torch.arange(start, start + len(chunk), device=self.device)
            logits = self._forward(chunk, cache, at, mask, **self.keep_last(1))[-1]
        return logits

    def step(self, ids: Sequence[int], visible: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        """Feed Q tokens behind a cache of K - Q slots; logits (Q, V).

        `visible` (Q, K): the slots each query sees, itself among them; `positions` (K): the place of each slot.
        """
        visible, positions = visible.to(self.device), positions.to(self.device)
        return self._forward(ids, cache, positions[-len(ids) :], self._masks(visible, positions))

    def append(self, ids: Sequence[int], cache: Any, start: int) -> torch.Tensor:
        """Feed tokens in a row behind a cache of `start` tokens, with the model's own masks; logits (Q, V)."""
        at = torch.arange(start, start + len(ids), device=self.device)
        if not self._one_by_one:
            return self._forward(ids, cache, at, None)
        return torch.cat([self._forward(ids[n : n + 1], cache, at[n : n + 1], None) for n in range(len(ids))])

    def plain(self, ids: Sequence[int]) -> torch.Tensor:
        """The model's own forward over a whole sequence, without a cache; logits (Q, V)."""
        out = self.model(input_ids=torch.tensor([list(ids)], device=self.device), use_cache=False)
        return torch.as_tensor(out.logits[0])

    def new_cache(self, ids: Sequence[int]) -> tuple[torch.Tensor, Any]:
        """Feed a prompt into the cache that the model makes for itself; logits (V) after it, and that cache."""
        inputs = torch.tensor([list(ids)], device=self.device)
        out = self.model(input_ids=inputs, use_cache=True, **self.keep_last(1))
        return out.logits[0, -1], out[self._cache_argument]

    def _masks(self, visible: torch.Tensor, positions: torch.Tensor) -> Any:
        assert self.plan is not None, "a model without a mask plan runs row by row"
        return self.plan.masks(visible, positions[-visible.shape[0] :], positions, self.dtype)

    def _forward(self, ids: Sequence[int], cache: Any, at: torch.Tensor, mask: Any, **options: Any) -> torch.Tensor:
        inputs = {"input_ids": torch.tensor([list(ids)], device=self.device), self._cache_argument: cache}
        if self._takes_positions:
            inputs["position_ids"] = at[None]
        if mask is not None:
            inputs["attention_mask"] = mask
        return torch.as_tensor(self.model(**inputs, use_cache=True, **options).logits[0])
