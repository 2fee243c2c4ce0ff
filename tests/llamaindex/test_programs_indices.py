"""Programs of other kinds over the real demo ensemble: memory, streamed values, indices, queries."""

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
)
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.indices.property_graph import SimpleLLMPathExtractor
from llama_index.core.indices.query.query_transform.base import HyDEQueryTransform, StepDecomposeQueryTransform
from llama_index.core.ingestion import IngestionCache, IngestionPipeline
from llama_index.core.memory import FactExtractionMemoryBlock, Memory, StaticMemoryBlock
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import MultiStepQueryEngine, NLSQLTableQueryEngine, TransformQueryEngine
from pydantic import BaseModel
from sqlalchemy import create_engine, text

from llamaindex_specfuse import SpecFuseLLM

pytestmark = [
    pytest.mark.slow,
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


# ── agents ───────────────────────────────────────────────────────────────────────────────────────


async def test_memory_blocks_keep_what_was_said(llm: SpecFuseLLM) -> None:
    facts = FactExtractionMemoryBlock(name="facts", llm=llm.model_copy(update={"max_tokens": 40}), max_facts=5)
    static = StaticMemoryBlock(name="place", static_content="The guest asks at the observatory.")
    memory = Memory.from_defaults("s", token_limit=200, token_flush_size=60, memory_blocks=[static, facts])
    for turn in range(6):
        await memory.aput(ChatMessage(f"I am Ada, and this is my question number {turn} about the opening hours."))
    told = await memory.aget()
    assert "The guest asks at the observatory." in str(told[0].content)


# ── values ───────────────────────────────────────────────────────────────────────────────────────


async def test_values_are_streamed_in_every_form(llm: SpecFuseLLM) -> None:
    prompt = PromptTemplate("Note when it opens: {fact}")
    fact, room = FACTS[0], {"max_tokens": 60}
    program = FunctionCallingProgram.from_defaults(Hours, prompt=prompt, llm=llm)
    wide = llm.model_copy(update=room)
    streams: list[Any] = [
        list(llm.stream_structured_predict(Hours, prompt, llm_kwargs=room, fact=fact)),
        [v async for v in await llm.astream_structured_predict(Hours, prompt, llm_kwargs=room, fact=fact)],
        list(program.stream_call(llm_kwargs={"max_tokens": 90}, fact=fact)),
        [r.raw for r in wide.as_structured_llm(Hours).stream_chat([ChatMessage(fact)])],
    ]
    for stream in streams:
        assert len(stream) > 1
        assert isinstance(stream[-1], Hours)


# ── indices and queries ──────────────────────────────────────────────────────────────────────────


def test_summary_tree_and_keyword_indices_answer(llm: SpecFuseLLM, documents: list[Document]) -> None:
    short = llm.model_copy(update={"max_tokens": 24})
    summary = SummaryIndex.from_documents(documents).as_query_engine(llm=short, response_mode="tree_summarize")
    tree = TreeIndex.from_documents(documents, llm=short, num_children=2)
    keywords = KeywordTableIndex.from_documents(documents, llm=short)
    engines = [summary, tree.as_query_engine(llm=short, retriever_mode="all_leaf"), keywords.as_query_engine(llm=short)]
    answers = [str(engine.query(QUESTION)) for engine in engines]
    assert all(answers)
    assert "seven" in answers[0]


def test_a_question_is_turned_into_others_first(llm: SpecFuseLLM, documents: list[Document]) -> None:
    short = llm.model_copy(update={"max_tokens": 24})
    engine = SummaryIndex.from_documents(documents).as_query_engine(llm=short)
    hyde = TransformQueryEngine(engine, query_transform=HyDEQueryTransform(llm=short, include_original=True))
    assert str(hyde.query(QUESTION))
    steps = MultiStepQueryEngine(
        engine, query_transform=StepDecomposeQueryTransform(llm=short), index_summary="Facts of the observatory.",
        response_synthesizer=engine._response_synthesizer, num_steps=2,
    )  # fmt: skip
    assert str(steps.query(QUESTION))


def test_a_question_is_a_query_of_a_database(llm: SpecFuseLLM) -> None:
    engine = create_engine("sqlite:///:memory:")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE guests (name TEXT, nights INT)"))
        connection.execute(text("INSERT INTO guests VALUES ('Ada', 3)"))
    short = llm.model_copy(update={"max_tokens": 40})
    database = SQLDatabase(engine, include_tables=["guests"])
    query = NLSQLTableQueryEngine(database, tables=["guests"], llm=short, embed_model=MockEmbedding(4))
    response = query.query("How many nights does Ada stay?")
    assert response.metadata is not None
    assert response.metadata["sql_query"]
    engine.dispose()


def test_a_stored_cache_of_a_pipeline_is_read_again(
    llm: SpecFuseLLM, documents: list[Document], tmp_path: Path
) -> None:
    from llama_index.core.extractors import KeywordExtractor

    stages = [SentenceSplitter(chunk_size=64, chunk_overlap=0), KeywordExtractor(llm=llm, keywords=2)]
    pipeline = IngestionPipeline(transformations=stages, cache=IngestionCache())
    first = pipeline.run(documents=documents)
    pipeline.persist(str(tmp_path / "stored"))
    again = IngestionPipeline(transformations=stages)
    again.load(str(tmp_path / "stored"))
    before = llm.engine.metrics().forwards if llm.engine else {}
    second = again.run(documents=documents)
    assert [node.metadata for node in second] == [node.metadata for node in first]
    assert (llm.engine.metrics().forwards if llm.engine else {}) == before


def test_a_property_graph_is_built_and_asked(llm: SpecFuseLLM, documents: list[Document]) -> None:
    short = llm.model_copy(update={"max_tokens": 40})
    index = PropertyGraphIndex.from_documents(
        documents, llm=short, embed_kg_nodes=False, embed_model=MockEmbedding(4),
        kg_extractors=[SimpleLLMPathExtractor(llm=short, max_paths_per_chunk=2, num_workers=1)],
    )  # fmt: skip
    assert index.property_graph_store.get()
    assert str(index.as_query_engine(llm=short).query(QUESTION))
