"""How an LLM describes itself: in traces, dictionaries and planners; and its errors for unsupported options."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool

from llamaindex_specfuse import SpecFuseLLM
from llamaindex_specfuse.base import PROMPT_RESERVE
from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig
from specfuse_shared.errors import ConfigError, EngineClosedError
from tests.llamaindex.instrumentation import Listener
from tests.support.serving import serving
from tests.support.tiny import CHAT_TEMPLATE


def test_a_trace_has_the_attributes_that_exporters_read_and_no_local_path(
    tiny_llm: SpecFuseLLM, listener: Listener
) -> None:
    llm = tiny_llm.model_copy(update={"temperature": 0.5, "seed": 1, "max_tokens": 6})
    last = llm.chat([ChatMessage("Hello")])
    [started] = listener.of("LLMChatStartEvent")
    attributes = started.model_dict
    assert (attributes["model"], attributes["temperature"], attributes["max_tokens"]) == ("chat+base", 0.5, 6)
    assert last.raw["model"] == "chat+base"
    written = llm.metadata.model_dump(exclude_unset=True)  # OpenInference's invocation parameters
    assert (written["model_name"], written["temperature"], written["max_tokens"]) == ("chat+base", 0.5, 6)
    assert set(last.raw["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert llm.engine is not None
    assert str(Path(llm.engine.config.member_configs[0].model).parent) not in json.dumps(attributes, default=str)


def test_an_llm_can_be_restored_from_its_dictionary(tiny_llm: SpecFuseLLM) -> None:
    again = SpecFuseLLM.from_dict(tiny_llm.to_dict())
    assert again._ensemble() == tiny_llm._ensemble()
    assert again.model == tiny_llm.model
    assert SpecFuseLLM.from_json(SpecFuseLLM(base_url="https://x", api_key="k").to_json()).base_url == "https://x"


def test_an_llm_can_be_named_by_model(tiny_llm: SpecFuseLLM) -> None:
    assert SpecFuseLLM(model="demo").members == "demo"
    assert SpecFuseLLM(engine=tiny_llm.engine, model=tiny_llm.model).model == tiny_llm.model
    with pytest.raises(ConfigError, match=r"members=\['Qwen/Qwen3-8B'\]"):
        SpecFuseLLM(engine=tiny_llm.engine, model="Qwen/Qwen3-8B")
    assert SpecFuseLLM(model="Qwen/Qwen3-8B")._ensemble().names == ("Qwen3-8B",)
    assert SpecFuseLLM(model=["a/b", "c/d"])._ensemble().names == ("b", "d")
    with pytest.raises(ConfigError, match=r"by name: write members='demo'"):
        SpecFuseLLM("demo")  # type: ignore[call-arg]


def test_the_sizes_of_a_servers_model_are_requested_before_they_are_read(tiny_llm: SpecFuseLLM) -> None:
    assert tiny_llm.engine is not None
    with serving({"tiny": tiny_llm.engine}) as client:
        llm = SpecFuseLLM(base_url=str(client.base_url), max_tokens=20)
        assert llm.model == "specfuse"
        assert llm.metadata.context_window == tiny_llm.engine.context_limit
        assert llm.metadata.model_name == llm.model == "tiny"
        assert SpecFuseLLM(base_url=str(client.base_url), max_tokens=4).complete("Hi").raw["model"] == "tiny"
        long = SpecFuseLLM(base_url=str(client.base_url), max_tokens=4000).metadata
        assert long.num_output == long.context_window - PROMPT_RESERVE
        with pytest.raises(ConfigError, match="holds 500 tokens"):
            _ = SpecFuseLLM(base_url=str(client.base_url), context_window=500).metadata
    with pytest.raises(EngineClosedError, match="no server answers"):
        _ = SpecFuseLLM(base_url="http://127.0.0.1:9").metadata


def test_ledger_none_removes_the_ledger(tiny_llm: SpecFuseLLM, listener: Listener) -> None:
    llm = tiny_llm.model_copy(update={"ledger": "none", "max_tokens": 8})
    assert all("specfuse" not in response.raw for response in llm.stream_complete("Hello"))
    assert listener.of("SpecFuseSegmentEvent")


def test_thinking_tokens_are_counted_as_reasoning(tiny_members: list[MemberConfig]) -> None:
    thinks = replace(tiny_members[0], chat_template=CHAT_TEMPLATE, thinking=("<think>", "</think>"))
    with EnsembleEngine(EnsembleConfig([thinks, tiny_members[1]])) as engine:
        llm = SpecFuseLLM(engine=engine, max_tokens=6, max_thinking_tokens=8, ledger="full")
        raw = llm.complete("Hello").raw
    thoughts = raw["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert thoughts == raw["specfuse"]["usage"]["members"]["chat"]["thinking"] > 0
    assert raw["usage"]["completion_tokens"] == raw["specfuse"]["usage"]["completion_tokens"] + thoughts


@pytest.mark.parametrize(
    ("option", "reported"),
    [({"num_predict": 5}, "max_tokens"), ({"num_ctx": 5}, "max_context"), ({"format": "json"}, "structured_predict"),
     ({"keep_alive": 1}, r"close\(\)"), ({"n": 2}, "several times"), ({"max_completion_tokens": 5}, "max_tokens"),
     ({"request_timeout": 5}, "timeout"), ({"json_mode": True}, "structured_predict"),
     ({"thinking": True}, "MemberConfig"), ({"frequency_penalty": 0.5}, "repetition_penalty")],
)  # fmt: skip
def test_an_unsupported_option_gets_a_helpful_error(
    tiny_llm: SpecFuseLLM, option: dict[str, Any], reported: str
) -> None:
    for make in (lambda: SpecFuseLLM(engine=tiny_llm.engine, **option), lambda: tiny_llm.complete("Hi", **option)):
        with pytest.raises(ConfigError, match=reported):
            make()
    assert tiny_llm.complete("Hi", n=1, presence_penalty=0.0, thinking=False, max_tokens=3).text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # LlamaIndex's agents use old pydantic
@pytest.mark.parametrize("several", [True, False])
async def test_an_agent_gets_as_many_calls_as_it_requests(tiny_llm: SpecFuseLLM, several: bool) -> None:
    """Random members do not stop after one call; agents allow several by default."""
    tools = [FunctionTool.from_defaults(lambda: "now", name="now", return_direct=True)]
    settings = {} if several else {"allow_parallel_tool_calls": False}
    llm = tiny_llm.model_copy(update={"temperature": 1.0, "seed": 2})
    agent = FunctionAgent(tools=tools, llm=llm, initial_tool_choice="now", **settings)
    output: Any = await agent.run("When?")
    assert (len(output.tool_calls) > 1) is several
