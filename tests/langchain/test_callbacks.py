"""Callbacks receive each chunk once, whichever way LangChain runs the model, and each segment on request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk
from langgraph.graph import END, START, MessagesState, StateGraph

from langchain_specfuse import ChatSpecFuse
from specfuse_shared import EnsembleEngine
from specfuse_shared.frameworks import answer_reader

QUESTION = "What does the sea do?"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
Run = Callable[[ChatSpecFuse, Any], Any]


class Recorder(BaseCallbackHandler):
    """Keeps tokens and custom events, with their runs."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.events: list[tuple[str, Any]] = []
        self.runs: set[Any] = set()

    def on_llm_new_token(self, token: str, *, run_id: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.tokens.append(token)
        self.runs.add(run_id)

    def on_custom_event(self, name: str, data: Any, *, run_id: Any, **kwargs: Any) -> None:
        self.events.append((name, data))
        self.runs.add(run_id)


class AsyncRecorder(AsyncCallbackHandler):
    """Keeps custom events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    async def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        self.events.append((name, data))


@pytest.fixture
def with_events(tiny: EnsembleEngine) -> ChatSpecFuse:
    return ChatSpecFuse(engine=tiny, max_tokens=12, segment_events=True)


def invoke(model: ChatSpecFuse, config: Any) -> str:
    return str(model.invoke(QUESTION, config).text)


def stream(model: ChatSpecFuse, config: Any) -> str:
    return "".join(chunk.text for chunk in model.stream(QUESTION, config))


def stream_v3(model: ChatSpecFuse, config: Any) -> str:
    return str(model.stream_events(QUESTION, config, version="v3").output.text)


def graph_of(model: ChatSpecFuse) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("answer", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_edge(START, "answer")
    graph.add_edge("answer", END)
    return graph.compile()


def messages_of_a_graph(model: ChatSpecFuse, config: Any) -> str:
    reported = graph_of(model).stream({"messages": [("user", QUESTION)]}, config, stream_mode="messages")
    return "".join(chunk.text for chunk, _ in reported if isinstance(chunk, AIMessageChunk))


WAYS = [invoke, stream, stream_v3, messages_of_a_graph]


@pytest.mark.parametrize("way", WAYS)
def test_segment_events_are_sent_by_every_method(with_events: ChatSpecFuse, way: Run) -> None:
    received = Recorder()
    text = way(with_events, {"callbacks": [received]})
    assert {name for name, _ in received.events} == {"specfuse_segment"}
    assert "".join(data["text"] for _, data in received.events) == text != ""
    assert all(data["member"] in ("chat", "base", None) for _, data in received.events)
    assert len(received.runs) == 1, "tokens and segments are of one run"


@pytest.mark.parametrize("way", WAYS)
def test_segment_events_can_be_disabled(chat: ChatSpecFuse, way: Run) -> None:
    received = Recorder()
    way(chat, {"callbacks": [received]})
    assert received.events == []


async def test_segment_events_are_sent_by_every_asynchronous_method(with_events: ChatSpecFuse) -> None:
    received, handler = AsyncRecorder(), Recorder()
    config: Any = {"callbacks": [received, handler]}
    whole = (await with_events.ainvoke(QUESTION, config)).text
    first = len(received.events)
    assert "".join(data["text"] for _, data in received.events) == whole
    assert "".join([chunk.text async for chunk in with_events.astream(QUESTION, config)]) == whole
    assert len(received.events) == 2 * first == len(handler.events)
    events = [event async for event in with_events.astream_events(QUESTION, version="v2")]
    reported = [event["data"] for event in events if event["event"] == "on_custom_event"]
    assert reported == [data for _, data in received.events[:first]]
    in_graph = graph_of(with_events).astream_events({"messages": [("user", QUESTION)]}, version="v2")
    assert [e["data"] async for e in in_graph if e["event"] == "on_custom_event"] == reported


def test_a_models_callbacks_receive_segment_events(tiny: EnsembleEngine) -> None:
    received = Recorder()
    model = ChatSpecFuse(engine=tiny, max_tokens=8, segment_events=True, callbacks=[received])
    assert "".join(data["text"] for _, data in received.events) == ""
    text = stream(model, None)
    assert "".join(data["text"] for _, data in received.events) == text


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", WAYS)
def test_callbacks_receive_each_chunk_once(chat: ChatSpecFuse, way: Run) -> None:
    received = Recorder()
    text = way(chat, {"callbacks": [received]})
    assert "".join(received.tokens) == text != ""
    assert len(received.tokens) > 2


async def test_callbacks_receive_each_chunk_once_on_an_event_loop(chat: ChatSpecFuse) -> None:
    received, again = Recorder(), Recorder()
    whole: AIMessage = await chat.ainvoke(QUESTION, {"callbacks": [received]})
    streamed = [chunk.text async for chunk in chat.astream(QUESTION, {"callbacks": [again]})]
    assert "".join(received.tokens) == whole.text
    assert again.tokens == streamed


@pytest.mark.parametrize("settings", [{"streaming": True}, {}])
@pytest.mark.parametrize("options", [{"stream": True}, {}])
def test_with_streaming_on_callbacks_receive_each_chunk_once(
    tiny: EnsembleEngine, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    received = Recorder()
    model = ChatSpecFuse(engine=tiny, max_tokens=12, **settings)
    answer = model.invoke(QUESTION, {"callbacks": [received]}, **options)
    assert "".join(received.tokens) == answer.text != ""


def test_a_disabled_stream_is_one_message(tiny: EnsembleEngine) -> None:
    model = ChatSpecFuse(engine=tiny, max_tokens=12, streaming=False)
    [whole] = model.stream(QUESTION)
    assert whole.text == ChatSpecFuse(engine=tiny, max_tokens=12).invoke(QUESTION).text


OFF: list[dict[str, Any]] = [{"streaming": False}, {"disable_streaming": True}]


@pytest.mark.parametrize("off", OFF)
def test_a_graph_does_not_stream_when_streaming_is_off(tiny: EnsembleEngine, off: dict[str, Any]) -> None:
    graph = graph_of(ChatSpecFuse(engine=tiny, max_tokens=12, **off))
    reported = list(graph.stream({"messages": [("user", QUESTION)]}, stream_mode="messages"))
    assert [type(message) for message, _ in reported] == [AIMessage]


def test_streaming_can_be_disabled_for_a_call_or_for_calls_with_tools(tiny: EnsembleEngine) -> None:
    def tokens_of(model: Any, **options: Any) -> list[str]:
        recorder = Recorder()
        assert model.invoke(QUESTION, {"callbacks": [recorder]}, **options).text
        return recorder.tokens

    by_tools = ChatSpecFuse(engine=tiny, max_tokens=12, disable_streaming="tool_calling")
    assert tokens_of(ChatSpecFuse(engine=tiny, max_tokens=12), stream=False) == []
    assert tokens_of(by_tools.bind_tools([TOOL], tool_choice="none")) == []
    assert tokens_of(by_tools) != []


@pytest.mark.parametrize("off", OFF)
async def test_segment_events_are_sent_once_if_streaming_is_disabled(tiny: EnsembleEngine, off: dict[str, Any]) -> None:
    model = ChatSpecFuse(engine=tiny, max_tokens=12, segment_events=True, **off)
    for way in (invoke, stream):
        received = Recorder()
        text = way(model, {"callbacks": [received]})
        assert "".join(data["text"] for _, data in received.events) == text != ""
        assert received.tokens == []
    later = AsyncRecorder()
    whole = "".join([chunk.text async for chunk in model.astream(QUESTION, {"callbacks": [later]})])
    assert "".join(data["text"] for _, data in later.events) == whole != ""


async def test_the_record_of_an_answer_is_made_outside_the_event_loop(
    chat: ChatSpecFuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def ledger(result: object, detail: str) -> dict[str, int]:
        threads.append(threading.current_thread())
        return {"seed": 1}

    monkeypatch.setattr(answer_reader, "ledger", ledger)
    answer = await chat.ainvoke(QUESTION)
    assert answer.response_metadata["specfuse"] == {"seed": 1}
    assert threading.main_thread() not in threads
    chat.invoke(QUESTION)
    assert threads[-1] is threading.main_thread(), "without a loop there is no other thread"
