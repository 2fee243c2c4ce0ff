"""Two tiny members of different make: a byte-level chat model and a metaspace base model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from specfuse_shared import EnsembleEngine
from specfuse_shared.text.chat_template import PromptEncoder
from specfuse_shared.text.codec import Codec
from tests.engine.comparing import local_members
from tests.engine.tiny import byte_level_tokenizer, metaspace_tokenizer


@pytest.fixture(scope="session")
def static_engine(tiny_engine: EnsembleEngine) -> Iterator[EnsembleEngine]:
    """The same members in static execution."""
    with EnsembleEngine(replace(tiny_engine.config, execution="static")) as engine:
        yield engine.load()


@pytest.fixture(scope="session")
def codecs(exact_engine: EnsembleEngine) -> dict[str, Codec]:
    """Codecs of both real members and of both tiny tokenizers."""
    found = {m.name: m.codec for m in local_members(exact_engine)}
    for tokenizer in (byte_level_tokenizer(), metaspace_tokenizer()):
        encoder = PromptEncoder(tokenizer, None, {}, "tiny")
        found[encoder.kind] = encoder.codec
    return found
