"""`create_agent` over the demo ensemble: middlewares, human approval, and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    HumanInTheLoopMiddleware,
    ModelFallbackMiddleware,
    ModelRequest,
    ModelResponse,
    ModelRetryMiddleware,
    SummarizationMiddleware,
    ToolCallLimitMiddleware,
    wrap_model_call,
)
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from langchain_specfuse import ChatSpecFuse
from specfuse_shared import EnsembleEngine

QUESTION = HumanMessage("Use the tool to multiply a=17 and b=25.")


@tool
def multiply(a: int, b: int) -> str:
    """Multiplies two whole numbers."""
    return f"{a} times {b} is {a * b}"


@wrap_model_call
def call_first(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    """Models as small as the demo's do not start a call by themselves, so the first turn is forced to be one."""
    called = any(isinstance(message, ToolMessage) for message in request.messages)
    return handler(request if called else request.override(tool_choice="any"))


@pytest.fixture(scope="module")
def llm(demo_engine: EnsembleEngine) -> ChatSpecFuse:
    return ChatSpecFuse(engine=demo_engine, max_tokens=40)


def test_an_agent_with_middlewares_waits_for_a_person_and_remembers(llm: ChatSpecFuse) -> None:
    middlewares: Any = [
        SummarizationMiddleware(llm, trigger=("fraction", 0.5), keep=("messages", 4)),
        ModelRetryMiddleware(max_retries=1, on_failure="error"),
        HumanInTheLoopMiddleware(interrupt_on={"multiply": True}),
        call_first,
    ]
    agent = create_agent(llm, [multiply], middleware=middlewares, checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    stopped = agent.invoke({"messages": [QUESTION]}, config)
    [waiting] = stopped["__interrupt__"]
    assert waiting.value["action_requests"][0]["name"] == "multiply"
    edited = {"name": "multiply", "args": {"a": 17, "b": 25}}
    done = agent.invoke(Command(resume={"decisions": [{"type": "edit", "edited_action": edited}]}), config)
    kinds = [type(message).__name__ for message in done["messages"]]
    assert kinds == ["HumanMessage", "AIMessage", "ToolMessage", "AIMessage"]
    assert done["messages"][2].text.endswith("17 times 25 is 425")
    assert len(agent.get_state(config).values["messages"]) == 4


def test_an_agent_streams_its_calls_and_stops_at_a_limit(llm: ChatSpecFuse) -> None:
    hurried = llm.model_copy(update={"timeout": 1e-9})
    middlewares: Any = [
        ToolCallLimitMiddleware(run_limit=1, exit_behavior="end"),
        ModelFallbackMiddleware(llm),
        wrap_model_call(lambda request, handler: handler(request.override(tool_choice="any"))),
    ]
    agent = create_agent(hurried, [multiply], middleware=middlewares)
    reported: list[Any] = list(agent.stream({"messages": [QUESTION]}, stream_mode=["messages", "values"]))
    calls = [
        chunk for mode, (chunk, _) in (t for t in reported if t[0] == "messages") if isinstance(chunk, AIMessageChunk)
    ]
    assert sum(bool(chunk.tool_call_chunks) for chunk in calls) > 2
    messages = reported[-1][1]["messages"]
    assert next(m.text for m in messages if isinstance(m, ToolMessage)) == "17 times 25 is 425"
    assert isinstance(messages[-1], AIMessage)
    assert "limit" in messages[-1].text.lower()
