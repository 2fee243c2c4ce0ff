"""From a `MemberConfig` to a model and a tokenizer: hub ids, local folders and GGUF files.

GGUF files are dequantised once; the result is kept as safetensors in a cache folder, keyed by the file's hash.
Remote code is off and pickled weights are refused unless the member's configuration allows them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specfuse_shared.config import MemberConfig
from specfuse_shared.errors import MemberLoadError, MissingExtraError, SpecFuseError
from specfuse_shared.loading.gguf import (
    OnStage,
    cache_folder,
    check_complete,
    converted,
    converted_tokenizer,
    gguf_file,
)
from specfuse_shared.loading.sources import untested_versions
from specfuse_shared.placement.plan import Assignment
from specfuse_shared.runtime.mps import is_mps
from specfuse_shared.runtime.out_of_memory import is_out_of_memory

_ONE_THREAD_ENV = "HF_DEACTIVATE_ASYNC_LOAD"


@dataclass(frozen=True)
class MemberFiles:
    """The files of a member: its model, tokenizer and settings.

    Attributes:
        config: Which files, and how to read them.
        cache_dir: Folder for converted GGUF files; None: the user's cache folder.
        on_stage: Called with each step of reading them.
    """

    config: MemberConfig
    cache_dir: str | None = None
    on_stage: OnStage = lambda stage: None

    def pretrained(self, place: Assignment) -> tuple[Any, Any]:
        """Model (in eval mode, in its place) and tokenizer. Raises `MemberLoadError`, `MissingExtraError`."""
        from transformers import AutoModelForCausalLM

        library: Any = AutoModelForCausalLM
        config, tokenizer = self.config, self.tokenizer()
        with explained(config):
            source, common = self._source()
            self.on_stage("reading the weights")
            with _one_thread_on_mps(place):
                model, read = library.from_pretrained(
                    source,
                    dtype=getattr(torch, place.number_format),
                    attn_implementation=config.attn_implementation,
                    use_safetensors=None if config.allow_pickle else True,
                    **self._placing(place),
                    output_loading_info=True,
                    **common,
                )
            check_complete(f"member {config.label!r}: {config.model}", model, read)
            if config.adapter is not None:
                self.on_stage("merging the adapter")
                model = _with_adapter(model, config, config.adapter)
            return prepared(model, config), tokenizer

    def tokenizer(self) -> Any:
        """The tokenizer alone, for code with the member's text but not its model. Raises `MemberLoadError`."""
        from transformers import AutoTokenizer

        config = self.config
        with explained(config):
            source, common = self._source()
            self.on_stage("reading the tokenizer")
            if config.tokenizer is None:
                tokenizer = AutoTokenizer.from_pretrained(source, **common)
            else:  # a separate repository, without the model's revisions
                tokenizer = AutoTokenizer.from_pretrained(config.tokenizer, **{**common, "revision": None})
            if not tokenizer.encode("a word", add_special_tokens=False):
                raise MemberLoadError(
                    f"member {config.label!r}: its tokenizer knows no text, its files are missing from "
                    f"{config.tokenizer or source!r}: name the hub id or folder of one with MemberConfig(tokenizer=…)"
                )
            return tokenizer

    def gguf_tokenizer(self) -> Any:
        """The tokenizer of a GGUF file, without its weights, or the one that is named. Raises `MemberLoadError`."""
        from transformers import AutoTokenizer

        config = self.config
        with explained(config):
            self.on_stage("reading the tokenizer")
            if config.tokenizer is not None:
                return AutoTokenizer.from_pretrained(config.tokenizer)
            file = gguf_file(config)
            assert file is not None
            try:
                folder = converted_tokenizer(file, self.cache_dir, self.on_stage)
            except (ValueError, NotImplementedError, KeyError) as error:
                message = " ".join(str(error).split())[:200]
                raise MemberLoadError(
                    f"member {config.label!r}: transformers cannot read the tokenizer of {file.name} ({message}): name "
                    "the hub id or folder of it with MemberConfig(tokenizer=…)"
                ) from error
            return AutoTokenizer.from_pretrained(str(folder))

    def settings(self) -> tuple[Any, Any]:
        """The model's configuration and its generation configuration, if found; no weights."""
        from transformers import AutoConfig, GenerationConfig

        with explained(self.config):
            source, common = self._source()
            settings = generation = None
            with suppress(OSError, ValueError):
                settings = AutoConfig.from_pretrained(source, **common)
            with suppress(OSError, ValueError):
                generation = GenerationConfig.from_pretrained(source, revision=common["revision"])
        return settings, generation

    def _source(self) -> tuple[str, dict[str, Any]]:
        """The location of the files, converted if necessary, and the arguments for transformers to read them."""
        config = self.config
        source, revision = config.model, config.revision
        if file := gguf_file(config):
            source, revision = str(converted(file, self.cache_dir, self.on_stage)), None
        return source, {"revision": revision, "trust_remote_code": config.trust_remote_code}

    def _placing(self, place: Assignment) -> dict[str, Any]:
        """The arguments for transformers about the devices and precision of the weights."""
        kwargs: dict[str, Any] = {}
        if place.place != "cpu" or place.quantization:
            kwargs["device_map"] = dict(place.modules)
        if "disk" in place.memory:
            kwargs["offload_folder"] = str(cache_folder(self.cache_dir) / "offload")
        if place.quantization:
            kwargs["quantization_config"] = _quantised(place.quantization, getattr(torch, place.number_format))
        return kwargs


@contextmanager
def _one_thread_on_mps(place: Assignment) -> Iterator[None]:
    """Have transformers convert numbers in this thread alone, where they go to MPS: with more, the process crashes
    (transformers #48029)."""
    if not any(map(is_mps, place.memory)):
        yield
        return
    before = os.environ.get(_ONE_THREAD_ENV)
    os.environ[_ONE_THREAD_ENV] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ONE_THREAD_ENV]
        else:
            os.environ[_ONE_THREAD_ENV] = before


def _quantised(quantization: str, number_format: torch.dtype) -> Any:
    """How the weights are quantised; activations keep their numbers, so that batch neighbours change nothing."""
    import transformers as untyped_transformers

    transformers: Any = untyped_transformers
    library = {"8bit": "torchao", "4bit": "bitsandbytes"}[quantization]
    if importlib.util.find_spec(library) is None:
        raise MissingExtraError(f'quantization="{quantization}" ({library})', "quant")
    if quantization == "8bit":
        return transformers.TorchAoConfig(importlib.import_module("torchao.quantization").Int8WeightOnlyConfig())
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=number_format
    )


def prepared(model: Any, config: MemberConfig) -> Any:
    """The model in eval mode, with the engine's attention and the library's norms."""
    from specfuse_shared.runtime.attention import EAGER, GROUPED
    from specfuse_shared.runtime.fused_norms import fuse_norms

    model = model.eval().requires_grad_(False)
    text = model.config.get_text_config(decoder=True)
    requested = config.attn_implementation or text._attn_implementation
    # the library's kernel leaves the caps out, and transformers 5.17 does not say so of Gemma 2
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    model.set_attn_implementation(EAGER if requested == "eager" or capped or not model._supports_sdpa else GROUPED)
    fuse_norms(model)
    return model


_LACKING = "missing adapter keys"


def _with_adapter(model: Any, config: MemberConfig, adapter: str) -> Any:
    """The model with the adapter's weights merged in, so that it costs nothing at run time."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise MissingExtraError(f"The adapter of member {config.label!r}", "adapters") from error
    from transformers.utils.hub import cached_file

    if not config.allow_pickle:
        try:
            cached_file(adapter, "adapter_model.safetensors", revision=config.adapter_revision)
        except OSError as error:
            raise MemberLoadError(
                f"member {config.label!r}: there is no adapter_model.safetensors in {adapter!r}: expected the hub id "
                "or folder of a PEFT adapter (pickled ones need MemberConfig(allow_pickle=True))"
            ) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the two libraries' quarrels over each other's names
        warnings.filterwarnings("error", rf".*{_LACKING}", UserWarning)  # they would be random numbers
        try:
            adapted = PeftModel.from_pretrained(model, adapter, revision=config.adapter_revision)
        except UserWarning as missing:
            if _LACKING not in str(missing):  # another warning, where all are errors
                raise
            raise MemberLoadError(
                f"member {config.label!r}: the adapter {adapter!r} lacks some of its weights ({str(missing)[:160]} …): "
                "fetch it again, or name the adapter that was trained for this model"
            ) from missing
        return adapted.merge_and_unload(safe_merge=True)


@contextmanager
def explained(config: MemberConfig) -> Iterator[None]:
    """Any failure with a member's files becomes a `MemberLoadError` with advice."""
    try:
        with _quiet():
            yield
    except SpecFuseError:
        raise
    except Exception as error:  # hub, disk, format and memory errors have no common class
        raise MemberLoadError(_explain(config, error)) from error


def _explain(config: MemberConfig, error: Exception) -> str:
    hint = ""
    path = Path(config.model)
    if is_out_of_memory(error):
        hint = (
            "; there is too little memory here: name a smaller model or a quantised GGUF file, or look at "
            "`specfuse-llm doctor --plan`"
        )
    elif _lacks_safetensors(error) and not config.allow_pickle and _may_be_pickled(path):
        hint = "; the weights are pickled: convert them, or allow them with MemberConfig(allow_pickle=True)"
    elif "connect to" in str(error):
        hint = f"; where there is a network, fetch it with `hf download {config.model}`, or name a local folder"
    elif not path.exists():
        hint = "; expected a hub id, a local folder or a .gguf file"
    elif isinstance(error, (AttributeError, ImportError, KeyError, TypeError)) and untested_versions():
        hint = f"; {untested_versions()}"
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"member {config.label!r}: cannot load {config.model!r}: {first_line}{hint}"


def _lacks_safetensors(error: Exception) -> bool:
    """Whether transformers looked for a file of safetensors, and there is none."""
    return ".safetensors" in str(error) and isinstance(error, OSError) and error.errno is None


def _may_be_pickled(path: Path) -> bool:
    """Whether a folder, or a repository of which nothing is known here, may hold pickled weights."""
    return not path.is_dir() or any(file.suffix in (".bin", ".pt", ".pth") for file in path.iterdir())


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's progress bars off the terminal; progress is reported through `on_stage`."""
    from transformers import modeling_gguf_pytorch_utils as gguf_loader
    from transformers.utils import logging as untyped_logging

    library_logging: Any = untyped_logging

    progress_shown, bar = library_logging.is_progress_bar_enabled(), getattr(gguf_loader, "tqdm", None)
    library_logging.disable_progress_bar()
    if bar is not None:  # the GGUF loader has a separate bar, which that switch does not reach
        vars(gguf_loader)["tqdm"] = library_logging.tqdm
    try:
        yield
    finally:
        if bar is not None:
            vars(gguf_loader)["tqdm"] = bar
        if progress_shown:
            library_logging.enable_progress_bar()
