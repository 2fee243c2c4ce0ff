"""Fixtures of the LlamaIndex tests: the LLM over the real demo ensemble or tiny models, and listeners to its events."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llama_index_instrumentation import get_dispatcher

from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig
from specfuse_shared.errors import SpecFuseError
from tests.llamaindex.instrumentation import Callbacks, Failures, Listener
from tests.support.tiny import byte_level_tokenizer, metaspace_tokenizer, save_model


@pytest.fixture(scope="session")
def llm(demo_engine: EnsembleEngine) -> SpecFuseLLM:
    return SpecFuseLLM(engine=demo_engine, max_tokens=16)


@pytest.fixture(scope="session")
def tiny_members(tmp_path_factory: pytest.TempPathFactory) -> list[MemberConfig]:
    """Two random models that load quickly; tests check the form of their answers only."""
    shape, folder = {"max_position_embeddings": 4096}, tmp_path_factory.mktemp("tiny")
    chat = save_model("qwen3", byte_level_tokenizer(), folder / "chat", **shape)
    base = save_model("llama", metaspace_tokenizer(), folder / "base", seed=1, **shape)
    return [MemberConfig(str(chat), name="chat"), MemberConfig(str(base), name="base")]


@pytest.fixture(scope="session")
def tiny_llm(tiny_members: list[MemberConfig]) -> Iterator[SpecFuseLLM]:
    with EnsembleEngine(EnsembleConfig(members=tiny_members, first_segment_tokens=5)) as engine:
        yield SpecFuseLLM(engine=engine.load(), max_tokens=200)


@pytest.fixture
def listener() -> Iterator[Listener]:
    root, listening = get_dispatcher(), Listener()
    root.add_event_handler(listening)
    yield listening
    root.event_handlers.remove(listening)


@pytest.fixture
def callbacks() -> Callbacks:
    return Callbacks()


@pytest.fixture
def nothing_of_ours_fails(listener: Listener, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The test must call the LLM; no call may fail with our error, even if LlamaIndex would ignore it."""
    root, failures = get_dispatcher(), Failures()
    root.add_span_handler(failures)
    yield
    root.span_handlers.remove(failures)
    calls = listener.calls()
    assert calls
    for kind in ("Chat", "Completion"):
        assert calls.count(f"LLM{kind}StartEvent") == calls.count(f"LLM{kind}EndEvent")
    failed = [*failures.errors, *(event.exception for event in listener.of("ExceptionEvent"))]
    assert [error for error in failed if isinstance(error, SpecFuseError)] == []
    assert [record for record in caplog.records if record.name.startswith("llamaindex_specfuse")] == []
