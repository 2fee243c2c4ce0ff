"""A server over two tiny members with random weights, which every test shares, and its address."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig
from tests.support.serving import serving
from tests.support.tiny import byte_level_tokenizer, metaspace_tokenizer, save_model


@pytest.fixture(scope="session")
def tiny_members(tmp_path_factory: pytest.TempPathFactory) -> list[MemberConfig]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    shape = {"max_position_embeddings": 4096}
    chat = save_model("qwen3", byte_level_tokenizer(), folder / "chat", **shape)
    base = save_model("llama", metaspace_tokenizer(), folder / "base", seed=1, **shape)
    return [MemberConfig(str(folder), name=folder.name, dtype="float32") for folder in (chat, base)]


@pytest.fixture(scope="session")
def tiny(tiny_members: list[MemberConfig]) -> Iterator[EnsembleEngine]:
    with EnsembleEngine(EnsembleConfig(tiny_members, when_busy="raise", first_segment_tokens=5)) as engine:
        yield engine.load()


@pytest.fixture(scope="session")
def client(tiny: EnsembleEngine) -> Iterator[httpx.Client]:
    """A client of a server without a key that offers "tiny", "tiny/chat" and "tiny/base"."""
    with serving({"tiny": tiny}) as result:
        yield result


@pytest.fixture(scope="module")
def address(client: httpx.Client) -> str:
    """The `base_url` for OpenAI's clients."""
    return f"{client.base_url}/v1"


@pytest.fixture(scope="module")
def sdk(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as result:
        yield result


@pytest.fixture(scope="session")
def demo(demo_engine: EnsembleEngine) -> Iterator[httpx.Client]:
    """A server over the real demo ensemble."""
    with serving({"demo": demo_engine}, max_tokens=48) as result:
        yield result
