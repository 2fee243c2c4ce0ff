"""Agents that tutorials end with, over the demo: hand-offs, people who decide, middlewares, fallbacks, traces."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    HumanInTheLoopMiddleware,
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
    TodoListMiddleware,
)
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import tool
from langchain_core.tracers import BaseTracer
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command
from pydantic import BaseModel

from langchain_specfuse import ChatSpecFuse, errors
from specfuse_shared import EnsembleEngine

pytestmark = pytest.mark.slow
RUN: list[str] = []


@tool(return_direct=True)
def opening_hours(day: str) -> str:
    """When the observatory opens on a day."""
    RUN.append(day)
    return "It opens at seven in the evening."


class Verdict(BaseModel):
    """Whether the observatory is open."""

    is_open: bool


@pytest.fixture(scope="module")
def llm(demo_engine: EnsembleEngine) -> ChatSpecFuse:
    return ChatSpecFuse(engine=demo_engine, max_tokens=80)


def test_a_supervisor_hands_over_to_the_worker_it_names(llm: ChatSpecFuse) -> None:
    class Route(BaseModel):
        worker: bool

    def supervise(state: MessagesState) -> Command[Any]:
        route = llm.with_structured_output(Route).invoke([*state["messages"], ("user", "Is a worker needed?")])
        assert isinstance(route, Route)
        return Command(goto="worker" if route.worker else END, update={"messages": [AIMessage("Handed over.")]})

    def work(state: MessagesState) -> dict[str, Any]:
        return {"messages": [llm.invoke(state["messages"], max_tokens=12)]}

    graph = StateGraph(MessagesState)
    graph.add_node("supervisor", supervise, destinations=("worker", END))
    graph.add_node("worker", work)
    graph.add_edge(START, "supervisor")
    graph.add_edge("worker", END)
    state = graph.compile().invoke({"messages": [("user", "Describe the sea, please.")]})
    assert [message.text for message in state["messages"]][1] == "Handed over."
    assert len(state["messages"]) in (2, 3)


def test_a_person_agrees_and_the_agent_goes_on_to_a_value_of_its_schema(llm: ChatSpecFuse) -> None:
    RUN.clear()
    ask = HumanInTheLoopMiddleware(interrupt_on={"opening_hours": True})
    agent = create_agent(
        llm, [opening_hours], middleware=[ask], checkpointer=InMemorySaver(), response_format=ProviderStrategy(Verdict)
    )
    config: Any = {"configurable": {"thread_id": "1"}}
    question = "Use the tool opening_hours for the day Monday: when does the observatory open on Monday?"
    state = agent.invoke({"messages": [("user", question)]}, config)
    if "__interrupt__" in state:  # two small members may also answer at once
        assert RUN == []
        state = agent.invoke(Command(resume={"decisions": [{"type": "approve"}]}), config)
        assert len(RUN) == 1
    if not any(isinstance(message, ToolMessage) for message in state["messages"]):
        assert isinstance(state["structured_response"], Verdict)


def test_a_model_asked_with_provider_strategy_alone_gives_the_value(llm: ChatSpecFuse) -> None:
    agent = create_agent(llm, [], response_format=ProviderStrategy(Verdict))
    state = agent.invoke({"messages": [("user", "The observatory is open now. Is it open?")]})
    assert isinstance(state["structured_response"], Verdict)


def test_an_agent_with_a_list_of_todos_runs_to_its_end(llm: ChatSpecFuse) -> None:
    agent = create_agent(llm, [opening_hours], middleware=[TodoListMiddleware()])
    state = agent.invoke({"messages": [("user", "Say hello.")]}, {"recursion_limit": 12})
    assert isinstance(state["messages"][-1], (AIMessage, ToolMessage))


def test_a_sub_agent_is_a_tool_of_another_one(llm: ChatSpecFuse) -> None:
    inner = create_agent(llm.model_copy(update={"max_tokens": 12}), [])

    @tool(return_direct=True)
    def ask_the_expert(question: str) -> str:
        """Asks the expert of the sea."""
        return str(inner.invoke({"messages": [("user", question)]})["messages"][-1].text)

    [call] = llm.bind_tools([ask_the_expert], tool_choice="any").invoke("Ask the expert: is the sea deep?").tool_calls
    assert ask_the_expert.invoke(call).content


def test_fields_that_are_configured_fall_back_retry_and_are_cached(llm: ChatSpecFuse) -> None:
    cache = InMemoryCache()
    model = ChatSpecFuse(engine=llm.engine, max_tokens=8, cache=cache)
    field = ConfigurableField(id="seconds")
    chain = model.configurable_fields(timeout=field).with_fallbacks([model], exceptions_to_handle=(TimeoutError,))
    told = chain.invoke("What is the sea?", {"configurable": {"seconds": 1e-4}})
    again = model.invoke("What is the sea?")
    assert told.text == again.text
    hurried = ChatSpecFuse(engine=llm.engine, max_tokens=8, timeout=1e-4)
    middlewares = [
        ModelFallbackMiddleware(model),
        ModelRetryMiddleware(max_retries=1, initial_delay=0, on_failure="error"),
    ]
    state = create_agent(hurried, [], middleware=middlewares).invoke({"messages": [("user", "What is the sea?")]})
    assert state["messages"][-1].text
    with pytest.raises(errors.RequestTimeoutError):
        hurried.invoke("What is the sea?")


def test_a_tracer_hears_of_an_answer(llm: ChatSpecFuse) -> None:
    class Runs(BaseTracer):
        def __init__(self) -> None:
            super().__init__()
            self.runs: list[Any] = []

        def _persist_run(self, run: Any) -> None:
            self.runs.append(run)

    runs = Runs()
    answer = llm.invoke("What is the sea?", {"callbacks": [runs]}, max_tokens=8)
    [run] = runs.runs
    assert run.extra["invocation_params"]["model"] == llm._model_name()
    usage = run.outputs["generations"][0][0]["message"]["kwargs"]["usage_metadata"]
    assert usage == answer.usage_metadata


def test_retrieval_that_an_agent_asks_for(llm: ChatSpecFuse) -> None:
    found: list[str] = []

    @tool
    def search(query: str) -> str:
        """Searches the documents of the observatory."""
        found.append(query)
        return "The observatory opens at seven in the evening."

    asked = ("user", "Search for: when does the observatory open?")
    call = llm.bind_tools([search], tool_choice="any").invoke([asked])
    assert call.tool_calls
    result = search.invoke(call.tool_calls[0])
    answer = llm.bind_tools([search], tool_choice="none").invoke([asked, call, result], max_tokens=24)
    assert found
    assert answer.text
