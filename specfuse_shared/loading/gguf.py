"""GGUF files: their location, and weights and tokenizers in the form that transformers reads, converted once.

The head of a GGUF file is read here, without its long tables. `gguf.GGUFReader` builds them as objects: for Gemma 3
270M, whose vocabulary has 262,144 tokens, it takes 12 s and 684 MiB instead of 0.13 s and less than 1 MiB.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Models in Ollama's store on this machine have names, files and adapters. Its server is not contacted, and nothing is
downloaded. A manifest, `manifests/<registry>/<namespace>/<name>/<tag>`, is JSON that lists layers; a layer's file is
in `blobs`.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.metadata import version
from os import SEEK_CUR
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from filelock import FileLock

from specfuse_shared.config import OLLAMA, MemberConfig
from specfuse_shared.errors import MemberLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 65_536
"""Of a head; real ones have some fifty."""
_MOST_DIMENSIONS = 8
_WHOLE_TENSORS = {0, 1, 28, 30}
"""Types of tensors that are not quantised: float32, float16, float64 and bfloat16."""
_LONGEST_STRING = 4 * 2**20
"""Bytes; chat templates have a hundred thousand at most."""
_SHORT = 4096
"""Longer arrays are tables of the vocabulary, and passed over."""
_WHOLE = {0: "float32", 1: "float16", 32: "bfloat16"}
"""Types of files (`general.file_type`) whose weights are no quantised ones."""
_QUANTISED = {
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4",
}


@dataclass(frozen=True, slots=True)
class Table:
    """An array of metadata that was not read."""

    length: int


@dataclass(frozen=True, slots=True)
class GgufHead:
    """Facts of a model of `size` bytes, all its parts together.

    `values` are its metadata but for long tables, with the family's name cut off. `tensors`: the type of each tensor of
    this part, by its name. Everything is as the file states it; 0 or None where it does not.
    """

    size: int
    values: Mapping[str, Any]
    tensors: Mapping[str, int]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", ""))

    @property
    def context(self) -> int | None:
        """Tokens of context."""
        return self._number("context_length") or None

    @property
    def whole_numbers(self) -> str | None:
        """The number format of weights that are not quantised; None if they are, or if it is unknown."""
        return _WHOLE.get(int(self.values.get("general.file_type", -1)))

    @property
    def quantization(self) -> str | None:
        """The quantisation type of most weights; None for plain numbers, or if it is unknown."""
        kind = self.values.get("general.file_type")
        return None if kind is None or kind in _WHOLE else _QUANTISED.get(kind, "an unknown format")

    @property
    def kv_values(self) -> int:
        """Numbers that a token adds to the caches; windows count as whole layers."""
        heads, layers = self._number("attention.head_count"), self.layers
        if not heads:
            return 0
        size = self._number("embedding_length") // heads
        key, value = self._number("attention.key_length") or size, self._number("attention.value_length") or size
        groups = self.values.get("attention.head_count_kv", heads)
        each = list(groups) if isinstance(groups, tuple) else [groups or heads] * layers
        return sum(int(group) for group in each) * (key + value)

    @property
    def layers(self) -> int:
        return self._number("block_count")

    @property
    def vocabulary(self) -> int:
        table = self.values.get("tokenizer.ggml.tokens")
        return table.length if isinstance(table, Table) else 0

    def _number(self, key: str) -> int:
        value = self.values.get(key, 0)
        return int(max(value, default=0) if isinstance(value, tuple) else value)


_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""How llama.cpp's `llama-gguf-split` names the parts of a model."""


def part_names(name: str) -> tuple[str, ...]:
    """The names of all parts of the model that `name` is a part of, in order; `name` alone if it is whole."""
    match = _PART.fullmatch(name)
    if match is None:
        return (name,)
    count = match["count"]
    return tuple(f"{match['stem']}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1))


def gguf_parts(file: Path) -> tuple[Path, ...]:
    """All files of the model that `file` is a part of. Raises `MemberLoadError` where one of them is missing."""
    parts = tuple(file.with_name(name) for name in part_names(file.name))
    if missing := [part.name for part in parts if not part.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise MemberLoadError(
            f"{file} is one of {len(parts)} parts of a model, and {missing[0]}{more} is missing: put all parts "
            "into one folder"
        )
    count = gguf_head(file, whole=False).values.get("split.count", 0)
    if len(parts) != max(count, 1):
        raise MemberLoadError(
            f"{file} says that it is one of {count} parts of a model: name the parts as they were, such as "
            f"{file.stem}-00001-of-{count:05}.gguf"
        )
    return parts


def gguf_head(file: Path, whole: bool = True) -> GgufHead:
    """The head of a model's file as it is now. `whole` False: the size of this part alone.

    Raises `MemberLoadError` for a head that is none, and for a missing part.
    """
    try:
        state = file.stat()
        head = _head(file, state.st_size, state.st_mtime_ns)
    except (OSError, ValueError, OverflowError, struct.error) as error:
        raise MemberLoadError(f"{file} is no GGUF file, or its head is broken ({error}): fetch it again") from error
    return replace(head, size=sum(part.stat().st_size for part in gguf_parts(file))) if whole else head


@lru_cache(maxsize=64)
def _head(path: Path, size: int, changed: int) -> GgufHead:
    """Metadata of the file in this state: size and modification time only show when it has to be read again."""
    values: dict[str, Any] = {}
    with path.open("rb") as file:
        magic, _, tensor_count, count = struct.unpack("<4sIQQ", file.read(24))
        if magic != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if max(count, tensor_count) > _MOST_ENTRIES:
            raise ValueError(f"it claims {max(count, tensor_count)} entries")
        for _ in range(count):
            key, kind = _string(file), _number(file, "<I")
            values[key] = _value(file, kind)
        tensors = dict(_tensor(file) for _ in range(tensor_count))
    named = (key.removesuffix(".context_length") for key in values if key.endswith(".context_length"))
    family = str(values.get("general.architecture") or next(named, "")) + "."
    return GgufHead(size, {key.removeprefix(family): value for key, value in values.items()}, tensors)


def _tensor(file: BinaryIO) -> tuple[str, int]:
    """The name of a tensor and its type; its shape and place are skipped."""
    name, dimensions = _string(file), _number(file, "<I")
    if dimensions > _MOST_DIMENSIONS:
        raise ValueError(f"it claims a tensor of {dimensions} dimensions")
    file.seek(8 * dimensions, SEEK_CUR)
    kind = _number(file, "<I")
    file.seek(8, SEEK_CUR)
    return name, int(kind)


def _value(file: BinaryIO, kind: int) -> Any:
    """A value of metadata; for long arrays and arrays of text only the length."""
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _number(file, _layout(kind))
    inner, length = _number(file, "<I"), _number(file, "<Q")
    if inner == _STRING:
        for _ in range(length):  # a file that ends sooner ends this
            _string(file)
        return Table(length)
    if length > _SHORT:
        file.seek(length * struct.calcsize(_layout(inner)), SEEK_CUR)
        return Table(length)
    return tuple(_number(file, _layout(inner)) for _ in range(length))


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


_REGISTRY, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_MODEL, _ADAPTER = "application/vnd.ollama.image.model", "application/vnd.ollama.image.adapter"
_NAME_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_MOST_LISTED = 12


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A model as `ollama list` names it, its GGUF file, and LoRA adapters that go with it."""

    name: str
    file: Path
    adapters: tuple[Path, ...]
    size: int


OLLAMA_SERVICE_STORE = "/usr/share/ollama/.ollama/models"
"""Where Ollama's Linux service keeps its models."""


def ollama_store() -> Path:
    """Ollama's folder of models: $OLLAMA_MODELS, the user's folder, or else the folder of Ollama's Linux service."""
    if named := os.environ.get("OLLAMA_MODELS"):
        return Path(named).expanduser()
    own = Path.home() / ".ollama" / "models"
    # os.path, because a folder that this user may not read is none, and no error
    if not os.path.isdir(own / "manifests") and os.path.isdir(os.path.join(OLLAMA_SERVICE_STORE, "manifests")):
        return Path(OLLAMA_SERVICE_STORE)
    return own


def ollama_models() -> tuple[OllamaModel, ...]:
    """Every model in the store that can be read, by name."""
    return tuple(model for name, path in sorted(_manifests().items()) if (model := _read(name, path)) is not None)


def ollama_model(name: str, member: str) -> OllamaModel:
    """The model of a name such as "llama3.2:3b". Raises `MemberLoadError`, which says what is there."""
    manifests = _manifests()
    path = manifests.get(_short(name))
    if path is None:
        there = list(manifests)
        similar = difflib.get_close_matches(_short(name), there, 1)
        hint = f"did you mean {similar[0]!r}?" if similar else f"there are {_listed(there)}" if there else "it is empty"
        raise MemberLoadError(
            f"member {member!r}: Ollama's store {ollama_store()} has no model {name!r}: {hint} "
            f"(`ollama pull {name}` fetches it)"
        )
    model = _read(_short(name), path)
    if model is None:
        raise MemberLoadError(
            f"member {member!r}: Ollama's model {name!r} has no whole GGUF file in {ollama_store()} (some of its "
            "models are in formats that only its own engine reads): pull it again, or name a GGUF file"
        )
    return model


def _short(name: str) -> str:
    """The name as `ollama list` writes it: with a tag, and without the registry and namespace that are its defaults."""
    parts = name.strip().split("/")
    if ":" not in parts[-1]:
        parts[-1] += f":{_TAG}"
    for default in (_REGISTRY, _NAMESPACE):
        if len(parts) > 1 and parts[0] == default:
            del parts[0]
    return "/".join(parts)


def _manifests() -> dict[str, Path]:
    """The manifests of the store by name."""
    root = ollama_store() / "manifests"
    manifests: dict[str, Path] = {}
    for path in root.glob("*/*/*/*"):
        parts = path.relative_to(root).parts
        if path.is_file() and all(_NAME_PART.fullmatch(part) for part in parts):
            manifests[_short("/".join(parts[:-1]) + f":{parts[-1]}")] = path
    return manifests


def _read(name: str, manifest: Path) -> OllamaModel | None:
    """The model of a manifest; None where its file is missing, or is no GGUF file."""
    try:
        data = json.loads(manifest.read_text("utf-8"))
        layers = list(_layers(data))
        [file] = [path for kind, path in layers if kind == _MODEL]
        with file.open("rb") as opened:
            is_gguf = opened.read(4) == b"GGUF"
    except (OSError, ValueError):
        return None
    adapters = tuple(path for kind, path in layers if kind == _ADAPTER)
    return OllamaModel(name, file, adapters, file.stat().st_size) if is_gguf else None


def _layers(data: Any) -> Iterator[tuple[str, Path]]:
    """Kinds of layers and their files. A digest from a manifest cannot leave the store's folder."""
    layers = data.get("layers") if isinstance(data, Mapping) else None
    for layer in layers if isinstance(layers, list) else ():
        match = _DIGEST.fullmatch(str(layer.get("digest"))) if isinstance(layer, Mapping) else None
        if match is not None:
            yield str(layer.get("mediaType")), ollama_store() / "blobs" / f"sha256-{match[1]}"


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_LISTED
    return ", ".join(sorted(names)[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


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
    digest = hashlib.sha256(f"{gguf.resolve()}/{state.st_size}/{state.st_mtime_ns}".encode()).hexdigest()[:24]
    target = cache_folder(cache_dir) / f"{gguf.stem[:80]}-{digest}-tokenizer-{_FORMAT}"
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
    """The result for the file in this state: size and modification time only show when it has to be read again."""
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
    """Raises `MemberLoadError` if the files lack weights, which transformers fills with random numbers.

    `read`: the loading information of `from_pretrained(…, output_loading_info=True)`.
    """
    missing = sorted(read["missing_keys"])
    if not missing:
        return
    total = len(model.state_dict())
    names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    kind, stated = type(model).__name__, getattr(model.config, "architectures", None) or []
    hint = f" Its configuration says {stated[0]}, which may be no causal language model." if kind not in stated else ""
    raise MemberLoadError(
        f"{source} lacks {len(missing)} of the {total} tensors of {kind}: {names}.{hint if stated else ''} "
        "Fetch the files again, or name a model that is whole"
    )


def _joined(parts: Sequence[Path], target: Path) -> Path:
    """The parts of a model as one file, because transformers reads no others. Raises `MemberLoadError`."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    readers = [GGUFReader(part) for part in parts]
    first = readers[0].fields
    tensors, stated = sum(len(reader.tensors) for reader in readers), first.get("split.tensors.count")
    if stated is not None and tensors != int(stated.contents()):
        raise MemberLoadError(
            f"{parts[0]} and its other parts have {tensors} of {stated.contents()} tensors: fetch them again"
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
"""Number of words, and letters of each, that are checked."""


def spells_out(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether words that are tokens become more than a token for every two letters: merges were lost."""
    step = max(1, len(tokenizer) // (50 * _SAMPLE))
    texts = (str(tokenizer.decode([number])) for number in range(0, len(tokenizer), step))
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
    return any(kind not in _WHOLE_TENSORS for kind in gguf_head(gguf, whole=False).tensors.values())


def has_tensor(parts: Sequence[Path], name: str) -> bool:
    """Whether one of the parts of a model holds a tensor of this name."""
    return any(name in gguf_head(part, whole=False).tensors for part in parts)


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
    local = cached[0]
    if not isinstance(local, str) or not all(isinstance(part, str) for part in cached):
        raise MemberLoadError(
            f"member {config.label!r}: the configuration of a GGUF model is in its file, which is not here yet: "
            f"hf download {config.model} {' '.join(names)}"
        )
    return Path(local)


def _parts_in_repository(file: str) -> list[str]:
    """The paths of all parts of a file in a repository or folder."""
    folder, slash, name = file.rpartition("/")
    return [f"{folder}{slash}{part}" for part in part_names(name)]
