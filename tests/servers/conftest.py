"""Two tiny members of different make, as local folders, and the ensemble of both in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig
from tests.engine.tiny import byte_level_tokenizer, metaspace_tokenizer, save_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "chat": save_model("qwen3", byte_level_tokenizer(), tmp_path_factory.mktemp("chat")),
        "base": save_model("llama", metaspace_tokenizer(), tmp_path_factory.mktemp("base"), seed=1),
    }


@pytest.fixture(scope="session")
def local_engine(folders: dict[str, Path]) -> Iterator[EnsembleEngine]:
    members = [MemberConfig(str(folder), name=name) for name, folder in folders.items()]
    with EnsembleEngine(EnsembleConfig(members, segment_tokens=6, exit="never")) as engine:
        yield engine.load()
