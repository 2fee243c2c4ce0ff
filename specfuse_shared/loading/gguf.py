"""GGUF files: where they are, and their weights and tokenizers as transformers reads them, converted once."""

from __future__ import annotations

import glob
import hashlib
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from specfuse_shared.errors import MemberLoadError
from specfuse_shared.loading.gguf_head import gguf_parts, part_names
from specfuse_shared.loading.ollama import ollama_model
from specfuse_shared.settings.member_config import OLLAMA, MemberConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

OnStage = Callable[[str], None]

_FORMAT = "2"
"""Part of the cache key; raised when a conversion would turn out differently. Format 1 kept files without weights."""


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
            for older in target.parent.glob(f"{glob.escape(target.name.removesuffix(_FORMAT))}[0-9]"):
                if older != target:
                    shutil.rmtree(older, ignore_errors=True)
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
    states = [(part, part.stat()) for part in gguf_parts(gguf)]
    digests = [_digest(part, state.st_size, state.st_mtime_ns) for part, state in states]
    digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()[:24]
    return cache_folder(cache_dir) / f"{gguf.stem}-{digest}-{_FORMAT}"


@cache
def _digest(gguf: Path, size: int, changed: int) -> str:
    """Of the file in this state: `size` and time of change only tell when it has to be read again."""
    with gguf.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:24]


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    library: Any = AutoModelForCausalLM

    def convert(scratch: Path) -> None:
        _convert_tokenizer(gguf, scratch)
        parts = gguf_parts(gguf)
        file = gguf if len(parts) == 1 else _joined(parts, scratch / "whole.gguf")
        model, read = library.from_pretrained(
            file.parent,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16 if _is_quantised(file) else torch.float32,
            output_loading_info=True,
        )
        check_complete(gguf.name, model, read)
        model.save_pretrained(scratch)
        if file != gguf:
            file.unlink()

    logger.info("converting %s into %s", gguf, target)
    _made(target, convert)


def check_complete(source: str, model: Any, read: Mapping[str, Any]) -> None:
    """Raises `MemberLoadError` where the files lack weights, which transformers fills with random numbers.

    `read`: what `from_pretrained(…, output_loading_info=True)` says of the loaded files.
    """
    missing = sorted(read["missing_keys"])
    if not missing:
        return
    total = len(model.state_dict())
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    kind, stated = type(model).__name__, getattr(model.config, "architectures", None) or []
    other = f" Its configuration says {stated[0]}, which may be no causal language model." if kind not in stated else ""
    raise MemberLoadError(
        f"{source} lacks {len(missing)} of the {total} tensors of {kind}: {shown}.{other if stated else ''} "
        "Fetch the files again, or name a model that is whole"
    )


def _joined(parts: Sequence[Path], target: Path) -> Path:
    """The parts of a model as one file, because transformers reads no others. Raises `MemberLoadError`."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    readers = [GGUFReader(part) for part in parts]
    first = readers[0].fields
    found, stated = sum(len(reader.tensors) for reader in readers), first.get("split.tensors.count")
    if stated is not None and found != int(stated.contents()):
        raise MemberLoadError(
            f"{parts[0]} and its other parts have {found} of {stated.contents()} tensors: fetch them again"
        )
    writer = GGUFWriter(target, str(first["general.architecture"].contents()))
    for name, field in first.items():
        if not name.startswith(("GGUF.", "split.")) and name != "general.architecture":
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in (tensor for reader in readers for tensor in reader.tensors):
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


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


def has_tensor(parts: Sequence[Path], name: str) -> bool:
    """Whether one of the parts of a model holds a tensor of this name."""
    from gguf import GGUFReader

    return any(tensor.name == name for part in parts for tensor in GGUFReader(part).tensors)


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
        return gguf_parts(path)[0]
    names = _parts_in_repository(config.gguf_file)
    if (path / names[0]).is_file():
        return path / names[0]
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    if fetch:
        first, *_ = [hf_hub_download(config.model, name, revision=config.revision) for name in names]
        return Path(first)
    cached = [try_to_load_from_cache(config.model, name, revision=config.revision) for name in names]
    known = cached[0]
    if not isinstance(known, str) or not all(isinstance(part, str) for part in cached):
        raise MemberLoadError(
            f"member {config.label!r}: the configuration of a GGUF model is in its file, which is not here yet: "
            f"hf download {config.model} {' '.join(names)}"
        )
    return Path(known)


def _parts_in_repository(file: str) -> list[str]:
    """The paths of all parts of a file in a repository or folder."""
    folder, slash, name = file.rpartition("/")
    return [f"{folder}{slash}{part}" for part in part_names(name)]
