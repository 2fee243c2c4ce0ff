"""Forks, dropped models and contexts: an engine belongs to one process, and unused engines can be freed."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from langchain_specfuse import ChatSpecFuse
from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import (
    EngineClosedError,
    EnsembleConfig,
    EnsembleEngine,
    MemberConfig,
    Message,
    RequestError,
    SamplingParams,
    close_idle_engines,
    lease_engine,
)
from specfuse_shared.errors import ConfigError
from specfuse_shared.loading.gguf import gguf_head
from tests.support.tiny import byte_level_tokenizer, metaspace_tokenizer, save_model

FORKED = """
import asyncio, os, sys
from langchain_specfuse import ChatSpecFuse
from specfuse_shared import EngineClosedError, EnsembleEngine

model = ChatSpecFuse(members=sys.argv[1:], max_tokens=6)
given = ChatSpecFuse(engine=EnsembleEngine(sys.argv[1:]), max_tokens=6)
before = [model.invoke("Hello").content, given.invoke("Hello").content]
child = os.fork()
if child == 0:
    try:
        same = [model.invoke("Hello").content, given.invoke("Hello").content] == before
        same = same and given.engine.closed
        try:
            asyncio.run(given.engine.agenerate("Hello"))
            os._exit(6)
        except EngineClosedError as error:
            same = same and "forked" in str(error)
        given.engine.generate("Hello")
    except EngineClosedError as error:
        os._exit(0 if same and "forked" in str(error) else 3)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(4)
    os._exit(5)
assert os.waitpid(child, 0)[1] == 0, "the child process could not answer"
assert model.invoke("Hello").content == before[0]
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    chat = save_model("qwen3", byte_level_tokenizer(), tmp_path_factory.mktemp("chat"), max_position_embeddings=2048)
    base = save_model("llama", metaspace_tokenizer(), tmp_path_factory.mktemp("base"), 1, max_position_embeddings=1024)
    return [str(chat), str(base)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.skipif(sys.platform == "darwin", reason="the libraries of macOS that compute are not safe after a fork")
@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_forked_process_makes_another_engine(folders: list[str], threads: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", FORKED, *folders], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


def test_a_model_creates_its_engine_at_the_first_call(folders: list[str]) -> None:
    config = EnsembleConfig(folders)
    for kind in (ChatSpecFuse, SpecFuseLLM):
        model = kind(config=config, max_tokens=8)
        assert model._leases == []
        assert model._context_limit() == 1024
        assert model._leases == []


def test_idle_engines_can_be_freed(folders: list[str]) -> None:
    close_idle_engines()
    model = ChatSpecFuse(members=folders, max_tokens=4)
    model.invoke("Hello")
    engine = model._resolve_engine()
    assert close_idle_engines() == 0
    del model
    gc.collect()
    assert not engine.closed
    assert close_idle_engines() == 1
    assert engine.closed


def test_models_are_context_managers(folders: list[str]) -> None:
    with ChatSpecFuse(members=folders, max_tokens=4) as chat, SpecFuseLLM(members=folders, max_tokens=4) as llm:
        chat.invoke("Hello")
        llm.complete("Hello")
        engine = chat._resolve_engine()
        assert llm._resolve_engine() is engine
    assert engine.closed


def test_loading_is_public_and_excluded_from_timeouts(folders: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    with SpecFuseLLM(members=folders, max_tokens=4) as model:
        assert model.load(lambda progress: stages.append(progress.stage)) is model
        assert "ready" in stages
    engine = EnsembleEngine(folders)
    load = engine.load

    def slow() -> EnsembleEngine:
        loaded = load()
        time.sleep(1.5)
        return loaded

    monkeypatch.setattr(engine, "load", slow)
    with engine:
        assert engine.generate("Hello", SamplingParams(max_tokens=2), timeout=1.4).text


def test_an_engine_accepts_members_and_settings(folders: list[str]) -> None:
    engine = EnsembleEngine(folders, segment_tokens=3, exit="never")
    assert engine.config == EnsembleConfig(folders, segment_tokens=3, exit="never")
    with pytest.raises(ConfigError, match="did you mean 'segment_tokens'"):
        EnsembleEngine(folders, segment_token=3)
    with pytest.raises(ConfigError, match="has its own"):
        EnsembleEngine(EnsembleConfig(folders), exit="never")


def test_messages_and_tools_can_be_dictionaries_in_openais_form(folders: list[str]) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "3 + 4"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]
    with EnsembleEngine(folders) as engine:
        text = engine.generate(messages, SamplingParams(max_tokens=60), tools=[tool], tool_choice="add").text
        assert text.startswith('<tool_call>{"name": "add"')
        read = [Message.from_dict(message) for message in messages]
        assert [(m.role, m.content) for m in read[:2]] == [("system", "Be brief."), ("user", "3 + 4?")]
        assert (read[2].tool_calls[0].name, read[2].tool_calls[0].arguments) == ("add", {"a": 3})
        assert engine.count_tokens(messages) == engine.count_tokens(read)
        assert engine.count_tokens(messages, tools=[tool]) > engine.count_tokens(messages)
        assert engine.tokenize("Hello")
        with pytest.raises(RequestError, match="image_url"):
            engine.generate([{"role": "user", "content": [{"type": "image_url"}]}])
        with pytest.raises(RequestError, match="web_search"):
            engine.generate("Hello", tools=[{"type": "web_search"}])
        with pytest.raises(RequestError, match="'texts'"):
            engine.generate([{"role": "user", "texts": "Hello"}])
        broken = {"role": "assistant", "tool_calls": [{**call, "function": {"name": "x", "arguments": "["}}]}
        assert engine.generate([{"role": "user", "content": "3 + 4?"}, broken], SamplingParams(max_tokens=4)).text


def test_contexts_are_known_before_anything_is_loaded(folders: list[str], tmp_path: Path) -> None:
    engine = EnsembleEngine([MemberConfig(folders[0], max_context=300), folders[1]])
    assert engine.context_limit == 300
    assert EnsembleEngine(folders).context_limit == 1024
    assert EnsembleEngine(["nobody/has-this-model"]).context_limit is None
    assert repr(engine).endswith("not loaded)")
    demo = ChatSpecFuse(members="demo")
    assert demo._context_limit() == 8192
    for member in demo._ensemble().member_configs:
        assert gguf_head(Path(member.model)).context in (8192, 32768)
    assert demo._leases == []


def test_a_closed_engine_raises_a_named_error(folders: list[str]) -> None:
    with lease_engine(EnsembleConfig(folders)) as lease:
        engine = lease.engine
    assert engine.closed
    with pytest.raises(EngineClosedError, match="closed"):
        engine.generate("Hello")
