"""SpecFuseLLM in other processes: no engine at construction, a pickled configuration, errors that reach the caller."""

from __future__ import annotations

import copy
import multiprocessing
import pickle

import pytest
from llama_index.core.extractors import KeywordExtractor
from llama_index.core.ingestion import IngestionCache, IngestionPipeline
from llama_index.core.schema import TextNode

from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import Grammar, MemberConfig
from specfuse_shared.errors import PromptTooLongError

two_processors = pytest.mark.skipif(multiprocessing.cpu_count() < 2, reason="LlamaIndex starts a worker a processor")


def test_construction_copies_and_pickles_take_no_engine(tiny_members: list[MemberConfig]) -> None:
    llm = SpecFuseLLM(members=tiny_members, grammar=Grammar.choice(["a"]), additional_kwargs={"seed": 1})
    assert llm.metadata.context_window == 4096
    for each in (llm, copy.copy(llm), copy.deepcopy(llm), pickle.loads(pickle.dumps(llm))):
        assert each._leases == []
        assert (each.members, each.grammar, each.additional_kwargs) == (llm.members, llm.grammar, {"seed": 1})


def test_a_context_manager_loads_nothing_and_frees_loaded_members(tiny_members: list[MemberConfig]) -> None:
    with SpecFuseLLM(members=tiny_members, max_tokens=3, seed=11) as llm:
        assert llm._leases == []
        engine = llm.load()._resolve_engine()
        assert llm.complete("Hello").text
    assert engine.closed
    assert llm._leases == []


def pipeline(llm: SpecFuseLLM) -> IngestionPipeline:
    return IngestionPipeline(transformations=[KeywordExtractor(llm=llm, keywords=2)], cache=IngestionCache())


@pytest.mark.slow
@two_processors
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # LlamaIndex's extractors ask asyncio in an old way
@pytest.mark.timeout(280)
def test_a_pipeline_extracts_in_two_processes_and_caches_the_result(tiny_members: list[MemberConfig]) -> None:
    extracting = pipeline(SpecFuseLLM(members=tiny_members, max_tokens=6))
    nodes = [TextNode(text=f"Text {number}.", id_=str(number)) for number in range(2)]
    first = extracting.run(nodes=copy.deepcopy(nodes), num_workers=2)
    assert [len(node.metadata["excerpt_keywords"]) > 0 for node in first] == [True, True]
    again = extracting.run(nodes=copy.deepcopy(nodes))  # from the cache that the workers filled
    assert [node.metadata for node in again] == [node.metadata for node in first]


@pytest.mark.slow
@two_processors
@pytest.mark.timeout(280)
def test_an_error_in_a_worker_reaches_the_caller(tiny_members: list[MemberConfig]) -> None:
    extracting = pipeline(SpecFuseLLM(members=tiny_members, max_tokens=6))
    with pytest.raises(PromptTooLongError, match="shorten the prompt") as caught:
        extracting.run(nodes=[TextNode(text="much " * 9000), TextNode(text="x")], num_workers=2)
    assert caught.value.limit == 4096
