"""Fixtures of the LlamaIndex tests: the LLM over the real demo ensemble, and listeners to LlamaIndex's events."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llama_index_instrumentation import get_dispatcher

from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import EnsembleEngine
from tests.llamaindex.listening import Callbacks, Listener


@pytest.fixture(scope="session")
def llm(demo_engine: EnsembleEngine) -> SpecFuseLLM:
    return SpecFuseLLM(engine=demo_engine, max_tokens=16)


@pytest.fixture
def listener() -> Iterator[Listener]:
    root, listening = get_dispatcher(), Listener()
    root.add_event_handler(listening)
    yield listening
    root.event_handlers.remove(listening)


@pytest.fixture
def callbacks() -> Callbacks:
    return Callbacks()
