"""Both frameworks over an ensemble of two members on llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_tests.integration_tests import ChatModelIntegrationTests
from llama_index.core import Document, PromptTemplate, SummaryIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from langchain_specfuse import ChatSpecFuse
from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import EnsembleConfig, EnsembleEngine, SamplingParams
from tests.langchain.standard import Supported
from tests.support.llamacpp import member_config
from tests.support.tiny import byte_level_tokenizer, metaspace_tokenizer
from tests.support.tiny_gguf import write_gguf

pytest.importorskip("llama_cpp")

QUESTION = "When does the tide come?"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, cache_dir: str) -> Iterator[EnsembleEngine]:
    """Random members with a context that holds the frameworks' prompts."""
    folder: Path = tmp_path_factory.mktemp("wide")
    makes = {"chat": byte_level_tokenizer(), "base": metaspace_tokenizer()}
    members = [
        member_config(write_gguf(folder / f"{name}.gguf", "llama", tokenizer, seed, context=4096))
        for seed, (name, tokenizer) in enumerate(makes.items())
    ]
    with EnsembleEngine(EnsembleConfig(members, cache_dir=cache_dir, first_segment_tokens=5)) as engine:
        yield engine.load()


class TestStandardSuite(Supported, ChatModelIntegrationTests):
    """The standard tests that random answers can pass; forced calls and values are tested below."""

    has_tool_calling = has_structured_output = supports_json_mode = False
    supports_model_override = False

    @pytest.fixture(autouse=True)
    def _use_the_engine(self, engine: EnsembleEngine) -> None:
        type(self).engine = engine

    engine: EnsembleEngine | None = None

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine} if self.engine else {"members": "demo"}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"max_tokens": 48}


class Tide(BaseModel):
    """When a tide comes."""

    port: Literal["Ryde", "Cowes"]
    high: bool


@tool
def tide(port: Literal["Ryde", "Cowes"]) -> str:
    """When the tide comes."""
    return f"at nine, in {port}"


async def test_llamaindex_has_the_engines_answers(engine: EnsembleEngine) -> None:
    llm = SpecFuseLLM(engine=engine, max_tokens=24)
    expected = engine.generate(QUESTION, SamplingParams(max_tokens=24)).text
    requests = [ChatMessage(role="user", content=QUESTION)]
    assert llm.complete(QUESTION).text == expected
    assert "".join(str(piece.delta) for piece in llm.stream_complete(QUESTION)) == expected
    assert (await llm.acomplete(QUESTION)).text == expected
    assert llm.chat(requests).message.content == expected
    assert "".join([str(piece.delta) async for piece in await llm.astream_chat(requests)]) == expected
    index = SummaryIndex.from_documents([Document(text="The tide comes to Ryde at nine.")])
    engine_of = index.as_query_engine(llm=llm, streaming=True)
    assert "".join(engine_of.query("When?").response_gen)


def test_values_fit_their_schema(engine: EnsembleEngine) -> None:
    chat = ChatSpecFuse(engine=engine, max_tokens=200)
    result = chat.with_structured_output(Tide).invoke(QUESTION)
    assert isinstance(result, Tide)
    llm = SpecFuseLLM(engine=engine, max_tokens=200)
    assert (
        llm.structured_predict(Tide, PromptTemplate("{question}"), question=QUESTION)
        == llm.as_structured_llm(Tide).complete(QUESTION).raw
    )


def test_a_forced_call_is_made_and_its_result_is_in_the_next_prompt(engine: EnsembleEngine) -> None:
    chat = ChatSpecFuse(engine=engine, max_tokens=120)
    requests: list[BaseMessage] = [HumanMessage(QUESTION)]
    called = chat.bind_tools([tide], tool_choice="any").invoke(requests)
    [call] = called.tool_calls
    assert call["name"] == "tide"
    result = tide.invoke(call)
    assert result.content in ("at nine, in Ryde", "at nine, in Cowes")
    without = chat.invoke([*requests, called, ToolMessage("?", tool_call_id=str(call["id"]))])
    answer = chat.invoke([*requests, called, result])
    assert answer.text
    assert answer.text != without.text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # LlamaIndex's agents use old pydantic
async def test_an_agent_of_llamaindex_calls_its_tool(engine: EnsembleEngine) -> None:
    recorded: list[str] = []

    def tide_at(port: str, high: bool) -> str:
        recorded.append(port)
        return "at nine"

    called = FunctionTool.from_defaults(tide_at, "tide_at", "When the tide comes.", fn_schema=Tide)
    llm = SpecFuseLLM(engine=engine, max_tokens=120)
    agent = FunctionAgent(tools=[called], llm=llm, initial_tool_choice="tide_at", timeout=120)
    answer = await agent.run(QUESTION, max_iterations=3)
    assert len(recorded) == 1
    assert str(answer)
