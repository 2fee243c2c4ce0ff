"""From a `MemberConfig` to a model and a tokenizer: hub ids, local folders and GGUF files.

GGUF files are dequantised once; the result is kept as safetensors in a cache folder, keyed by the file's hash.
Remote code is off and pickled weights are refused unless the member's configuration allows them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from specfuse_shared.config import MemberConfig
from specfuse_shared.errors import MemberLoadError, MissingExtraError

logger = logging.getLogger(__name__)

_FORMAT = "1"
"""Part of the cache key; raised when a conversion would turn out differently."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """One step of loading: `stage` of member number `index` of `total`."""

    member: str
    index: int
    total: int
    stage: str


OnProgress = Callable[[LoadProgress], None]
OnStage = Callable[[str], None]


def cache_folder(configured: str | None = None) -> Path:
    """Where converted weights live: the setting, else $SPECFUSE_CACHE, else the user's cache folder."""
    if chosen := configured or os.environ.get("SPECFUSE_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specfuse"


def load_pretrained(config: MemberConfig, cache_dir: str | None, on_stage: OnStage) -> tuple[Any, Any]:
    """Model (in eval mode, on its device) and tokenizer. Raises `MemberLoadError`, `MissingExtraError`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with _quiet():
            source, revision = config.model, config.revision
            if gguf := _gguf_file(config):
                source, revision = str(converted(gguf, cache_dir, on_stage)), None
            common: dict[str, Any] = {"revision": revision, "trust_remote_code": config.trust_remote_code}
            on_stage("reading the tokenizer")
            tokenizer = AutoTokenizer.from_pretrained(config.tokenizer or source, **common)
            on_stage("reading the weights")
            model = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=_dtype(config),
                attn_implementation=config.attn_implementation,
                use_safetensors=None if config.allow_pickle else True,
                **common,
            )
            if config.adapter is not None:
                on_stage("merging the adapter")
                model = _with_adapter(model, config, config.adapter)
            return _placed(model, config), tokenizer
    except (MemberLoadError, MissingExtraError):
        raise
    except Exception as error:  # hub, disk, format and memory errors have no common class
        raise MemberLoadError(_explain(config, error)) from error


def converted(gguf: Path, cache_dir: str | None, on_stage: OnStage) -> Path:
    """Folder with the file's weights and tokenizer as safetensors, converted on first use.

    Quantised weights are kept in bfloat16 (finer than their 4 to 8 bits), others in float32.
    """
    on_stage("hashing the file")
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:24]
    root = cache_folder(cache_dir)
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"{gguf.stem}-{digest}-{_FORMAT}"
    with FileLock(f"{target}.lock"):
        if not target.is_dir():
            on_stage("converting (once)")
            _convert(gguf, target)
    return target


def _convert(gguf: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.info("converting %s into %s", gguf, target)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(scratch)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16 if _is_quantised(gguf) else torch.float32,
        )
        model.save_pretrained(scratch)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _is_quantised(gguf: Path) -> bool:
    from gguf import GGMLQuantizationType, GGUFReader

    whole = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.F64}
    return any(tensor.tensor_type not in whole for tensor in GGUFReader(gguf).tensors)


def _gguf_file(config: MemberConfig) -> Path | None:
    """The GGUF file that the configuration names, fetched from the hub if need be."""
    path = Path(config.model).expanduser()
    if config.gguf_file is None:
        if path.suffix != ".gguf":
            return None
        if not path.is_file():
            raise MemberLoadError(f"member {config.label!r}: there is no GGUF file {config.model}")
        return path
    if (path / config.gguf_file).is_file():
        return path / config.gguf_file
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(config.model, config.gguf_file, revision=config.revision))


def _dtype(config: MemberConfig) -> Any:
    """ "auto": the checkpoint's own; on a processor without half-precision arithmetic, float32."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if choose_device(config.device).type != "cpu" or _cpu_has_bf16():
        return "auto"
    return torch.float32


def _cpu_has_bf16() -> bool:
    return bool(torch.cpu.get_capabilities().get("avx512_bf16")) if hasattr(torch.cpu, "get_capabilities") else False


def choose_device(device: str) -> torch.device:
    """The named device, or the accelerator that is there, else the CPU."""
    if device == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise MemberLoadError(f"device {device!r} is unknown: use auto, cpu, cuda, cuda:1, mps or xpu") from error


def _placed(model: Any, config: MemberConfig) -> Any:
    from specfuse_shared.attention import EAGER, GROUPED

    device = choose_device(config.device)
    if device.type == "cpu" and model.dtype == torch.float16:
        model = model.float()
    model = model.to(device).eval().requires_grad_(False)
    text = model.config.get_text_config(decoder=True)
    wanted = config.attn_implementation or text._attn_implementation
    model.set_attn_implementation(EAGER if wanted == "eager" or not model._supports_sdpa else GROUPED)
    return model


def _with_adapter(model: Any, config: MemberConfig, adapter: str) -> Any:
    """The model with the adapter's weights merged in, so that it costs nothing at run time."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise MissingExtraError(f"The adapter of member {config.label!r}", "adapters") from error
    from transformers.utils.hub import cached_file

    if not config.allow_pickle:
        try:
            cached_file(adapter, "adapter_model.safetensors")
        except OSError as error:
            raise MemberLoadError(
                f"member {config.label!r}: there is no adapter_model.safetensors in {adapter!r}: expected the hub id "
                "or folder of a PEFT adapter (pickled ones need MemberConfig(allow_pickle=True))"
            ) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the two libraries' quarrels over each other's names
        return PeftModel.from_pretrained(model, adapter).merge_and_unload(safe_merge=True)


def _explain(config: MemberConfig, error: Exception) -> str:
    hint = ""
    path = Path(config.model).expanduser()
    if "safetensors" in str(error) and not config.allow_pickle:
        hint = "; the weights are pickled: convert them, or allow them with MemberConfig(allow_pickle=True)"
    elif not path.exists():
        hint = "; expected a hub id, a local folder or a .gguf file"
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"member {config.label!r}: cannot load {config.model!r}: {first_line}{hint}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's progress bars off the terminal; progress is reported through `on_stage`."""
    from transformers import modeling_gguf_pytorch_utils as gguf_loader
    from transformers.utils import logging as untyped_logging

    library_logging: Any = untyped_logging

    shown, bar = library_logging.is_progress_bar_enabled(), getattr(gguf_loader, "tqdm", None)
    library_logging.disable_progress_bar()
    if bar is not None:  # the GGUF loader has a bar of its own, which that switch does not reach
        vars(gguf_loader)["tqdm"] = library_logging.tqdm
    try:
        yield
    finally:
        if bar is not None:
            vars(gguf_loader)["tqdm"] = bar
        if shown:
            library_logging.enable_progress_bar()
