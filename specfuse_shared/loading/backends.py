"""Which engine runs a member of this process, and why."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specfuse_shared.errors import MemberLoadError, MissingExtraError, install_command
from specfuse_shared.loading.gguf import gguf_file
from specfuse_shared.loading.gguf_head import gguf_head
from specfuse_shared.loading.ollama import ollama_model
from specfuse_shared.placement.devices import has_accelerator
from specfuse_shared.placement.plan import format_bytes
from specfuse_shared.settings.member_config import OLLAMA, MemberConfig

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
    """What runs a member. Raises `MemberLoadError` where what it names does not go together, `MissingExtraError`.

    `fetch`: a GGUF file on the hub may be fetched to find out.
    """
    if config.backend == "transformers":
        return Backend("transformers", "as configured")
    wanted = config.backend == "llama.cpp" or bool(config.needs_llama_cpp)
    file = gguf_file(config, fetch)
    reason = _against(config, file, wanted)
    if reason is None:
        if has_llama_cpp():
            assert file is not None
            return Backend("llama.cpp", "as configured" if wanted else f"{_kind(file)}, and llama-cpp-python is here")
        if wanted:
            raise MissingExtraError('MemberConfig(backend="llama.cpp")', "llamacpp")
        assert file is not None
        return Backend("transformers", _what_it_would_save(file))
    if wanted:
        named = "backend" if config.backend == "llama.cpp" else config.needs_llama_cpp[0]
        raise MemberLoadError(f"member {config.label!r}: MemberConfig.{named} asks for llama.cpp, but {reason}")
    return Backend("transformers", reason if file is not None else "")


def build_offloads() -> bool:
    """Whether the build of llama-cpp-python has a use for cards."""
    return bool(importlib.import_module("llama_cpp.llama_cpp").llama_supports_gpu_offload())


def lora_files(config: MemberConfig) -> tuple[Path, ...]:
    """LoRA adapters in GGUF form that go with a member on llama.cpp. Raises `MemberLoadError`."""
    beside = ollama_model(config.model.removeprefix(OLLAMA), config.label).adapters if is_ollama(config) else ()
    if config.adapter is None:
        return beside
    path = Path(config.adapter)
    if not path.is_file():
        raise MemberLoadError(f"member {config.label!r}: there is no LoRA file {config.adapter}")
    return (*beside, path)


def is_ollama(config: MemberConfig) -> bool:
    return config.model.startswith(OLLAMA)


def _against(config: MemberConfig, file: Path | None, wanted: bool) -> str | None:
    """What speaks against llama.cpp; None if nothing does."""
    if file is None:
        return f"{config.model!r} is no GGUF file"
    if config.adapter is not None and not config.adapter.endswith(".gguf"):
        return "its adapter is no LoRA in GGUF form"
    if config.needs_transformers:
        return f"{config.needs_transformers[0]} needs transformers"
    if not wanted and gguf_head(file).quantization is None and not is_ollama(config):
        return "its weights are not quantised"
    if config.device != "cpu" and has_llama_cpp() and not build_offloads():
        if config.device != "auto":
            return f"its build here computes on the processor alone, and not on {config.device!r}"
        if not wanted and has_accelerator():
            return "the build of llama-cpp-python has no use for the accelerator of this machine"
    return None


def _kind(file: Path) -> str:
    return f"weights in {gguf_head(file).quantization or 'whole numbers'}"


def _what_it_would_save(file: Path) -> str:
    size = format_bytes(gguf_head(file).size)
    return f"llama-cpp-python is not installed; with it the file runs as it is, in {size} of weights: {EXTRA}"
