"""One member on a real vLLM server, one on llama.cpp, one on transformers: a chain and an agent of each framework."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.documents import Document as Passage
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import Document, MockEmbedding, VectorStoreIndex
from llama_index.core.agent.workflow import AgentOutput, FunctionAgent, ToolCall

from langchain_specfuse import ChatSpecFuse
from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import EnsembleConfig, EnsembleEngine, FinishEvent, MemberConfig, demo_members
from specfuse_shared.loading.gguf import converted, gguf_file
from tests.servers import vllm_server
from tests.support.agents import HOURS, opening_hours

pytest.importorskip("llama_cpp")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not vllm_server.COMMAND, reason="$SPECFUSE_VLLM names no vllm command"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # LlamaIndex's agents use old pydantic
]
NAMES = ("on-vllm", "on-llama.cpp", "here")
FACTS = ["The observatory opens at seven in the evening.", "Tickets of the observatory cost nine euros."]
QUESTION = "When does the observatory open?"
VISIT = "What are the opening hours on Friday?"


@pytest.fixture(scope="module")
def engine() -> Iterator[EnsembleEngine]:
    smol, gemma = demo_members()
    file = gguf_file(smol)
    assert file is not None
    folder = str(converted(file, None, lambda stage: None))
    with vllm_server.vllm_server(
        folder, "bfloat16", "--block-size", "32", "--enable-scale-out", *vllm_server.GUIDANCE
    ) as url:
        members = [
            MemberConfig(folder, name="on-vllm", server=url),
            replace(smol, name="on-llama.cpp", adapter=None, backend="llama.cpp"),
            replace(gemma, name="here", weight=4.0),  # only this member was trained on the results of tools
        ]
        with EnsembleEngine(EnsembleConfig(members)) as engine:
            yield engine.load()


def assert_all_three(record: Mapping[str, Any]) -> None:
    """Every member drafted for this answer, and none failed."""
    assert record["warnings"] == []
    assert {name: usage["drafted"] > 0 for name, usage in record["usage"]["members"].items()} == dict.fromkeys(
        NAMES, True
    )


def test_each_member_runs_in_its_configured_place(engine: EnsembleEngine) -> None:
    reports = {report.name: report for report in engine.describe()}
    assert reports["on-vllm"].device.startswith("http://127.0.0.1:")
    assert reports["on-vllm"].verification == "tokens"
    assert {name: reports[name].backend for name in ("on-llama.cpp", "here")} == {
        "on-llama.cpp": "llama.cpp",
        "here": "transformers",
    }


async def test_a_chain_of_langchain_streams_the_answer_of_all_three(engine: EnsembleEngine) -> None:
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    store.add_documents([Passage(fact) for fact in FACTS])
    prompt = ChatPromptTemplate.from_template("{context}\n\nAnswer briefly from this text: {question}")
    llm = ChatSpecFuse(engine=engine, max_tokens=24, ledger="full")
    results = {"context": store.as_retriever(search_kwargs={"k": 2}), "question": RunnablePassthrough()}
    pieces = [piece async for piece in (results | prompt | llm | StrOutputParser()).astream(QUESTION)]
    assert len(pieces) > 1
    assert "seven" in "".join(pieces)
    message = (results | prompt | llm).invoke(QUESTION)
    assert message.text == "".join(pieces)
    assert_all_three(message.response_metadata["specfuse"])


def test_a_query_engine_of_llamaindex_streams_the_same_way(engine: EnsembleEngine) -> None:
    index = VectorStoreIndex.from_documents([Document(text=fact) for fact in FACTS], embed_model=MockEmbedding(8))
    llm = SpecFuseLLM(engine=engine, max_tokens=24)
    response = index.as_query_engine(llm=llm, streaming=True, similarity_top_k=2).query(QUESTION)
    assert "seven" in "".join(response.response_gen)


@wrap_model_call
def one_call(request: Any, handler: Any) -> Any:
    """A choice that makes small members call first, and answer then."""
    answering = request.messages[-1].type == "tool"
    return handler(request.override(tools=[]) if answering else request.override(tool_choice="any"))


def test_an_agent_of_langchain_calls_its_tool_and_answers(engine: EnsembleEngine) -> None:
    llm = ChatSpecFuse(engine=engine, max_tokens=60, ledger="full")
    agent: Any = create_agent(llm, [opening_hours], middleware=[one_call])
    state = agent.invoke({"messages": [("user", VISIT)]}, {"recursion_limit": 8})
    first, *_ = [message for message in state["messages"] if message.type == "ai"]
    assert [(call["name"], call["args"]) for call in first.tool_calls] == [("opening_hours", {"day": "Friday"})]
    assert_all_three(first.response_metadata["specfuse"])
    assert "19" in state["messages"][-1].text


async def test_an_agent_of_llamaindex_calls_its_tool_and_answers(engine: EnsembleEngine) -> None:
    llm = SpecFuseLLM(engine=engine, max_tokens=60, ledger="full")
    agent = FunctionAgent(tools=[HOURS], llm=llm, timeout=300, initial_tool_choice="opening_hours")
    called: list[Any] = []
    answers: list[Any] = []
    handler = agent.run(VISIT, max_iterations=3)
    async for event in handler.stream_events():
        if type(event) is ToolCall:
            called.append(event.tool_kwargs)
        elif isinstance(event, AgentOutput):
            answers.append(event)
    assert called[0] == {"day": "Friday"}
    assert_all_three(answers[0].raw["specfuse"])
    assert str(await handler)


def test_the_two_local_members_answer_if_the_server_is_not_selected(engine: EnsembleEngine) -> None:
    *_, last = engine.stream(QUESTION, members=["on-llama.cpp", "here"])
    assert isinstance(last, FinishEvent)
    assert set(last.result.usage.members) == {"on-llama.cpp", "here"}
