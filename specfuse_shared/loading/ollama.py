"""Models in Ollama's store on this machine: names, files, adapters. Nothing is asked of its server, nothing fetched.

A manifest, `manifests/<registry>/<namespace>/<name>/<tag>`, is JSON that lists layers; a layer's file is in `blobs`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specfuse_shared.errors import MemberLoadError

_REGISTRY, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_MODEL, _ADAPTER = "application/vnd.ollama.image.model", "application/vnd.ollama.image.adapter"
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_MOST_LISTED = 12


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A model as `ollama list` names it, its GGUF file, and LoRA adapters that go with it."""

    name: str
    file: Path
    adapters: tuple[Path, ...]
    size: int


def ollama_store() -> Path:
    """$OLLAMA_MODELS, or the user's own store."""
    return Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models").expanduser()


def ollama_models() -> tuple[OllamaModel, ...]:
    """Every model in the store that can be read, by name."""
    return tuple(found for name, path in sorted(_manifests().items()) if (found := _read(name, path)) is not None)


def ollama_model(name: str, member: str) -> OllamaModel:
    """The model of a name such as "llama3.2:3b". Raises `MemberLoadError`, which says what is there."""
    manifests = _manifests()
    path = manifests.get(_short(name))
    if path is None:
        there = list(manifests)
        near = difflib.get_close_matches(_short(name), there, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {_listed(there)}" if there else "it is empty"
        raise MemberLoadError(
            f"member {member!r}: Ollama's store {ollama_store()} has no model {name!r}: {hint} "
            f"(`ollama pull {name}` fetches it)"
        )
    found = _read(_short(name), path)
    if found is None:
        raise MemberLoadError(
            f"member {member!r}: Ollama's model {name!r} has no whole GGUF file in {ollama_store()} (some of its "
            "models are in formats that only its own engine reads): pull it again, or name a GGUF file"
        )
    return found


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
    found: dict[str, Path] = {}
    for path in root.glob("*/*/*/*"):
        parts = path.relative_to(root).parts
        if path.is_file() and all(_PART.fullmatch(part) for part in parts):
            found[_short("/".join(parts[:-1]) + f":{parts[-1]}")] = path
    return found


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
    """Kinds of layers and their files; whatever a manifest says, a digest is no way out of the store."""
    layers = data.get("layers") if isinstance(data, Mapping) else None
    for layer in layers if isinstance(layers, list) else ():
        match = _DIGEST.fullmatch(str(layer.get("digest"))) if isinstance(layer, Mapping) else None
        if match is not None:
            yield str(layer.get("mediaType")), ollama_store() / "blobs" / f"sha256-{match[1]}"


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_LISTED
    return ", ".join(sorted(names)[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
