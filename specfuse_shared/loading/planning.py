"""From an ensemble's configuration to its plan: the device of each member, before any weight is read.

Also the choice of the backend of a local member with its reason, and the memory of a member on llama.cpp, from the
head of its GGUF file.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specfuse_shared.config import OLLAMA, EnsembleConfig, MemberConfig
from specfuse_shared.errors import ConfigError, MemberLoadError, MissingExtraError, install_command
from specfuse_shared.loading.gguf import (
    GgufHead,
    OnStage,
    converted,
    gguf_file,
    gguf_head,
    gguf_parts,
    has_tensor,
    known_conversion,
    ollama_model,
)
from specfuse_shared.loading.pretrained import MemberFiles, explained
from specfuse_shared.placement.plan import (
    ANSWERS,
    ANY_PRECISION,
    CONTEXT,
    LOGIT_BYTES,
    Device,
    MemberSpec,
    MemoryNeed,
    Plan,
    Split,
    Workload,
    format_bytes,
    place,
)
from specfuse_shared.placement.sizing import ModelSizes, find_devices, has_accelerator

EXTRA = install_command("llamacpp")


@dataclass(frozen=True, slots=True)
class Backend:
    """The engine, and why it is that one; nothing where there was no choice."""

    name: Literal["llama.cpp", "transformers"]
    reason: str

    @property
    def is_llama_cpp(self) -> bool:
        return self.name == "llama.cpp"


def has_llama_cpp() -> bool:
    """Whether llama-cpp-python is installed."""
    return importlib.util.find_spec("llama_cpp") is not None


def backend_of(config: MemberConfig, fetch: bool = True) -> Backend:
    """The backend of a member. Raises `MemberLoadError` if its settings conflict, `MissingExtraError`.

    `fetch`: a GGUF file on the hub may be fetched to find out.
    """
    if config.backend == "transformers":
        return Backend("transformers", "as configured")
    requested = config.backend == "llama.cpp" or bool(config.needs_llama_cpp)
    file = gguf_file(config, fetch)
    reason = _against(config, file, requested)
    if reason is None:
        if has_llama_cpp():
            assert file is not None
            return Backend(
                "llama.cpp", "as configured" if requested else f"{_kind(file)}, and llama-cpp-python is here"
            )
        if requested:
            raise MissingExtraError('MemberConfig(backend="llama.cpp")', "llamacpp")
        assert file is not None
        return Backend("transformers", _what_it_would_save(file))
    if requested:
        named = "backend" if config.backend == "llama.cpp" else config.needs_llama_cpp[0]
        raise MemberLoadError(f"member {config.label!r}: MemberConfig.{named} asks for llama.cpp, but {reason}")
    return Backend("transformers", reason if file is not None else "")


def build_offloads() -> bool:
    """Whether the build of llama-cpp-python has a use for cards."""
    return bool(importlib.import_module("llama_cpp.llama_cpp").llama_supports_gpu_offload())


def lora_files(config: MemberConfig) -> tuple[Path, ...]:
    """LoRA adapters in GGUF form that go with a member on llama.cpp. Raises `MemberLoadError`."""
    adapters = ollama_model(config.model.removeprefix(OLLAMA), config.label).adapters if is_ollama(config) else ()
    if config.adapter is None:
        return adapters
    path = Path(config.adapter)
    if not path.is_file():
        raise MemberLoadError(f"member {config.label!r}: there is no LoRA file {config.adapter}")
    return (*adapters, path)


def is_ollama(config: MemberConfig) -> bool:
    return config.model.startswith(OLLAMA)


def _against(config: MemberConfig, file: Path | None, requested: bool) -> str | None:
    """The reason against llama.cpp; None if there is none."""
    if file is None:
        return f"{config.model!r} is no GGUF file"
    if config.adapter is not None and not config.adapter.endswith(".gguf"):
        return "its adapter is no LoRA in GGUF form"
    if config.needs_transformers:
        return f"{config.needs_transformers[0]} needs transformers"
    if not requested and gguf_head(file).quantization is None and not is_ollama(config):
        return "its weights are not quantised"
    if config.device != "cpu" and has_llama_cpp() and not build_offloads():
        if config.device != "auto":
            return f"its build here computes on the processor alone, and not on {config.device!r}"
        if not requested and has_accelerator():
            return "the build of llama-cpp-python has no use for the accelerator of this machine"
    return None


def _kind(file: Path) -> str:
    return f"weights in {gguf_head(file).quantization or 'whole numbers'}"


def _what_it_would_save(file: Path) -> str:
    size = format_bytes(gguf_head(file).size)
    return f"llama-cpp-python is not installed; with it the file runs as it is, in {size} of weights: {EXTRA}"


LOGIT_ROWS = 256
"""Rows of logits that the library and a round keep."""
_ANSWERS = 4
"""Number of answers of `CONTEXT` tokens that a cache should hold, if memory allows."""
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

    def split(self, free_bytes: Mapping[str, int], number_format: str, quantization: str | None) -> Split | None:
        """Its layers are the library's affair."""
        return None

    def tokens(self, free: int) -> int:
        """Tokens of the cache: as configured, else enough for some answers, fewer if that many bytes are not `free`."""
        if self.cache_tokens is not None:
            return self.cache_tokens
        one = min(self.context or CONTEXT, CONTEXT)
        return max(one, min(_ANSWERS * one, free // max(1, self.bytes_per_token)))

    def at_first(self) -> int | None:
        """The tokens that are allocated from the start: one answer; None for all configured tokens."""
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


_MOST_QUANTISED = 1.9
"""Bytes a weight below which a GGUF file is quantised, and converted to bfloat16."""


def plan_ensemble(
    config: EnsembleConfig,
    devices: Sequence[Device] | None = None,
    *,
    answers: int = ANSWERS,
    context: int = CONTEXT,
    convert: bool = False,
    on_stage: Mapping[str, OnStage] | None = None,
) -> Plan:
    """A device for every member on `devices` (this machine's, if unset), from configurations alone.

    Reserves memory for `answers` at once with `context` tokens each, in addition to the weights. `convert`: fetch and
    convert GGUF files, as loading would. `on_stage`: called with the step and the member's name.

    Raises `MemberLoadError` for an unreadable configuration, `PlacementError` for a missing device. A plan that does
    not fit raises when a member's device is requested (`Plan.of`). Members on servers need no device.
    """
    if answers < 1 or context < 1:
        raise ConfigError(f"a plan is for at least 1 answer and 1 token of context, not {answers} and {context}")
    members = config.member_configs
    here = [member for member in members if member.server is None]
    stages = on_stage or dict.fromkeys(config.names, lambda stage: None)
    specs = [_spec(MemberFiles(m, config.cache_dir, stages[m.label]), convert) for m in here]
    workload = Workload(answers, context, config.max_candidate_tokens * len(members))
    return place(specs, devices or find_devices(), workload)


def _spec(files: MemberFiles, convert: bool) -> MemberSpec:
    config = files.config
    files.on_stage("reading the configuration")
    with explained(config):
        if backend_of(config, fetch=convert).is_llama_cpp:
            return llama_spec(config, fetch=convert)
        file = gguf_file(config, fetch=convert)
        settings, stored = _settings(files, file, convert)
        sizes = ModelSizes(settings, config.trust_remote_code)
        if file is not None and stored is None:
            stored = "bfloat16" if gguf_head(file).size < _MOST_QUANTISED * sizes.parameters else "float32"
    if sizes.quantised and config.quantization in ("8bit", "4bit"):
        raise MemberLoadError(f"member {config.label!r}: its weights are quantised already: leave quantization unset")
    fixed = sizes.quantised or config.adapter is not None  # adapters are merged into whole numbers
    chosen = None if config.quantization == "auto" else config.quantization
    return MemberSpec(
        name=config.label,
        sizes=sizes,
        stored=stored,
        dtype=config.dtype,
        device=config.device,
        quantizations=ANY_PRECISION if config.quantization == "auto" and not fixed else (chosen,),
        offload=config.offload,
        max_context=config.max_context,
        fixed=fixed,
    )


def _settings(files: MemberFiles, file: Path | None, convert: bool) -> tuple[Any, str | None]:
    """A member's transformers configuration, and the number format of its weights, if that is known."""
    from transformers import AutoConfig

    config = files.config
    source, revision = config.model, config.revision
    if file is not None:
        folder = (
            converted(file, files.cache_dir, files.on_stage) if convert else known_conversion(file, files.cache_dir)
        )
        if folder is None:
            settings = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
            if len(parts := gguf_parts(file)) > 1:  # transformers looks for an output layer in the first part alone
                settings.tie_word_embeddings = not has_tensor(parts, "output.weight")
            return settings, None
        source, revision = str(folder), None
    settings = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=config.trust_remote_code)
    stored = settings.dtype or settings.get_text_config(decoder=True).dtype
    return settings, None if stored is None else str(stored).removeprefix("torch.")


def needed_memory(config: MemberConfig, cache_dir: str | None) -> int | None:
    """Bytes of main memory of a member on a machine like this one, including one answer.

    None where its configuration cannot be read from here.
    """
    processor = find_devices()[0]
    with suppress(MemberLoadError):
        spec = _spec(MemberFiles(config, cache_dir), convert=False)
        return spec.need(processor, spec.quantizations[0], Workload()).total
    return None
