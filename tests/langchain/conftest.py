"""Fixtures of the LangChain tests: an ensemble that answers noise immediately."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from langchain_specfuse import ChatSpecFuse
from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig
from tests.support.reciting import reciting_model, reciting_tokenizer
from tests.support.tiny import save_pair


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnsembleEngine]:
    """Two members with random weights."""
    pair = save_pair(tmp_path_factory, max_position_embeddings=2048)
    members = [MemberConfig(str(folder), name=name) for name, folder in pair.items()]
    with EnsembleEngine(EnsembleConfig(members=members, max_concurrent=4, first_segment_tokens=5)) as engine:
        yield engine.load()


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnsembleEngine]:
    """A member that answers everything with a few words and a call; the call's schema forces its arguments."""
    folder, speech = tmp_path_factory.mktemp("caller"), "Let me see . <tool_call>"
    tokenizer = reciting_tokenizer(speech)
    reciting_model(tokenizer, speech, 9.0, endless=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with EnsembleEngine([str(folder)]) as engine:
        yield engine.load()


@pytest.fixture
def chat(tiny: EnsembleEngine) -> ChatSpecFuse:
    """A chat model over `tiny`."""
    return ChatSpecFuse(engine=tiny, max_tokens=12)
