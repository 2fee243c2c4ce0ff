"""GGUF files: what they say of themselves, and their weights as safetensors, converted once."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from os import SEEK_CUR
from pathlib import Path
from typing import Any, BinaryIO

import torch
from filelock import FileLock

from specfuse_shared.errors import MemberLoadError
from specfuse_shared.member_config import MemberConfig

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


def _conversion(gguf: Path, cache_dir: str | None) -> Path:
    state = gguf.stat()
    return cache_folder(cache_dir) / f"{gguf.stem}-{_digest(gguf, state.st_size, state.st_mtime_ns)}-{_FORMAT}"


@cache
def _digest(gguf: Path, size: int, changed: int) -> str:
    """Of the file in this state: `size` and time of change only tell when it has to be read again."""
    with gguf.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:24]


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


def gguf_file(config: MemberConfig, fetch: bool = True) -> Path | None:
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


def gguf_context(gguf: Path) -> int | None:
    """Tokens of context that a file states; read from its head, without the tables behind it.

    Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Raises `MemberLoadError` for a head that is none.
    """
    try:
        with gguf.open("rb") as file:
            return _context_in(file)
    except (OSError, ValueError, OverflowError, struct.error) as error:
        raise MemberLoadError(f"{gguf} is no GGUF file, or its head is broken ({error}): fetch it again") from error


_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 65_536
"""Of a head; real ones have some fifty."""
_LONGEST_STRING = 4 * 2**20
"""Bytes; chat templates have a hundred thousand at most."""


def _context_in(file: BinaryIO) -> int | None:
    magic, _, _, count = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    if count > _MOST_ENTRIES:
        raise ValueError(f"it claims {count} entries")
    for _ in range(count):
        key, kind = _string(file), _number(file, "<I")
        value = _value(file, kind)
        if key.endswith(".context_length"):
            return int(value or 0) or None
    return None


def _value(file: BinaryIO, kind: int) -> Any:
    """A value of metadata; arrays are passed over."""
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _number(file, _layout(kind))
    inner, length = _number(file, "<I"), _number(file, "<Q")
    if inner == _STRING:
        for _ in range(length):  # a file that ends sooner ends this
            _string(file)
    else:
        file.seek(length * struct.calcsize(_layout(inner)), SEEK_CUR)
    return None


def _layout(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"it has a value of unknown kind {kind}")
    return _SCALARS[kind]


def _string(file: BinaryIO) -> str:
    size = _number(file, "<Q")
    if size > _LONGEST_STRING:
        raise ValueError(f"it claims a text of {size} bytes")
    return file.read(size).decode("utf-8", "replace")


def _number(file: BinaryIO, layout: str) -> Any:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))[0]
