"""GGUF files: where they are, and their weights and tokenizers as transformers reads them, converted once."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from filelock import FileLock

from specfuse_shared.errors import MemberLoadError
from specfuse_shared.loading.ollama import ollama_model
from specfuse_shared.settings.member_config import OLLAMA, MemberConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

OnStage = Callable[[str], None]

_FORMAT = "1"
"""Part of the cache key; raised when a conversion would turn out differently."""


def cache_folder(configured: str | None = None) -> Path:
    """Where converted weights live: the setting, else $SPECFUSE_CACHE, else the user's cache folder."""
    if chosen := configured or os.environ.get("SPECFUSE_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specfuse"


def converted(gguf: Path, cache_dir: str | None, on_stage: OnStage) -> Path:
    """Folder with the file's weights and tokenizer as safetensors, converted on first use.

    Quantised weights are kept in bfloat16 (finer than their 4 to 8 bits), others in float32.
    """
    on_stage("hashing the file")
    target = _conversion(gguf, cache_dir)
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.is_dir():
            on_stage("converting (once)")
            _convert(gguf, target)
    return target


def known_conversion(gguf: Path, cache_dir: str | None) -> Path | None:
    """The folder of a file that was converted before."""
    target = _conversion(gguf, cache_dir)
    return target if target.is_dir() else None


def converted_tokenizer(gguf: Path, cache_dir: str | None, on_stage: OnStage) -> Path:
    """Folder with the file's tokenizer alone; no weight is read, and the file is known by its place, size and date."""
    state = gguf.stat()
    known = hashlib.sha256(f"{gguf.resolve()}/{state.st_size}/{state.st_mtime_ns}".encode()).hexdigest()[:24]
    target = cache_folder(cache_dir) / f"{gguf.stem[:80]}-{known}-tokenizer-{_FORMAT}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.is_dir():
            on_stage("converting the tokenizer (once)")
            _made(target, lambda scratch: _convert_tokenizer(gguf, scratch))
    return target


def _conversion(gguf: Path, cache_dir: str | None) -> Path:
    state = gguf.stat()
    return cache_folder(cache_dir) / f"{gguf.stem}-{_digest(gguf, state.st_size, state.st_mtime_ns)}-{_FORMAT}"


@cache
def _digest(gguf: Path, size: int, changed: int) -> str:
    """Of the file in this state: `size` and time of change only tell when it has to be read again."""
    with gguf.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:24]


def _convert(gguf: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    def convert(scratch: Path) -> None:
        _convert_tokenizer(gguf, scratch)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16 if _is_quantised(gguf) else torch.float32,
        )
        model.save_pretrained(scratch)

    logger.info("converting %s into %s", gguf, target)
    _made(target, convert)


def _convert_tokenizer(gguf: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    if spells_out(AutoTokenizer.from_pretrained(folder)):
        raise MemberLoadError(
            f"transformers {version('transformers')} converts the tokenizer of {gguf.name} into one that spells words "
            "out letter by letter: install a later release, or name a repository with `tokenizer`"
        )


_SAMPLE, _WORD = 200, 4
"""So many words of so many letters or more are looked at."""


def spells_out(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether words that are tokens become more than a token for every two letters: merges were lost."""
    every = max(1, len(tokenizer) // (50 * _SAMPLE))
    texts = (str(tokenizer.decode([number])) for number in range(0, len(tokenizer), every))
    words = (text for text in texts if len(text) >= _WORD and text.isascii() and text.isalpha())
    looked_at = list(itertools.islice(words, _SAMPLE))
    tokens = sum(len(tokenizer.encode(word, add_special_tokens=False)) for word in looked_at)
    return 2 * tokens > sum(map(len, looked_at))


def _made(target: Path, fill: Callable[[Path], None]) -> None:
    """A folder that is there whole or not at all."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        fill(scratch)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _is_quantised(gguf: Path) -> bool:
    from gguf import GGMLQuantizationType, GGUFReader

    whole = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.F64}
    return any(tensor.tensor_type not in whole for tensor in GGUFReader(gguf).tensors)


def gguf_file(config: MemberConfig, fetch: bool = True) -> Path | None:
    """The GGUF file that the configuration names, fetched from the hub if need be. Raises `MemberLoadError`."""
    if config.model.startswith(OLLAMA):
        return ollama_model(config.model.removeprefix(OLLAMA), config.label).file
    path = Path(config.model)
    if config.gguf_file is None:
        if path.suffix != ".gguf":
            return None
        if not path.is_file():
            raise MemberLoadError(f"member {config.label!r}: there is no GGUF file {config.model}")
        return path
    if (path / config.gguf_file).is_file():
        return path / config.gguf_file
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    if fetch:
        return Path(hf_hub_download(config.model, config.gguf_file, revision=config.revision))
    known = try_to_load_from_cache(config.model, config.gguf_file, revision=config.revision)
    if not isinstance(known, str):
        raise MemberLoadError(
            f"member {config.label!r}: the configuration of a GGUF model is in its file, which is not here yet: "
            f"hf download {config.model} {config.gguf_file}"
        )
    return Path(known)
