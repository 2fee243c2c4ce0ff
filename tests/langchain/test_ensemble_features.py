"""Beyond the standard suites: ensembles, events, blocks, interleaving, chains written for other models."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.documents import Document
from langchain_core.exceptions import ModelNotFoundError
from langchain_core.messages import AIMessageChunk
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import ConfigurableField, Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.runnables.history import RunnableWithMessageHistory

from langchain_specfuse import ChatSpecFuse
from specfuse_shared import EnsembleConfig, EnsembleEngine
from specfuse_shared.errors import RequestTimeoutError
from specfuse_shared.events import SegmentEvent

QUESTION = "Write one sentence about the sea."


@pytest.fixture(scope="module")
def model(demo_engine: EnsembleEngine) -> ChatSpecFuse:
    return ChatSpecFuse(engine=demo_engine, max_tokens=10)


class Recorder(BaseCallbackHandler):
    """Keeps the custom events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        self.events.append((name, data))


def test_custom_events_have_every_segment_without_a_parent_run(demo_engine: EnsembleEngine) -> None:
    recorder = Recorder()
    model = ChatSpecFuse(engine=demo_engine, max_tokens=10, segment_events=True)
    answer = model.invoke(QUESTION, {"callbacks": [recorder]})
    assert {name for name, _ in recorder.events} == {"specfuse_segment"}
    assert "".join(data["text"] for _, data in recorder.events) == answer.content
    provenance = [{k: v for k, v in data.items() if k != "text"} for _, data in recorder.events]
    assert provenance == answer.additional_kwargs["specfuse_segments"]


async def test_a_callable_sees_every_segment(demo_engine: EnsembleEngine) -> None:
    recorded: list[SegmentEvent] = []
    model = ChatSpecFuse(engine=demo_engine, max_tokens=10, on_segment=recorded.append)
    chunks = [chunk async for chunk in model.astream(QUESTION)]
    assert [event.text for event in recorded] == [chunk.content for chunk in chunks[:-1]]


def test_blocks_of_version_one_are_one_text_block(model: ChatSpecFuse, demo_engine: EnsembleEngine) -> None:
    new = ChatSpecFuse(engine=demo_engine, max_tokens=10, output_version="v1")
    whole: AIMessageChunk | None = None
    for chunk in new.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    [block] = whole.content_blocks
    assert (block["type"], block.get("text")) == ("text", model.invoke(QUESTION).content)


async def test_answers_on_one_event_loop_interleave(model: ChatSpecFuse) -> None:
    order: list[int] = []

    async def follow(number: int) -> None:
        async for chunk in model.astream(QUESTION, max_tokens=20):
            if chunk.content:
                order.append(number)

    await asyncio.gather(follow(1), follow(2))
    assert sorted(set(order)) == [1, 2]
    assert order != sorted(order)
    assert order != sorted(order, reverse=True)


def test_a_batch_is_one_batch_in_the_engine(demo_engine: EnsembleEngine) -> None:
    model = ChatSpecFuse(engine=demo_engine, max_tokens=8)
    questions = [f"Write one sentence about the number {number}." for number in range(8)]
    before = demo_engine.metrics().forwards
    alone = [model.invoke(question).content for question in questions]
    between = demo_engine.metrics().forwards
    together = [answer.content for answer in model.batch(questions)]
    after = demo_engine.metrics().forwards
    assert len(together) == len(alone) == 8
    for member, count in between.items():
        assert after[member] - count < 0.5 * (count - before.get(member, 0))


def test_a_timeout_ends_an_answer(model: ChatSpecFuse) -> None:
    with pytest.raises(RequestTimeoutError):
        model.invoke(QUESTION, max_tokens=400, timeout=0.5)


async def test_closing_a_stream_ends_its_answer(model: ChatSpecFuse) -> None:
    async for _ in model.astream(QUESTION, max_tokens=200):
        break
    assert (await model.ainvoke(QUESTION)).content


# ── ensembles and identity ───────────────────────────────────────────────────────────────────────


def test_a_call_may_choose_another_ensemble() -> None:
    model = ChatSpecFuse(members=["no/one"], ensembles={"pair": ["no/one", "no/two"]})
    assert model._ensemble("pair").names == ("one", "two")
    assert model._ensemble().names == model._ensemble("one").names == ("one",)
    for option in ("model", "model_name"):
        with pytest.raises(ModelNotFoundError, match=r"'trio' is not an ensemble here: use one of \['demo', 'pair'\]"):
            model.invoke("Hi", **{option: "trio"})


def test_an_ensemble_may_be_named_instead_of_its_members() -> None:
    demo, pair = ChatSpecFuse(model="demo"), ChatSpecFuse(model_name="pair", ensembles={"pair": ["no/one", "no/two"]})
    assert demo._ensemble() == ChatSpecFuse(members="demo")._ensemble()
    assert pair._ensemble().names == ("one", "two")
    custom = ChatSpecFuse(model="demo", ensembles={"demo": ["no/one"]})
    assert custom._ensemble().names == custom._ensemble("demo").names == ("one",), "the caller's, not the packaged one"
    assert pair.model_name == pair._get_ls_params()["ls_model_name"] == "pair"
    chosen = ChatSpecFuse(members=["no/one"], ensembles=pair.ensembles).configurable_fields(
        model_name=ConfigurableField(id="who")
    )
    named, _ = chosen.prepare({"configurable": {"who": "pair"}})  # type: ignore[attr-defined]
    assert named._ensemble().names == ("one", "two")
    with pytest.raises(ModelNotFoundError, match="'trio' is not an ensemble here"):
        ChatSpecFuse(model="trio", ensembles=pair.ensembles)


def test_models_with_different_ensembles_or_tools_have_different_cache_keys() -> None:
    config = EnsembleConfig(["no/one"])
    models = [
        ChatSpecFuse(config=config),
        ChatSpecFuse(config=config, ensembles={"pair": ["no/one", "no/two"]}),
        ChatSpecFuse(config=config, parallel_tool_calls=True),
    ]
    tool = {"type": "function", "function": {"name": "now"}}
    keys = [m._get_llm_string() for m in models] + [models[0]._get_llm_string(tools=[tool])]
    assert len(set(keys)) == 4


def test_the_profile_lists_the_models_abilities(model: ChatSpecFuse, demo_engine: EnsembleEngine) -> None:
    model.invoke("Hi", max_tokens=1)
    profile = model.profile
    assert profile is not None
    assert profile["max_input_tokens"] == min(r.context for r in demo_engine.describe() if r.context)
    assert profile["tool_calling"]
    assert profile["structured_output"]
    assert not profile["image_inputs"]


# ── chains that were written for another model ───────────────────────────────────────────────────


def rag_chain(llm: Runnable[Any, Any]) -> Runnable[Any, str]:
    """A retrieval chain from a tutorial, with our model."""
    documents = [Document("The observatory opens at seven in the evening."), Document("Tickets cost nine euros.")]
    retriever: Any = RunnableLambda(lambda question: [d for d in documents if "opens" in d.page_content])
    prompt = ChatPromptTemplate.from_template("Context: {context}\nQuestion: {question}\nAnswer briefly.")
    context: Any = retriever | (lambda retrieved: "\n".join(d.page_content for d in retrieved))
    return {"context": context, "question": RunnablePassthrough()} | prompt | llm | StrOutputParser()


def test_a_retrieval_chain_needs_only_another_constructor(demo_engine: EnsembleEngine) -> None:
    # llm = ChatOllama(model="llama3.2", temperature=0, num_predict=16)
    llm = ChatSpecFuse(engine=demo_engine, temperature=0, max_tokens=16)
    pieces = list(rag_chain(llm).stream("When does the observatory open?"))
    assert len(pieces) > 1
    assert "seven" in "".join(pieces)


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning")
def test_a_chat_with_history_needs_only_another_constructor(demo_engine: EnsembleEngine) -> None:
    # llm = ChatOllama(model="llama3.2", num_predict=12)
    llm = ChatSpecFuse(engine=demo_engine, max_tokens=12)
    prompt = ChatPromptTemplate.from_messages([MessagesPlaceholder("history"), ("human", "{question}")])
    retained = InMemoryChatMessageHistory()
    chat = RunnableWithMessageHistory(
        prompt | llm, lambda session: retained, input_messages_key="question", history_messages_key="history"
    )
    for question in ("My name is Ada.", "What is my name?"):
        chat.invoke({"question": question}, {"configurable": {"session_id": "1"}})
    assert [m.type for m in retained.messages] == ["human", "ai", "human", "ai"]
    assert retained.messages[3].usage_metadata["input_tokens"] > retained.messages[1].usage_metadata["input_tokens"]  # type: ignore[attr-defined]


def test_an_agent_needs_only_another_constructor(demo_engine: EnsembleEngine) -> None:
    from langchain.agents import create_agent
    from pydantic import BaseModel

    class Weather(BaseModel):
        """The weather."""

        city: str
        degrees: int

    # llm = ChatOllama(model="llama3.2", num_predict=40)
    llm = ChatSpecFuse(engine=demo_engine, max_tokens=40)
    agent = create_agent(llm, tools=[], response_format=Weather)
    state = agent.invoke({"messages": [("user", "In Köln it is 12 degrees.")]})
    assert isinstance(state["structured_response"], Weather)
