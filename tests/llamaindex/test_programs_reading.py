"""Programs of LlamaIndex's tutorials over the real demo ensemble: extractors, rerankers, graphs and evaluators."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from llama_index.core.evaluation import (
    AnswerRelevancyEvaluator,
    ContextRelevancyEvaluator,
    CorrectnessEvaluator,
    EvaluationResult,
    FaithfulnessEvaluator,
    GuidelineEvaluator,
    PairwiseComparisonEvaluator,
    RelevancyEvaluator,
)
from llama_index.core.evaluation.base import BaseEvaluator
from llama_index.core.extractors import (
    DocumentContextExtractor,
    KeywordExtractor,
    PydanticProgramExtractor,
    QuestionsAnsweredExtractor,
    SummaryExtractor,
    TitleExtractor,
)
from llama_index.core.graph_stores.types import KG_NODES_KEY
from llama_index.core.indices.property_graph import (
    DynamicLLMPathExtractor,
    ImplicitPathExtractor,
    SchemaLLMPathExtractor,
    SimpleLLMPathExtractor,
)
from llama_index.core.ingestion import IngestionCache, IngestionPipeline
from llama_index.core.postprocessor import LLMRerank, StructuredLLMRerank
from llama_index.core.postprocessor.rankGPT_rerank import RankGPTRerank
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.schema import BaseNode, Document, NodeRelationship, NodeWithScore, TextNode, TransformComponent
from llama_index.core.storage.docstore import SimpleDocumentStore
from pydantic import BaseModel, Field

from llamaindex_specfuse import SpecFuseLLM
from tests.llamaindex.instrumentation import Listener, readable_or_refused

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_of_ours_fails"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # LlamaIndex's extractors ask asyncio in an old way
]
FACTS = ("The observatory opens at seven in the evening.", "The café of the observatory sells comet tarts.")
QUESTION = "When does the observatory open?"


class Place(BaseModel):
    """A place in a text."""

    name: str = Field(max_length=20)
    indoors: bool


@pytest.fixture(scope="module")
def llm(llm: SpecFuseLLM) -> SpecFuseLLM:
    return llm.model_copy(update={"max_tokens": 10})


def nodes() -> list[TextNode]:
    return [TextNode(text=fact, id_=f"n{number}") for number, fact in enumerate(FACTS)]


def ranked() -> list[NodeWithScore]:
    return [NodeWithScore(node=node, score=0.5) for node in nodes()]


# ── extractors ───────────────────────────────────────────────────────────────────────────────────


def test_a_pipeline_of_extractors_fills_metadata_once(llm: SpecFuseLLM) -> None:
    extractors: list[TransformComponent] = [
        TitleExtractor(llm=llm, nodes=1),
        KeywordExtractor(llm=llm, keywords=2),
        SummaryExtractor(llm=llm),
        QuestionsAnsweredExtractor(llm=llm, questions=1),
    ]
    pipeline = IngestionPipeline(transformations=extractors, cache=IngestionCache())
    first, *_ = pipeline.run(nodes=nodes()[:1])
    names = {"document_title", "excerpt_keywords", "section_summary", "questions_this_excerpt_can_answer"}
    assert {name for name in names if first.metadata[name]} == names
    again, *_ = pipeline.run(nodes=nodes()[:1])
    assert again.metadata == first.metadata


def test_a_program_extracts_instances_of_its_class(llm: SpecFuseLLM) -> None:
    program = FunctionCallingProgram.from_defaults(
        Place, prompt_template_str="Which place is it?\n{input}", llm=llm.model_copy(update={"max_tokens": 60})
    )
    extractor = PydanticProgramExtractor(program=program, input_key="input")
    for node in extractor.process_nodes(nodes()):
        assert Place(name=node.metadata["name"], indoors=node.metadata["indoors"])


def test_a_document_gives_its_passages_their_context(llm: SpecFuseLLM) -> None:
    document = Document(text=" ".join(FACTS), id_="d")
    store = SimpleDocumentStore()
    store.add_documents([document])
    passage = TextNode(text=FACTS[1], relationships={NodeRelationship.SOURCE: document.as_related_node_info()})
    extractor = DocumentContextExtractor(docstore=store, llm=llm, max_context_length=2000, max_output_tokens=8)
    [node] = extractor.process_nodes([passage])
    assert node.metadata["context"]


# ── rerankers ────────────────────────────────────────────────────────────────────────────────────


def test_a_reranker_that_predicts_values_always_ranks(llm: SpecFuseLLM, listener: Listener) -> None:
    reranker = StructuredLLMRerank(llm=llm.model_copy(update={"max_tokens": 40}), top_n=1)
    with readable_or_refused(listener, QUESTION):  # the members can name a document that does not exist
        assert len(reranker.postprocess_nodes(ranked(), query_str=QUESTION)) <= 1


@pytest.mark.parametrize("reranker", [LLMRerank, RankGPTRerank])
def test_a_reranker_that_reads_text_ranks_the_readable_nodes(
    reranker: type[LLMRerank] | type[RankGPTRerank], llm: SpecFuseLLM, listener: Listener
) -> None:
    ranking = reranker(llm=llm.model_copy(update={"max_tokens": 12}), top_n=1)
    with readable_or_refused(listener, QUESTION):
        assert len(ranking.postprocess_nodes(ranked(), query_str=QUESTION)) <= 1


# ── graphs ───────────────────────────────────────────────────────────────────────────────────────


async def entities(extractor: TransformComponent) -> Sequence[BaseNode]:
    result = await extractor.acall(nodes()[:1])
    assert KG_NODES_KEY in result[0].metadata
    return result


async def test_graphs_are_extracted_from_text(llm: SpecFuseLLM) -> None:
    await entities(SimpleLLMPathExtractor(llm=llm, max_paths_per_chunk=1, num_workers=1))
    await entities(DynamicLLMPathExtractor(llm=llm, max_triplets_per_chunk=1, num_workers=1))
    assert await ImplicitPathExtractor().acall(nodes())


async def test_a_graph_with_a_schema_is_extracted_as_values(llm: SpecFuseLLM) -> None:
    wide = llm.model_copy(update={"max_tokens": 70})
    await entities(SchemaLLMPathExtractor(llm=wide, max_triplets_per_chunk=1, num_workers=1))


# ── evaluators ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "evaluator",
    [
        FaithfulnessEvaluator,
        RelevancyEvaluator,
        CorrectnessEvaluator,
        AnswerRelevancyEvaluator,
        ContextRelevancyEvaluator,
        GuidelineEvaluator,
        PairwiseComparisonEvaluator,
    ],
)
async def test_evaluators_give_a_verdict_or_report_that_there_is_none(
    evaluator: type[BaseEvaluator], llm: SpecFuseLLM, listener: Listener
) -> None:
    options = {
        "query": QUESTION,
        "response": "At seven.",
        "contexts": FACTS[:1],
        "reference": "At seven in the evening.",
    }
    judged = "At seven." if evaluator is FaithfulnessEvaluator else QUESTION
    with readable_or_refused(listener, judged):
        result = await evaluator(llm=llm).aevaluate(**options, second_response="At noon.")  # type: ignore[call-arg]
        assert isinstance(result, EvaluationResult)
