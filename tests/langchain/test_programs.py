"""Programs in the style of LangChain's and LangGraph's tutorials, with the demo ensemble as the model."""

from __future__ import annotations

import operator
import sqlite3
from collections import Counter
from itertools import pairwise
from typing import Annotated, Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage, trim_messages
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.utils.function_calling import tool_example_to_messages
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send, interrupt
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from langchain_specfuse import ChatSpecFuse
from specfuse_shared import EnsembleEngine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm(demo_engine: EnsembleEngine) -> ChatSpecFuse:
    return ChatSpecFuse(engine=demo_engine, max_tokens=16)


# ── retrieval as a graph ─────────────────────────────────────────────────────────────────────────


class WordCounts(Embeddings):
    """Embeddings in which texts with common words are similar."""

    words = ("observatory", "opens", "evening", "tickets", "cost", "euros", "bus", "station", "leaves")

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        counted = Counter(text.lower().strip("?.").split())
        return [float(counted[word]) + 0.01 for word in self.words]


class Retrieval(TypedDict):
    question: str
    context: list[Document]
    answer: str


def test_retrieval_as_a_graph_streams_its_answer(llm: ChatSpecFuse) -> None:
    store = InMemoryVectorStore(WordCounts())
    facts = ["The observatory opens at seven in the evening.", "Tickets cost nine euros.", "The bus leaves at noon."]
    store.add_documents([Document(fact) for fact in facts])
    prompt = ChatPromptTemplate.from_template("Context: {context}\nQuestion: {question}\nAnswer briefly.")

    def retrieve(state: Retrieval) -> dict[str, Any]:
        return {"context": store.similarity_search(state["question"], k=1)}

    def generate(state: Retrieval) -> dict[str, Any]:
        result = "\n".join(document.page_content for document in state["context"])
        return {"answer": llm.invoke(prompt.invoke({"question": state["question"], "context": result})).text}

    graph = StateGraph(Retrieval).add_sequence([retrieve, generate]).add_edge(START, "retrieve").compile()
    question = {"question": "When does the observatory open?"}
    reported = list(graph.stream(question, stream_mode=["messages", "values"]))
    pieces = [part[0].text for mode, part in reported if mode == "messages"]
    state = reported[-1][1]
    assert [document.page_content for document in state["context"]] == facts[:1]
    assert "".join(pieces) == state["answer"]
    assert len(pieces) > 2
    assert "seven" in state["answer"]


# ── questions to a database, with a person who has to agree ──────────────────────────────────────


class Query(TypedDict):
    """A query that answers the question."""

    query: Annotated[str, ..., "One SQLite query."]


class QueryState(TypedDict):
    question: str
    query: str
    result: str
    answer: str


def test_database_queries_wait_for_approval(llm: ChatSpecFuse) -> None:
    database = sqlite3.connect(":memory:", check_same_thread=False)
    database.executescript("CREATE TABLE guests (name TEXT, nights INT); INSERT INTO guests VALUES ('Ada', 3);")
    tables = database.execute("SELECT sql FROM sqlite_master").fetchall()

    def write_query(state: QueryState) -> dict[str, Any]:
        prompt = f"Tables: {tables[0][0]}\nWrite a query, such as SELECT name FROM guests, for: {state['question']}"
        return dict(llm.with_structured_output(Query).invoke(prompt, max_tokens=32))

    def execute(state: QueryState) -> dict[str, Any]:
        query = interrupt({"run this?": state["query"]})
        try:
            return {"result": str(database.execute(query).fetchall())}
        except sqlite3.Error as error:
            return {"result": f"Error: {error}"}

    def answer(state: QueryState) -> dict[str, Any]:
        return {"answer": llm.invoke(f"Question: {state['question']}\nResult: {state['result']}\nAnswer briefly.").text}

    graph = StateGraph(QueryState).add_sequence([write_query, execute, answer]).add_edge(START, "write_query")
    app = graph.compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    stopped = app.invoke({"question": "Who are the guests?"}, config)
    [question] = stopped["__interrupt__"]
    assert question.value == {"run this?": stopped["query"]}
    assert stopped["query"]
    done = app.invoke(Command(resume="SELECT name FROM guests"), config)
    assert done["result"] == "[('Ada',)]"
    assert done["answer"]
    database.close()


# ── a chatbot that forgets ───────────────────────────────────────────────────────────────────────


class Chat(TypedDict):
    messages: Annotated[list[BaseMessage], operator.add]
    language: str


def test_a_chatbot_trims_its_history_by_the_model_s_own_tokens(llm: ChatSpecFuse) -> None:
    first = "My name is Ada. " + "I like the sea and the hills. " * 8
    limit = llm.get_num_tokens_from_messages([HumanMessage(first)])
    trimmer = trim_messages(max_tokens=limit, strategy="last", token_counter=llm, start_on="human")
    prompt = ChatPromptTemplate.from_messages([("system", "Answer in {language}."), MessagesPlaceholder("messages")])

    def call(state: Chat) -> dict[str, Any]:
        trimmed = trimmer.invoke(state["messages"])
        request = prompt.invoke({"messages": trimmed, "language": state["language"]})
        return {"messages": [llm.invoke(request, max_tokens=8)]}

    graph = StateGraph(Chat).add_node("model", call).add_edge(START, "model")
    app = graph.compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    for question in (first, "What is my name?"):
        state = app.invoke({"messages": [HumanMessage(question)], "language": "English"}, config)
    assert [message.type for message in state["messages"]] == ["human", "ai"] * 2
    assert trimmer.invoke(state["messages"])[0].text == "What is my name?"
    before, after = [message.usage_metadata["input_tokens"] for message in state["messages"][1::2]]
    assert after < before, "the earlier turns did not fit"


# ── extraction with examples ─────────────────────────────────────────────────────────────────────


class Guest(BaseModel):
    """A guest."""

    name: str = Field(description="the guest's name")
    nights: int | None = Field(description="how many nights, if it is said")


class Guests(BaseModel):
    """All guests in a text."""

    guests: list[Guest] = Field(max_length=1)


EXAMPLES = [
    ("Ada stays for 3 nights.", Guests(guests=[Guest(name="Ada", nights=3)])),
    ("Nobody came.", Guests(guests=[])),
]


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
def test_extraction_learns_from_examples_as_tool_messages(llm: ChatSpecFuse) -> None:
    examples = [message for text, result in EXAMPLES for message in tool_example_to_messages(text, [result])]
    assert sum(isinstance(message, ToolMessage) for message in examples) == len(EXAMPLES)
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Extract the guests."), MessagesPlaceholder("examples"), ("human", "{text}")]
    )
    chain = prompt | llm.with_structured_output(Guests, method="function_calling", max_tokens=48).with_retry()
    result = chain.invoke({"examples": examples, "text": "Zoë Müller stays for 2 nights."})
    assert isinstance(result, Guests)
    assert result.guests[0].name.startswith("Zo")


def test_partial_objects_grow_while_they_stream(llm: ChatSpecFuse) -> None:
    extract = llm.with_structured_output(Guest.model_json_schema())
    streamed = list(extract.stream("Ada stays for 3 nights.", max_tokens=32))
    assert len(streamed) > 1
    assert Guest.model_validate(streamed[-1])
    names = [part["name"] for part in streamed if "name" in part]
    assert all(later.startswith(earlier) for earlier, later in pairwise(names))


# ── map and reduce ───────────────────────────────────────────────────────────────────────────────


class Overall(TypedDict):
    texts: list[str]
    summaries: Annotated[list[str], operator.add]
    final: str


class One(TypedDict):
    text: str


async def test_summaries_are_mapped_concurrently_and_reduced(llm: ChatSpecFuse) -> None:
    texts = ["The sea is wide and blue.", "Bread rises because of yeast.", "Bees dance to show the way."]

    async def summarise(state: One) -> dict[str, Any]:
        answer = await llm.ainvoke(f"Summarise in five words: {state['text']}", max_tokens=10)
        return {"summaries": [answer.text]}

    async def reduce(state: Overall) -> dict[str, Any]:
        return {"final": (await llm.ainvoke("Join: " + "\n".join(state["summaries"]), max_tokens=10)).text}

    graph = StateGraph(Overall).add_node("summarise", summarise).add_node("reduce", reduce)
    graph.add_conditional_edges(START, lambda state: [Send("summarise", {"text": t}) for t in state["texts"]])
    app = graph.add_edge("summarise", "reduce").add_edge("reduce", END).compile()
    done = await app.ainvoke({"texts": texts})
    assert len([summary for summary in done["summaries"] if summary]) == 3
    assert done["final"]
