"""What a GGUF file says of itself, read from its head without the tables behind it.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from os import SEEK_CUR
from pathlib import Path
from typing import Any, BinaryIO

from specfuse_shared.errors import MemberLoadError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 65_536
"""Of a head; real ones have some fifty."""
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

    `values` are its metadata but for long tables, with the family's name cut off. Everything is as the file states it;
    0 or None where it does not.
    """

    size: int
    values: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", ""))

    @property
    def context(self) -> int | None:
        """Tokens of context."""
        return self._number("context_length") or None

    @property
    def whole_numbers(self) -> str | None:
        """The number format of weights that are not quantised; None where they are, or where nobody knows."""
        return _WHOLE.get(int(self.values.get("general.file_type", -1)))

    @property
    def quantization(self) -> str | None:
        """The name of the quantisation of most weights; None for whole numbers, or where nobody tells."""
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
            f"{file} is one of {len(parts)} parts of a model, and {missing[0]}{more} is not beside it: put all parts "
            "into one folder"
        )
    said = gguf_head(file, whole=False).values.get("split.count", 0)
    if len(parts) != max(said, 1):
        raise MemberLoadError(
            f"{file} says that it is one of {said} parts of a model: name the parts as they were, such as "
            f"{file.stem}-00001-of-{said:05}.gguf"
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
    """Of the file in this state: `size` and time of change only tell when it has to be read again."""
    values: dict[str, Any] = {}
    with path.open("rb") as file:
        magic, _, _, count = struct.unpack("<4sIQQ", file.read(24))
        if magic != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if count > _MOST_ENTRIES:
            raise ValueError(f"it claims {count} entries")
        for _ in range(count):
            key, kind = _string(file), _number(file, "<I")
            values[key] = _value(file, kind)
    named = (key.removesuffix(".context_length") for key in values if key.endswith(".context_length"))
    family = str(values.get("general.architecture") or next(named, "")) + "."
    return GgufHead(size, {key.removeprefix(family): value for key, value in values.items()})


def _value(file: BinaryIO, kind: int) -> Any:
    """A value of metadata; of long arrays and those of texts only their length."""
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
