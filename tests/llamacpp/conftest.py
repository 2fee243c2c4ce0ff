"""Tiny F32 GGUF files of several architectures, and members that llama.cpp runs from them, where it is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from specfuse_shared import EnsembleConfig, EnsembleEngine
from tests.support.llamacpp import FILES, member_config
from tests.support.tiny_gguf import write_gguf

collect_ignore_glob = [] if find_spec("llama_cpp") else ["test_*.py"]
"""The tests of llama.cpp need the extra "llamacpp"."""


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    return {
        name: write_gguf(folder / f"{name}.gguf", architecture, tokenizer(), seed)
        for name, (architecture, tokenizer, seed) in FILES.items()
    }


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("converted"))


@pytest.fixture(scope="module")
def llama_engine(files: Mapping[str, Path], cache_dir: str) -> Iterator[EnsembleEngine]:
    """Two members of different families on llama.cpp."""
    pytest.importorskip("llama_cpp")
    members = [member_config(files["llama"]), member_config(files["spoken"])]
    with EnsembleEngine(EnsembleConfig(members, segment_tokens=6, first_segment_tokens=None, cache_dir=cache_dir)) as e:
        yield e.load()
