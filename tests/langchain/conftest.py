"""Fixtures of the LangChain tests: an ensemble that answers nonsense in no time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from langchain_specfuse import ChatSpecFuse
from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig
from tests.engine.tiny import byte_level_tokenizer, metaspace_tokenizer, save_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnsembleEngine]:
    """Two members with random weights."""
    chat = save_model("qwen3", byte_level_tokenizer(), tmp_path_factory.mktemp("chat"), max_position_embeddings=2048)
    base = save_model(
        "llama", metaspace_tokenizer(), tmp_path_factory.mktemp("base"), seed=1, max_position_embeddings=2048
    )
    members = [MemberConfig(str(chat), name="chat"), MemberConfig(str(base), name="base")]
    with EnsembleEngine(EnsembleConfig(members=members, max_concurrent=4)) as engine:
        yield engine.load()


@pytest.fixture
def chat(tiny: EnsembleEngine) -> ChatSpecFuse:
    """A chat model over it."""
    return ChatSpecFuse(engine=tiny, max_tokens=12)
