"""A key/value cache of one answer that grows in place and keeps any chosen slots."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

_STEP = 256


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # of the library's class hook
    """One layer's keys and values in a buffer (B, H, capacity, D); `keys`/`values` are views of its used part."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.used = 0
        self._key_buffer = _room(key_states, 0)
        self._value_buffer = _room(value_states, 0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.used, self.used + key_states.shape[-2]
        self._reserve(key_states, value_states, end)
        self._key_buffer[:, :, start:end] = key_states
        self._value_buffer[:, :, start:end] = value_states
        return self._use(end)

    def keep(self, prefix: int, slots: torch.Tensor) -> None:
        """Keep the first `prefix` slots, then `slots` (ascending, none below `prefix`), and drop the rest."""
        end = prefix + slots.numel()
        for buffer in (self._key_buffer, self._value_buffer):
            buffer[:, :, prefix:end] = buffer.index_select(2, slots)
        self._use(end)

    def _reserve(self, keys: torch.Tensor, values: torch.Tensor, size: int) -> None:
        if size <= self._key_buffer.shape[-2]:
            return
        room = max(size, self.used + self.used // 4)
        for name, like in (("_key_buffer", keys), ("_value_buffer", values)):
            grown = _room(like, room)
            grown[:, :, : self.used] = getattr(self, name)[:, :, : self.used]
            setattr(self, name, grown)

    def _use(self, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        views = self._key_buffer[:, :, :used], self._value_buffer[:, :, :used]
        self.used, (self.keys, self.values) = used, views
        return views


class GrowingCache(Cache):
    """A cache of `GrowingLayer`s, made as the model's layers first write to it."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)

    def keep(self, prefix: int, slots: list[int]) -> None:
        """In every layer keep the first `prefix` slots and then `slots`; one copy of the kept rows a layer."""
        for layer in self.layers:
            if isinstance(layer, GrowingLayer) and layer.is_initialized:
                layer.keep(prefix, torch.tensor(slots, dtype=torch.long, device=layer.device))


def _room(like: torch.Tensor, size: int) -> torch.Tensor:
    capacity = -(-size // _STEP) * _STEP
    return like.new_empty((*like.shape[:2], capacity, like.shape[-1]))
