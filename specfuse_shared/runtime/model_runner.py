"""Forward passes of one causal language model: a batch of segments, a plain step. No text, no policy.

Some models' rotary frequencies depend on the length of the text (longrope: Phi-3 and others). The library picks one set
of frequencies for a whole forward pass, by its largest position. So answers on either side of the limit run in separate
passes, and a text that is, or will be, beyond it is read with the long set from its first token on.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specfuse_shared.runtime.attention import Batch, ForwardInput, MaskPlan, running
from specfuse_shared.runtime.cuda_graphs import Graphs
from specfuse_shared.runtime.cuda_streams import ModelStream
from specfuse_shared.runtime.kv_cache import CachePool, Layer, PrefixCache, Row
from specfuse_shared.runtime.mps import is_mps, piece_on_mps
from specfuse_shared.runtime.packed_steps import PackedRunner
from specfuse_shared.runtime.pages import PageArena, PagedRow
from specfuse_shared.runtime.sampler import upload

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

    def outgrown(self, row: Row, tokens: int) -> bool:
        """Whether a text of this length needs the long set for the first time: then `row` is marked."""
        if self.limit is None or row.reach > self.limit or tokens <= self.limit:
            return False
        row.reach = self.limit + 1
        return True

    def is_long(self, segment: ForwardInput) -> bool:
        return self.limit is not None and max(segment.row.reach, segment.slots) > self.limit

    def apart(self, segments: Sequence[ForwardInput]) -> Iterator[tuple[bool, list[int]]]:
        """The side, and which of the segments are on it."""
        for side in (False, True):
            numbers = [n for n, segment in enumerate(segments) if self.is_long(segment) == side]
            if numbers:
                yield side, numbers

    @contextmanager
    def on(self, long: bool) -> Iterator[None]:
        """In this context, forward passes use the long set for all positions, if `long`."""
        for parameters in self._parameters if long else ():
            parameters[_LIMIT] = 0
        try:
            yield
        finally:
            for parameters in self._parameters if long else ():
                parameters[_LIMIT] = self.limit


class Room(Protocol):
    """Where answers have their caches; `reclaim_memory` gives back something that only saves time, if there is any."""

    reclaim_memory: Callable[[], bool]


class Reclaimable(Protocol):
    """A model's runner as seen by runners that share its memory."""

    @property
    def pool(self) -> Room: ...

    def free_spare(self) -> bool:
        """Free what is quickly rebuilt: remembered prefixes; whether there was any."""
        ...

    def drop_steps(self) -> bool:
        """Free captured steps; whether there were any."""
        ...


_CACHE_ARGUMENTS = ("past_key_values", "cache", "cache_params")
"""Names of the cache in a model's forward: up to transformers 5.23, from 5.24 on, and of recurrent models."""


class ModelForward:
    """A model's own call, over tokens in a row."""

    def __init__(self, model: Any) -> None:
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        self.can_skip_logits = "logits_to_keep" in parameters
        self.cache_argument = next((name for name in _CACHE_ARGUMENTS if name in parameters), "")
        self._takes_positions = "position_ids" in parameters

    def __call__(self, ids: torch.Tensor, cache: Any, at: torch.Tensor, mask: Any, **options: Any) -> torch.Tensor:
        """Logits (Q, V) of tokens `ids` (Q) at positions `at` (Q)."""
        if not self.cache_argument:
            raise TypeError(f"{type(self.model).__name__} takes no cache")
        inputs = {"input_ids": ids[None], self.cache_argument: cache}
        if self._takes_positions:
            inputs["position_ids"] = at[None]
        if mask is not None:
            inputs["attention_mask"] = mask
        return torch.as_tensor(self.model(**inputs, use_cache=True, **options).logits[0])


class ModelRunner:
    """Runs `model` (a causal LM in eval mode); `pool` holds the caches of all its answers, `prefixes` what
    earlier answers left. On a GPU shared with other models, callers use its `stream`.

    `plan` None: the model cannot score a token tree in one forward pass. `one_by_one`: its cache takes a single token
    at a time (Mamba), so `append` feeds them one by one. `slots`: the size of a slot of its cache, if known. `graphs`:
    use packed steps over `pages` pages, captured by these. `stream`: its stream; a new one by default.
    """

    def __init__(
        self,
        model: Any,
        plan: MaskPlan | None = None,
        one_by_one: bool = False,
        slots: Mapping[int, Layer] | None = None,
        graphs: Graphs | None = None,
        stream: ModelStream | None = None,
        pages: int = 0,
    ) -> None:
        self.model = model
        self.plan = plan
        self._one_by_one = one_by_one
        self.device = model_home(model)
        self.dtype = model.dtype
        self.stream = stream or ModelStream(self.device)
        self._slots = dict(slots or {})
        self.pool: CachePool | PageArena = CachePool(self.device, slots)
        self.prefixes = PrefixCache()
        self._forward = ModelForward(model)
        self.longrope = LongRope(model)
        self.reports_argmax = self.device.type != "cpu"
        self.dynamic = 0
        """Number of dynamic forward passes."""
        self.packed: PackedRunner | None = None
        self.captured_bytes = 0
        """Bytes that steps took when they were captured at load."""
        self._graphs = graphs
        if plan is not None and graphs is not None:
            self.open_arena(pages)
        share_memory([self])

    @property
    def is_paged(self) -> bool:
        """Whether answers are held in pages, which `open_arena` makes."""
        return self.packed is not None

    def open_arena(self, pages: int) -> None:
        """Hold answers in this number of pages, and run packed steps over them; no answer runs yet."""
        plan, graphs = self.plan, self._graphs
        assert plan is not None
        assert graphs is not None
        graphs.drop()
        self.captured_bytes = 0
        arena = PageArena(self._slots, pages)
        arena.reclaim_pages = self.prefixes.drop_oldest
        text = self.model.config.get_text_config(decoder=True)
        groups = getattr(text, "num_attention_heads", 1) // min(keys.shape[1] for keys, _ in self._slots.values())
        most_pages = arena.pages_of(getattr(text, "max_position_embeddings", None) or 0) or pages
        self.pool, before = arena, self.packed
        self.packed = PackedRunner(
            self._forward,
            plan,
            self.device,
            self.dtype,
            graphs,
            arena,
            max(1, groups),
            self._forward.can_skip_logits,
            most_pages,
        )
        if before is not None:
            self.packed.replayed, self.packed.ran = before.replayed, before.ran

    def keep_last(self, count: int) -> dict[str, int]:
        """Arguments that spare the vocabulary projection of all but the last `count` tokens, where the model can."""
        return {"logits_to_keep": count} if self._forward.can_skip_logits else {}

    def step(self, segments: Sequence[ForwardInput]) -> list[torch.Tensor]:
        """Feed every segment in one forward pass; returns logits (last tokens, V) of each. Their rows then hold the new
        tokens."""
        assert self.plan is not None, "a model without a mask plan runs row by row"
        for segment in segments:
            segment.row.reserve(segment.slots)
        logits = self.packed.step(segments) if self.packed is not None else self._apart(segments, self.plan)
        for segment in segments:
            segment.row.used = segment.slots
        return logits

    def _apart(self, segments: Sequence[ForwardInput], plan: MaskPlan) -> list[torch.Tensor]:
        logits: dict[int, torch.Tensor] = {}
        for side, numbers in self.longrope.apart(segments):
            with self.longrope.on(side):
                logits |= zip(numbers, self._dynamic_step([segments[n] for n in numbers], plan), strict=True)
        return [logits[n] for n in range(len(segments))]

    @property
    def forwards(self) -> dict[str, int]:
        """How many were replayed, ran as packed steps without a graph, and ran as they came."""
        packed = self.packed
        return {
            "replayed": packed.replayed if packed else 0,
            "packed": packed.ran if packed else 0,
            "dynamic": self.dynamic,
        }

    def _dynamic_step(self, segments: Sequence[ForwardInput], plan: MaskPlan) -> list[torch.Tensor]:
        self.dynamic += 1
        batch = Batch(segments, plan, self.device, self.dtype)
        at = np.concatenate([s.slot_positions()[-len(s.ids) :] for s in batch.segments])
        ids = [token for s in batch.segments for token in s.ids]
        logit_rows: list[int] = []
        ends = 0
        for segment in batch.segments:
            ends += len(segment.ids)
            logit_rows += range(ends - segment.logit_count, ends)
        skip: dict[str, Any] = {}
        if self._forward.can_skip_logits and len(logit_rows) < len(ids):
            skip = {"logits_to_keep": upload(logit_rows, self.device)}
        with running(batch):
            markers = plan.markers(self.device, self.dtype)
            logits = self._forward(upload(ids, self.device), batch, upload(at, self.device), markers, **skip)
        if len(logits) > len(logit_rows):
            logits = logits.index_select(0, upload(logit_rows, self.device))
        by_segment = dict(zip(batch.order, torch.split(logits, [s.logit_count for s in batch.segments]), strict=True))
        return [by_segment[n] for n in range(len(segments))]

    def append(self, ids: Sequence[int], cache: Any, start: int) -> torch.Tensor:
        """Feed tokens in a row after a cache of `start` tokens, with the model's own masks; logits (Q, V)."""
        at = torch.arange(start, start + len(ids), device=self.device)
        tokens, size = upload(ids, self.device), 1 if self._one_by_one else len(ids)
        pieces = list(zip(torch.split(tokens, size), torch.split(at, size), strict=True))
        self.dynamic += len(pieces)
        return torch.cat([self._forward(piece, cache, place, None) for piece, place in pieces])

    def plain(self, ids: Sequence[int], last: int | None = None) -> torch.Tensor:
        """The model's own forward over a whole sequence, without a cache; logits (Q, V), or (`last`, V) of its end."""
        keep = {} if last is None else self.keep_last(last)
        out = self.model(input_ids=torch.tensor([list(ids)], device=self.device), use_cache=False, **keep)
        return torch.as_tensor(out.logits[0, -last:] if last else out.logits[0])

    def new_cache(self, ids: Sequence[int]) -> tuple[torch.Tensor, Any]:
        """Feed a prompt into the cache that the model makes for itself; logits (V) after it, and that cache."""
        inputs = torch.tensor([list(ids)], device=self.device)
        out = self.model(input_ids=inputs, use_cache=True, **self.keep_last(1))
        return out.logits[0, -1], out[self._forward.cache_argument]

    def piece(self, size: int, used: int) -> int:
        """Number of prompt tokens, at most `size`, for one forward pass after `used` slots."""
        if not is_mps(self.device):
            return size
        heads = getattr(self.model.config.get_text_config(decoder=True), "num_attention_heads", 1)
        return piece_on_mps(size, used, heads)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the steps of a lone answer's drafts and usual verifications, for which it would have to wait."""
        if self.packed is None or self.packed.graphs.reason is not None:
            return
        with self.stream.entered():
            row = self.pool.row(1)
            assert isinstance(row, PagedRow)
            try:
                self.step([ForwardInput(row, [0])])
                self.packed.warm_up(row)
            finally:
                row.free()
        self.stream.wait()

    @property
    def reserve_bytes(self) -> int:
        """Memory besides caches that its forward passes may still allocate."""
        text, packed = self.model.config.get_text_config(decoder=True), self.packed
        graphs = packed.reserve_bytes(text.hidden_size, text.vocab_size) if packed is not None else 0
        return max(0, graphs - self.captured_bytes) + self.stream.reserve_bytes

    def free_spare(self) -> bool:
        had = self.prefixes.memory_bytes > 0
        self.prefixes.shrink()
        return had

    def drop_steps(self) -> bool:
        if self.packed is None:
            return False
        self.stream.wait()  # finish pending work first: the memory may go to a model on another stream
        return self.packed.drop()


def share_memory(runners: Sequence[Reclaimable]) -> None:
    """Let each runner of a device free memory for any other.

    Memory that is quickly rebuilt goes first, then the captured steps of one model, which may suffice.
    """
    references = [weakref.ref(runner) for runner in runners]

    def reclaim_memory() -> bool:
        there = [runner for reference in references if (runner := reference()) is not None]
        freed = [runner.free_spare() for runner in there]
        return any(freed) or any(runner.drop_steps() for runner in there)

    for runner in runners:
        runner.pool.reclaim_memory = reclaim_memory


def model_home(model: Any) -> torch.device:
    """Where a model takes its input and gives its logits: its device, or the main one of several."""
    places = dict.fromkeys(getattr(model, "hf_device_map", {}).values())
    if len(places) < 2:
        return torch.device(model.device)
    return torch.device(next((place for place in places if place not in ("cpu", "disk")), "cpu"))
