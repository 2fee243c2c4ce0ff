"""Programs of other kinds over the real demo ensemble: memory, streamed values, indices, queries.

Where LlamaIndex reads a form from free text that members this small do not write, a grammar holds the form.
"""

from pathlib import Path
from typing import Any

import pytest
from llama_index.core import (
    Document,
    KeywordTableIndex,
    MockEmbedding,
    PropertyGraphIndex,
    SQLDatabase,
    SummaryIndex,
    TreeIndex,
    get_response_synthesizer,
)
from llama_index.core.agent.workflow import AgentStreamStructuredOutput, FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.extractors import KeywordExtractor
from llama_index.core.graph_stores.types import EntityNode
from llama_index.core.indices.property_graph import SimpleLLMPathExtractor
from llama_index.core.indices.query.query_transform.base import HyDEQueryTransform, StepDecomposeQueryTransform
from llama_index.core.ingestion import IngestionCache, IngestionPipeline
from llama_index.core.memory import FactExtractionMemoryBlock, Memory, StaticMemoryBlock
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import MultiStepQueryEngine, NLSQLTableQueryEngine
from pydantic import BaseModel
from sqlalchemy import create_engine, text

from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import EnsembleEngine, Grammar
from tests.llamaindex.instrumentation import Listener

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_of_ours_fails"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # LlamaIndex's agents use old pydantic
]
FACTS = ("The observatory opens at seven in the evening.", "Tickets cost nine euros.")
QUESTION = "When does the observatory open?"


class Hours(BaseModel):
    """When it opens."""

    hour: int
    in_the_evening: bool


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return [Document(text=fact) for fact in FACTS]


@pytest.fixture(scope="module")
def short(llm: SpecFuseLLM) -> SpecFuseLLM:
    return llm.model_copy(update={"max_tokens": 24})


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


async def test_memory_blocks_keep_earlier_turns(llm: SpecFuseLLM) -> None:
    form = Grammar.regex(r"<facts>(<fact>[A-Za-z ]{8,40}</fact>){1,2}</facts>")
    reader = llm.model_copy(update={"max_tokens": 60, "grammar": form})
    facts = FactExtractionMemoryBlock(name="facts", llm=reader, max_facts=5)
    static = StaticMemoryBlock(name="place", static_content="The guest asks at the observatory.")
    memory = Memory.from_defaults("s", token_limit=120, token_flush_size=40, memory_blocks=[static, facts])
    for turn in range(6):
        await memory.aput(ChatMessage(f"I am Ada, and this is my question number {turn} about the opening hours."))
    reported = str((await memory.aget())[0].content)
    assert facts.facts
    assert all(fact in reported for fact in ("The guest asks at the observatory.", *facts.facts))


# ── values ───────────────────────────────────────────────────────────────────────────────────────


async def test_values_are_streamed_in_every_form(llm: SpecFuseLLM) -> None:
    prompt = PromptTemplate("Note when it opens: {fact}")
    fact, room = FACTS[0], {"max_tokens": 60}
    program = FunctionCallingProgram.from_defaults(Hours, prompt=prompt, llm=llm)
    structured = llm.model_copy(update=room).as_structured_llm(Hours)
    call: dict[str, Any] = {"llm_kwargs": {"max_tokens": 90}, "fact": fact}
    streams: list[Any] = [
        list(llm.stream_structured_predict(Hours, prompt, llm_kwargs=room, fact=fact)),
        [v async for v in await llm.astream_structured_predict(Hours, prompt, llm_kwargs=room, fact=fact)],
        list(program.stream_call(**call)),
        [v async for v in await program.astream_call(**call)],
        [r.raw for r in structured.stream_chat([ChatMessage(fact)])],
        [r.raw async for r in await structured.astream_chat([ChatMessage(fact)])],
    ]
    for stream in streams:
        assert len(stream) > 1
        assert isinstance(stream[-1], Hours)
    for one, second in (streams[:2], streams[2:4], streams[4:]):
        assert one[-1] == second[-1], "the same, asynchronously"


async def test_a_query_engine_and_an_agent_answer_with_values(llm: SpecFuseLLM, documents: list[Document]) -> None:
    wide = llm.model_copy(update={"max_tokens": 60})
    engine = SummaryIndex.from_documents(documents).as_query_engine(llm=wide.as_structured_llm(Hours))
    assert isinstance(engine.query(QUESTION).response, Hours)
    handler = FunctionAgent(llm=wide, output_cls=Hours).run("It opens at seven in the evening. When does it open?")
    values = [event async for event in handler.stream_events() if isinstance(event, AgentStreamStructuredOutput)]
    output: Any = await handler
    assert values[-1].output == output.structured_response
    assert Hours.model_validate(values[-1].output)


# ── indices and queries ──────────────────────────────────────────────────────────────────────────


def test_summary_tree_and_keyword_indices_answer(short: SpecFuseLLM, documents: list[Document]) -> None:
    summary = SummaryIndex.from_documents(documents).as_query_engine(llm=short, response_mode="tree_summarize")
    assert "seven" in str(summary.query(QUESTION))
    three = [*documents, Document(text="The bus leaves at noon.")]
    tree = TreeIndex.from_documents(three, llm=short, num_children=2)
    leaves = [document.text for document in three]
    roots = [tree.docstore.get_node(root).get_content() for root in tree.index_struct.root_nodes.values()]
    assert len(tree.docstore.docs) == len(three) + len(roots)
    assert all(roots), "the members' summary"
    response = tree.as_query_engine(llm=short, retriever_mode="all_leaf").query(QUESTION)
    assert {result.node.get_content() for result in response.source_nodes} == set(leaves)
    assert str(response)


def test_a_keyword_index_finds_by_the_members_keywords(
    llm: SpecFuseLLM, documents: list[Document], listener: Listener
) -> None:
    """LlamaIndex looks for a line "KEYWORDS: a, b"; a grammar lets the members choose among words of the documents."""
    word = "(observatory|evening|tickets|euros)"
    reader = llm.model_copy(update={"grammar": Grammar.regex(f"KEYWORDS: {word}, {word}")})
    index = KeywordTableIndex.from_documents(documents, llm=reader)
    retriever = index.as_retriever(retriever_mode="default")
    answers = [str(event.response.message.content) for event in listener.of("LLMChatEndEvent")]
    written = {word for answer in answers for word in answer.removeprefix("KEYWORDS: ").split(", ")}
    assert written <= set(index.index_struct.table)
    result = retriever.retrieve(QUESTION)
    assert {node.node.get_content() for node in result} <= set(FACTS)


def test_a_hypothetical_answer_is_used_for_the_search(short: SpecFuseLLM, listener: Listener) -> None:
    bundle = HyDEQueryTransform(llm=short, include_original=True).run(QUESTION)
    [end] = listener.of("LLMChatEndEvent") or listener.of("LLMCompletionEndEvent")
    assert bundle.query_str == QUESTION
    assert bundle.embedding_strs[1:] == [QUESTION]
    assert bundle.embedding_strs[0] == end.response.message.content.strip() != ""


def test_a_multi_step_query_engine_answers(short: SpecFuseLLM, documents: list[Document]) -> None:
    engine = SummaryIndex.from_documents(documents).as_query_engine(llm=short)
    steps = MultiStepQueryEngine(
        engine, query_transform=StepDecomposeQueryTransform(llm=short), index_summary="Facts of the observatory.",
        response_synthesizer=get_response_synthesizer(llm=short), num_steps=2,
    )  # fmt: skip
    response = steps.query(QUESTION)
    assert response.metadata is not None
    request = response.metadata["sub_qa"]
    assert len(request) in (1, 2), "one for each question of the members; LlamaIndex stops when they have no more"
    assert all(question and str(answer) for question, answer in request)
    assert str(response)


def test_a_question_is_a_query_of_a_database(llm: SpecFuseLLM) -> None:
    """Free SQL of members this small is often none; under a grammar every query runs."""
    engine = create_engine("sqlite:///:memory:")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE guests (name TEXT, nights INT)"))
        connection.execute(text("INSERT INTO guests VALUES ('Ada', 3)"))
    written = Grammar.regex(r"SELECT (name|nights) FROM guests( WHERE name = '[A-Z][a-z]{1,8}')?")
    writer = llm.model_copy(update={"max_tokens": 40, "grammar": written})
    database = SQLDatabase(engine, include_tables=["guests"])
    query = NLSQLTableQueryEngine(
        database, tables=["guests"], llm=writer, embed_model=MockEmbedding(4), synthesize_response=False
    )
    reported = query.query("How many nights does Ada stay?").metadata
    assert reported is not None
    with engine.begin() as connection:
        assert reported["result"] == [tuple(row) for row in connection.execute(text(reported["sql_query"]))]
    engine.dispose()


def test_a_stored_cache_of_a_pipeline_is_read_again(
    llm: SpecFuseLLM, documents: list[Document], tmp_path: Path, demo_engine: EnsembleEngine
) -> None:
    stages = [SentenceSplitter(chunk_size=64, chunk_overlap=0), KeywordExtractor(llm=llm, keywords=2)]
    pipeline = IngestionPipeline(transformations=stages, cache=IngestionCache())
    first = pipeline.run(documents=documents)
    pipeline.persist(str(tmp_path / "stored"))
    again = IngestionPipeline(transformations=stages)
    again.load(str(tmp_path / "stored"))
    before = demo_engine.metrics().forwards
    second = again.run(documents=documents)
    assert [node.metadata for node in second] == [node.metadata for node in first]
    assert all(node.metadata["excerpt_keywords"] for node in first)
    assert demo_engine.metrics().forwards == before


def test_a_property_graph_is_built_and_queried(llm: SpecFuseLLM, documents: list[Document]) -> None:
    """Under a grammar of the form that LlamaIndex reads, `(subject, relation, object)`, every line is a path."""
    path = Grammar.regex(r"\([A-Z][a-z]{2,14}, [A-Z][a-z]{2,14}, [A-Z][a-z]{2,14}\)")
    writer = llm.model_copy(update={"max_tokens": 40, "grammar": path})
    index = PropertyGraphIndex.from_documents(
        documents, llm=writer, embed_kg_nodes=False, embed_model=MockEmbedding(4),
        kg_extractors=[SimpleLLMPathExtractor(llm=writer, max_paths_per_chunk=1, num_workers=1)],
    )  # fmt: skip
    store = index.property_graph_store
    paths = store.get_triplets(entity_names=[node.name for node in store.get() if isinstance(node, EntityNode)])
    assert len(paths) >= len(documents)
    answer = index.as_query_engine(llm=llm, include_text=True).query(QUESTION)
    assert str(answer)
