"""A member on llama.cpp: its file as it is, one cache for all its answers, its tokenizer as transformers reads it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from specfuse_shared.config import EnsembleConfig, MemberConfig
from specfuse_shared.errors import UnsupportedModelError
from specfuse_shared.loading.gguf import OnStage, gguf_file
from specfuse_shared.loading.planning import (
    LOGIT_ROWS,
    LlamaSizes,
    backend_of,
    cache_type_of,
    llama_spec,
    lora_files,
    plan_ensemble,
)
from specfuse_shared.loading.pretrained import MemberFiles
from specfuse_shared.members.llamacpp.context import LlamaContext, LlamaRunner
from specfuse_shared.members.llamacpp.library import ALL_LAYERS, LlamaModel
from specfuse_shared.members.llamacpp.parity import check_tokenizer, probe
from specfuse_shared.members.llamacpp.sequence import LlamaSequence, new_sequence
from specfuse_shared.members.local.member import InProcessMember
from specfuse_shared.members.stages import CacheUse, MemberInfo
from specfuse_shared.placement.plan import LOGIT_BYTES, Assignment
from specfuse_shared.placement.sizing import free_memory, only_cpu
from specfuse_shared.runtime.kv_cache import TREE_CAPACITY
from specfuse_shared.types import MemberReport

_TOKEN_COST_ON_CPU = 0.6
"""Products of quantised weights gain little from more rows there: 0.4 to 0.9 for models of 0.1 to 1.5 billion."""
_SHARE_OF_FREE = 0.25
"""Of what is free once the weights are there, for a cache of no given size."""


class LlamaMember(InProcessMember):
    """A causal language model of a GGUF file, in its `place` or where it fits by itself. Raises `MemberLoadError`."""

    devices = {"cpu": 1.0}  # noqa: RUF012 logits come there, and its thread is one of the processor's
    bytes_per_token = 0
    """Of memory that answers take as they come: the cache is there from the start."""

    def __init__(
        self,
        config: MemberConfig,
        *,
        cache_dir: str | None = None,
        on_stage: OnStage = lambda stage: None,
        place: Assignment | None = None,
    ) -> None:
        began, self._layers = time.monotonic(), 0
        self._config, self._why = config, backend_of(config)  # its file is read before its tokenizer
        place = place or plan_ensemble(EnsembleConfig([config], cache_dir=cache_dir)).of(config.label)
        on_stage("reading the file")
        model, context = self._model(place), None
        try:
            super().__init__(config, MemberFiles(config, cache_dir, on_stage).gguf_tokenizer())
            if 0 < model.window < TREE_CAPACITY:
                raise UnsupportedModelError(
                    f"member {self.name!r}: its layers see {model.window} tokens, and a round on llama.cpp takes up to "
                    f'{TREE_CAPACITY}: use MemberConfig(backend="transformers")'
                )
            context, bytes_per_token = self._context(model)
            self._runner = LlamaRunner(context, bytes_per_token)
            on_stage("checking parity")
            self._know_vocabulary([_Ends(model.turn_ends)], model.vocabulary_size)
            check_tokenizer(self.name, self.prompts.codec, model)
            self._error = probe(self.name, self._runner)
        except BaseException:
            if context is not None:
                context.close()
            model.close()
            raise
        limits = (config.max_context, model.context, self._runner.context.tokens)
        self.context_limit: int | None = min(limit for limit in limits if limit)
        self._parameters = model.parameters
        self._weights = model.weight_bytes
        self._description = model.description
        self._place = place
        self._seconds = time.monotonic() - began
        if not (model.lib.llama_supports_gpu_offload() and self._layers):
            self.token_cost = _TOKEN_COST_ON_CPU

    def _model(self, place: Assignment) -> LlamaModel:
        config = self._config
        file = gguf_file(config)
        assert isinstance(file, Path)
        if config.device != "cpu" and not only_cpu():
            self._layers = ALL_LAYERS if config.gpu_layers is None else config.gpu_layers
        device = place.place.partition(":")
        card = int(device[2] or 0) if device[0] != "cpu" and device[0] else None
        return LlamaModel(config.label, file, self._layers, lora_files(config), card)

    def _context(self, model: LlamaModel) -> tuple[LlamaContext, int]:
        """The context, and bytes of a token in its cache."""
        sizes = llama_spec(self._config).sizes
        assert isinstance(sizes, LlamaSizes)
        tokens = sizes.tokens(int(free_memory("cpu") * _SHARE_OF_FREE))
        threads = self._config.threads or torch.get_num_threads()
        cache_type, first = cache_type_of(self._config), sizes.at_first()
        return LlamaContext(self.name, model, tokens, threads, cache_type, first), sizes.bytes_per_token

    @property
    def runner(self) -> LlamaRunner:
        return self._runner

    def new_sequence(self, keeps_speculative: bool) -> LlamaSequence:
        return new_sequence(self._runner, keeps_speculative)

    @property
    def may_guess(self) -> bool:
        return not self._runner.is_recurrent

    @property
    def report(self) -> MemberReport:
        context = self._runner.context
        memory = context.allocated * self._runner.bytes_per_token + LOGIT_ROWS * self.vocabulary_size * LOGIT_BYTES
        there = (
            f"{context.allocated:,} of {context.tokens:,}"
            if context.allocated < context.tokens
            else f"{context.tokens:,}"
        )
        return self._reported(
            architecture=self._description,
            parameters=self._parameters,
            memory_bytes=self._weights,
            device=self._place.place,
            quantization=None,
            dtype=self._place.number_format,
            attention=f"llama.cpp, cache of {there} tokens in {cache_type_of(self._config)}, {_mib(memory)}",
            verification="rows" if self._runner.is_recurrent else "packed",
            probe_error=self._error,
            graphs="llama.cpp's own",
            load_seconds=self._seconds,
            backend="llama.cpp",
            why=self._why.reason,
        )

    @property
    def info(self) -> MemberInfo:
        context = self._runner.context
        return replace(super().info, cache_tokens=context.tokens, cache_branches=context.sequences)

    def cache_use(self) -> CacheUse:
        return CacheUse(self._runner.cache_bytes, self._runner.prefix_bytes, self._runner.reused_tokens)

    def remember(self, limit: int) -> None:
        self._runner.remember_at_most(limit)

    def use_cores(self, count: int) -> None:
        self._runner.context.use_threads(self._config.threads or count)

    def close(self) -> None:
        self._runner.close()


class _Ends:
    """The file's end-of-turn tokens."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.eos_token_id = list(ids)


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"
