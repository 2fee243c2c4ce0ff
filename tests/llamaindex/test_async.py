"""Asynchronous calls leave the event loop free, and a caller that stops listening stops the compute."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import psutil
import pytest
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from workflows.errors import WorkflowCancelledByUser

from langchain_specfuse import ChatSpecFuse
from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import EnsembleEngine

LONG = [ChatMessage("Write a long story about the sea.")]


@pytest.fixture(scope="module")
def llm(llm: SpecFuseLLM) -> SpecFuseLLM:
    return llm.model_copy(update={"max_tokens": 400})


async def until_idle(engine: EnsembleEngine) -> int:
    """Wait until no request runs, and return the number of rounds so far."""
    for _ in range(200):
        if not engine.metrics().running:
            return engine.metrics().rounds
        await asyncio.sleep(0.05)
    raise AssertionError("the engine still computes after ten seconds")


async def test_the_event_loop_stays_free_and_segments_arrive_one_by_one(llm: SpecFuseLLM) -> None:
    beats: list[float] = []

    async def beat() -> None:
        while True:
            beats.append(time.monotonic())
            await asyncio.sleep(0.01)

    heart = asyncio.create_task(beat())
    arrived = []
    async for response in await llm.astream_chat(LONG, max_tokens=24):
        if response.delta:
            arrived.append(time.monotonic())
    heart.cancel()
    took = arrived[-1] - arrived[0]
    assert len(arrived) > 2
    assert max(b - a for a, b in pairwise(arrived)) < 0.8 * took
    assert max(b - a for a, b in pairwise(beats)) < 0.5 * took


async def test_cancelling_a_call_stops_the_compute(llm: SpecFuseLLM, demo_engine: EnsembleEngine) -> None:
    cancelled = demo_engine.metrics().requests["cancelled"]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(llm.achat(LONG), 0.5)
    await until_idle(demo_engine)
    assert demo_engine.metrics().requests["cancelled"] == cancelled + 1


async def test_a_stream_that_is_closed_early_stops_the_compute(llm: SpecFuseLLM, demo_engine: EnsembleEngine) -> None:
    cancelled = demo_engine.metrics().requests["cancelled"]
    watched = llm.model_copy(update={"callback_manager": CallbackManager([LlamaDebugHandler(False)])})
    stream = await watched.astream_chat(LONG)
    assert (await anext(stream)).delta
    await stream.aclose()
    await until_idle(demo_engine)
    assert demo_engine.metrics().requests["cancelled"] == cancelled + 1

    plain = watched.stream_chat(LONG)
    assert next(plain).delta
    plain.close()
    await until_idle(demo_engine)
    assert demo_engine.metrics().requests["cancelled"] == cancelled + 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # LlamaIndex's agents use old pydantic
async def test_cancelling_a_workflow_stops_the_compute(llm: SpecFuseLLM, demo_engine: EnsembleEngine) -> None:
    cancelled = demo_engine.metrics().requests["cancelled"]
    handler = FunctionAgent(tools=[], llm=llm, system_prompt="You write stories.").run(user_msg=str(LONG[0].content))
    async for event in handler.stream_events():
        if isinstance(event, AgentStream):
            break
    await handler.cancel_run()
    with pytest.raises(WorkflowCancelledByUser):
        await handler
    await until_idle(demo_engine)
    assert demo_engine.metrics().requests["cancelled"] == cancelled + 1


@pytest.mark.slow
async def test_langchain_and_llamaindex_answer_at_the_same_time(exact_engine: EnsembleEngine) -> None:
    events: list[str] = []
    chat = ChatSpecFuse(engine=exact_engine, max_tokens=40, on_segment=lambda event: events.append("langchain"))
    llm = SpecFuseLLM(engine=exact_engine, max_tokens=40, on_segment=lambda event: events.append("llamaindex"))
    question = str(LONG[0].content)

    async def stream_chat() -> str:
        text = ""
        async for chunk in chat.astream(question):
            text += str(chunk.content)
            if len(events) < 100:
                events.append("langchain")
        return text

    one, two = await asyncio.gather(stream_chat(), llm.acomplete(question))
    assert one == two.text
    first, last = events.index("llamaindex"), len(events) - 1 - events[::-1].index("llamaindex")
    assert "langchain" in events[first:last]


@pytest.mark.slow
async def test_equal_members_are_loaded_once_for_both_frameworks() -> None:
    def spec() -> int:
        return int(psutil.Process().memory_info().rss)

    chat = ChatSpecFuse(members="demo", max_tokens=8)
    chat.invoke("Hello")
    loaded = spec()
    llm = SpecFuseLLM(members="demo", max_tokens=8)
    llm.complete("Hello")
    assert llm._resolve_engine() is chat._resolve_engine()
    reports: list[Any] = [*llm._resolve_engine().describe()]
    weights = sum(report.memory_bytes for report in reports)
    assert spec() - loaded < 0.1 * weights
