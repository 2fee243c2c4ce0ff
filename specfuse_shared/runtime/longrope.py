"""Models whose rotary frequencies depend on how long the text is (longrope: Phi-3 and others).

The library picks one set of frequencies for a whole forward, by its largest position. Answers on either side of the
limit therefore go apart, and a text that is, or is about to be, beyond it is read with the long set from its first
token on, as the model reads it in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specfuse_shared.runtime.attention import ForwardInput
from specfuse_shared.runtime.cache.blocks import CacheRow

_LIMIT = "original_max_position_embeddings"


class LongRope:
    """The two sets of frequencies of `model`; `limit`: tokens of the longest text that has the short ones."""

    def __init__(self, model: Any) -> None:
        self._parameters: list[dict[str, Any]] = []
        self.limit: int | None = None
        for module in model.modules():
            if getattr(module, "rope_type", None) != "longrope":
                continue
            parameters = module.config.rope_parameters
            self.limit = int(parameters[_LIMIT])
            long, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, module.inv_freq.device, seq_len=self.limit + 1)
            module.long_inv_freq = long
            self._parameters.append(parameters)

    def outgrown(self, row: CacheRow, tokens: int) -> bool:
        """Whether a text of so many tokens needs the long set for the first time: then `row` is marked."""
        if self.limit is None or row.reach > self.limit or tokens <= self.limit:
            return False
        row.reach = self.limit + 1
        return True

    def is_long(self, segment: ForwardInput) -> bool:
        return self.limit is not None and max(segment.row.reach, segment.slots) > self.limit

    def apart(self, segments: Sequence[ForwardInput]) -> Iterator[tuple[bool, list[int]]]:
        """The side, and which of the segments are on it."""
        for side in (False, True):
            own = [n for n, segment in enumerate(segments) if self.is_long(segment) == side]
            if own:
                yield side, own

    @contextmanager
    def on(self, long: bool) -> Iterator[None]:
        """While this lasts, forwards use the long set whatever their positions, if `long`."""
        for parameters in self._parameters if long else ():
            parameters[_LIMIT] = 0
        try:
            yield
        finally:
            for parameters in self._parameters if long else ():
                parameters[_LIMIT] = self.limit
