"""The eight endpoints give one answer, each as one call with one start, one end and one token count."""

from __future__ import annotations

from itertools import pairwise

import pytest

from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import EnsembleEngine, Message
from specfuse_shared.errors import RequestError
from tests.llamaindex.instrumentation import ENDPOINTS, Callbacks, Listener, ask, text_of

QUESTION = "Continue: 🌊 大海\n🌊 大海\n🌊 大海\n🌊"


@pytest.fixture(scope="module")
def expected(llm: SpecFuseLLM, demo_engine: EnsembleEngine) -> str:
    """The engine's answer to the same prompt."""
    text = demo_engine.generate([Message("user", QUESTION)], llm._sampling({"max_tokens": 24})).text
    assert "大海" in text
    assert "🌊" in text
    return text


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_every_endpoint_gives_the_engine_s_answer(
    endpoint: str, llm: SpecFuseLLM, expected: str, listener: Listener, callbacks: Callbacks
) -> None:
    counted = llm.model_copy(update={"callback_manager": callbacks.manager})
    responses = await ask(counted, endpoint, QUESTION, max_tokens=24)
    last = responses[-1]
    assert text_of(last) == expected
    kind = "Chat" if "chat" in endpoint else "Completion"
    ended = {**last.raw["usage"], "finish_reason": last.raw["finish_reason"]}
    assert last.additional_kwargs == (ended if kind == "Chat" else {})
    assert listener.calls() == [f"LLM{kind}StartEvent", f"LLM{kind}EndEvent"]
    assert len(callbacks.calls()) == 1
    [count] = callbacks.counter.llm_token_counts
    assert count.completion_token_count == last.raw["usage"]["completion_tokens"]
    assert count.prompt_token_count == last.raw["usage"]["prompt_tokens"]

    if "stream" in endpoint:
        assert len(responses) > 2
        assert all(isinstance(response.delta, str) for response in responses)
        assert "".join(response.delta for response in responses) == expected
        assert all(text_of(b) == text_of(a) + b.delta for a, b in pairwise(responses))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_settings_of_a_call_reach_every_endpoint_and_apply_once(endpoint: str, llm: SpecFuseLLM) -> None:
    before = llm.to_dict()
    *_, last = await ask(llm, endpoint, "Count to ten.", max_tokens=5, stop=["5"], temperature=0.5, seed=3)
    assert last.raw["usage"]["completion_tokens"] <= 5
    assert "5" not in text_of(last)
    assert last.raw["specfuse"]["seed"] == 3
    assert llm.to_dict() == before


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_every_endpoint_refuses_impossible_requests_before_it_computes(
    endpoint: str, llm: SpecFuseLLM, callbacks: Callbacks, listener: Listener
) -> None:
    counted = llm.model_copy(update={"callback_manager": callbacks.manager})
    with pytest.raises(RequestError, match="shorten the prompt"):
        await ask(counted, endpoint, "much " * 9000)
    assert len(callbacks.calls()) == 1
    assert [name for name in listener.calls() if name.endswith("EndEvent")] == []


@pytest.mark.parametrize("endpoint", [endpoint for endpoint in ENDPOINTS if "stream" in endpoint])
async def test_every_stream_reports_its_segments(endpoint: str, llm: SpecFuseLLM, listener: Listener) -> None:
    events: list[str] = []
    telling = llm.model_copy(update={"on_segment": lambda event: events.append(event.text)})
    *segments, _ = await ask(telling, endpoint, "Write one sentence about the sea.")
    reported = listener.of("SpecFuseSegmentEvent")
    assert events == [event.text for event in reported] == [response.delta for response in segments]
    assert [event.record for event in reported] == [response.raw["specfuse"] for response in segments]
    [started] = [event for event in listener.events if event.class_name().endswith("StartEvent")]
    assert {event.span_id for event in reported} == {started.span_id}
    assert started.span_id is not None
