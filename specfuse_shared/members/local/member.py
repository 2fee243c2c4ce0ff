"""A member in this process: a causal language model of transformers."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from specfuse_shared.loading.gguf import OnStage
from specfuse_shared.loading.planning import plan_ensemble
from specfuse_shared.loading.pretrained import load_pretrained, prepared
from specfuse_shared.members.base import CacheUse, MemberInfo
from specfuse_shared.members.local.base import InProcessMember
from specfuse_shared.members.local.probe import Attempt, probe
from specfuse_shared.members.local.row_sequence import new_sequence
from specfuse_shared.members.local.sequence import SequenceState
from specfuse_shared.placement.plan import Assignment, MemoryNeed
from specfuse_shared.placement.sizing import weight_bytes
from specfuse_shared.runtime.cache.sizes import smallest_row
from specfuse_shared.runtime.kernels import choose_kernels
from specfuse_shared.runtime.model_runner import ModelRunner
from specfuse_shared.runtime.mps import is_mps, mps_turn, warn_untested
from specfuse_shared.runtime.packed_weights import pack_weights
from specfuse_shared.settings.config import EnsembleConfig
from specfuse_shared.settings.member_config import MemberConfig
from specfuse_shared.types import MemberReport


class LocalMember(InProcessMember):
    """A causal language model of transformers in this process, in its `place` or where it fits by itself.

    `loaded`: model and tokenizer that are in memory already; else they are read as `config` says. `why`: it runs here.
    """

    def __init__(
        self,
        config: MemberConfig,
        *,
        cache_dir: str | None = None,
        on_stage: OnStage = lambda stage: None,
        place: Assignment | None = None,
        execution: str = "auto",
        loaded: tuple[Any, Any] | None = None,
    ) -> None:
        self.why = ""
        if loaded is not None:
            place = _place_of(loaded[0], config.label)
        else:
            place = place or plan_ensemble(EnsembleConfig([config], cache_dir=cache_dir)).of(config.label)
        if any(map(is_mps, place.memory)):
            warn_untested()
        with mps_turn(place.memory):
            self._load(config, cache_dir, on_stage, place, execution, loaded)

    def _load(
        self,
        config: MemberConfig,
        cache_dir: str | None,
        on_stage: OnStage,
        place: Assignment,
        execution: str,
        loaded: tuple[Any, Any] | None,
    ) -> None:
        start = time.monotonic()
        if loaded is not None:
            model, tokenizer = prepared(loaded[0], config), loaded[1]
        else:
            model, tokenizer = load_pretrained(config, cache_dir, on_stage, place)
        parameters, weights = model.num_parameters(), weight_bytes(model)
        if loaded is None:  # a model that somebody else has stays as it is
            weights += pack_weights(model)
        self.devices = place.caches
        super().__init__(config, tokenizer)
        on_stage("checking parity")
        choose_kernels(torch.device(model.device))
        way = probe(model, self.name, execution)
        self._runner = way.runner(model)
        self.runner.warm_up()
        holders = (getattr(model, "generation_config", None), model.config)
        self._know_vocabulary(holders, model.get_input_embeddings().num_embeddings)
        self.context_limit = _context_limit(model, config)
        self.bytes_per_token = way.bytes_per_token
        self._report = self._described(place, way, time.monotonic() - start, (parameters, weights))

    @property
    def runner(self) -> ModelRunner:
        return self._runner

    def new_sequence(self, keeps_spare: bool) -> SequenceState:
        return new_sequence(self.runner, keeps_spare)

    @property
    def report(self) -> MemberReport:
        graphs = self._report.graphs if self.runner.static is None else self.runner.static.graphs.report
        return replace(self._report, why=self.why, graphs=graphs, forwards=self.runner.forwards)

    def _described(self, place: Assignment, way: Attempt, seconds: float, size: tuple[int, int]) -> MemberReport:
        """`size`: parameters, and bytes of all weights."""
        model = self.runner.model
        text = model.config.get_text_config(decoder=True)
        return self._reported(
            architecture=type(model).__name__,
            parameters=size[0],
            memory_bytes=size[1],
            device=place.place,
            quantization=place.quantization,
            dtype=str(model.dtype).removeprefix("torch."),
            attention=text._attn_implementation,
            verification=way.verification,
            probe_error=way.error,
            graphs=way.execution,
            load_seconds=seconds,
        )

    @property
    def info(self) -> MemberInfo:
        """What it tells the coordinator, as of now."""
        smallest = smallest_row(self.runner.device)
        return replace(super().info, smallest_row=smallest, fixed_blocks=self.runner.pool.is_fixed)

    @property
    def may_guess(self) -> bool:
        """Whether it verifies many tokens in one forward, and never reads an answer again."""
        return self.runner.plan is not None and self.runner.longrope.limit is None

    def cache_use(self) -> CacheUse:
        """Memory for answers now."""
        pool, prefixes = self.runner.pool, self.runner.prefixes
        return CacheUse(pool.memory_bytes, prefixes.memory_bytes, prefixes.reused_tokens)

    def remember(self, limit: int) -> None:
        """Keep at most `limit` bytes of past answers, for prompts that begin the same way."""
        self.runner.prefixes.limit = limit
        self.runner.prefixes.shrink(limit)


def _context_limit(model: Any, config: MemberConfig) -> int | None:
    """Tokens of context: the model's, lowered by the configuration; None if neither states any."""
    limits = (config.max_context, getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None))
    return min((limit for limit in limits if limit), default=None)


def _place_of(model: Any, name: str) -> Assignment:
    """The place of a whole model that is in memory."""
    device, size = str(model.device), weight_bytes(model)
    number_format = str(model.dtype).removeprefix("torch.")
    return Assignment(name, number_format, None, MemoryNeed(size, 0, 0), {"": device}, {device: size}, {device: 1.0})
