"""What a member on llama.cpp needs of a device, from the head of its GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specfuse_shared.errors import MemberLoadError
from specfuse_shared.loading.backends import build_offloads
from specfuse_shared.loading.gguf import gguf_file
from specfuse_shared.loading.gguf_head import GgufHead, gguf_head
from specfuse_shared.placement.devices import has_accelerator
from specfuse_shared.placement.plan import CONTEXT, LOGIT_BYTES, Device, MemberSpec, MemoryNeed, Split, Workload
from specfuse_shared.settings.member_config import MemberConfig

LOGIT_ROWS = 256
"""Rows of logits that the library and a round keep."""
_ANSWERS = 4
"""Answers of `CONTEXT` tokens that a cache has room for, where there is memory for as many."""
_VALUE_BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32}


@dataclass(frozen=True, slots=True)
class LlamaSizes:
    """`specfuse_shared.placement.plan.Sizes` of a file that stays as it is."""

    head: GgufHead
    cache_type: str
    cache_tokens: int | None
    tied: int = 0

    @property
    def kv_values(self) -> int:
        return self.head.kv_values

    @property
    def vocabulary(self) -> int:
        return self.head.vocabulary

    @property
    def context(self) -> int | None:
        return self.head.context

    @property
    def bytes_per_token(self) -> int:
        """Of the cache."""
        return int(self.kv_values * _VALUE_BYTES[self.cache_type])

    def weights(self, number_format: str, quantization: str | None) -> int:
        return self.head.size

    def split(self, room: Mapping[str, int], number_format: str, quantization: str | None) -> Split | None:
        """Its layers are the library's affair."""
        return None

    def tokens(self, free: int) -> int:
        """Tokens of the cache: as configured, else room for some answers, less where that many bytes are not `free`."""
        if self.cache_tokens is not None:
            return self.cache_tokens
        one = min(self.context or CONTEXT, CONTEXT)
        return max(one, min(_ANSWERS * one, free // max(1, self.bytes_per_token)))

    def at_first(self) -> int | None:
        """Those of them that are there from the start: room for one answer; None for all that are configured."""
        return min(self.context or CONTEXT, CONTEXT) if self.cache_tokens is None else None


@dataclass(frozen=True, slots=True)
class LlamaSpec(MemberSpec):
    """A member on llama.cpp that wants a place."""

    def is_default(self, device: Device) -> bool:
        return device.kind != "cpu"

    def need(self, device: Device, quantization: str | None, workload: Workload) -> MemoryNeed:
        sizes = self.sizes
        assert isinstance(sizes, LlamaSizes)
        limits = [n for n in (self.max_context or workload.context, sizes.context) if n]
        tokens = sizes.cache_tokens or workload.answers * min(limits)
        logits = LOGIT_ROWS * sizes.vocabulary * LOGIT_BYTES
        return MemoryNeed(sizes.weights("", None), tokens * sizes.bytes_per_token, logits)

    def number_format(self, device: Device) -> str:
        sizes = self.sizes
        assert isinstance(sizes, LlamaSizes)
        return sizes.head.quantization or sizes.head.whole_numbers or "as in the file"


def llama_spec(config: MemberConfig, fetch: bool = True) -> LlamaSpec:
    """Of a member that llama.cpp runs. Raises `MemberLoadError`."""
    file = gguf_file(config, fetch)
    if file is None:
        raise MemberLoadError(f"member {config.label!r}: {config.model!r} is no GGUF file")
    sizes = LlamaSizes(gguf_head(file), cache_type_of(config), config.cache_tokens)
    return LlamaSpec(
        name=config.label,
        sizes=sizes,
        device=config.device if offloads(config) else "cpu",
        max_context=config.max_context,
        fixed=True,
    )


def cache_type_of(config: MemberConfig) -> str:
    if config.cache_type != "auto":
        return config.cache_type
    return "f32" if config.dtype == "float32" else "f16"


def offloads(config: MemberConfig) -> bool:
    """Whether layers go onto a card that torch sees, too, and the plan counts."""
    chosen = config.gpu_layers != 0 and config.device != "cpu"
    return chosen and build_offloads() and has_accelerator()
