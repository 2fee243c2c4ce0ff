"""Query engines over the real demo ensemble: every response mode, plain, streaming and asynchronous."""

from __future__ import annotations

import pytest
from llama_index.core import Document, Settings, SummaryIndex
from llama_index.core.base.response.schema import RESPONSE_TYPE, StreamingResponse
from llama_index.core.response_synthesizers import ResponseMode

from llamaindex_specfuse import SpecFuseLLM
from tests.llamaindex.instrumentation import Listener

FACTS = ("The observatory opens at seven in the evening.", "The café of the observatory sells comet tarts.")
QUESTION = "When does the observatory open?"
CALLS = {
    ResponseMode.REFINE: 2,
    ResponseMode.COMPACT: 1,
    ResponseMode.SIMPLE_SUMMARIZE: 1,
    ResponseMode.TREE_SUMMARIZE: 1,
    ResponseMode.GENERATION: 1,
    ResponseMode.NO_TEXT: 0,
    ResponseMode.CONTEXT_ONLY: 0,
    ResponseMode.ACCUMULATE: 2,
    ResponseMode.COMPACT_ACCUMULATE: 1,
}
"""LLM calls of each mode for two short documents."""
STREAMING = (ResponseMode.REFINE, ResponseMode.COMPACT, ResponseMode.SIMPLE_SUMMARIZE, ResponseMode.TREE_SUMMARIZE)


@pytest.fixture
def llm(llm: SpecFuseLLM, monkeypatch: pytest.MonkeyPatch) -> SpecFuseLLM:
    """An LLM with short answers, also LlamaIndex's default: modes without an LLM still require one."""
    short = llm.model_copy(update={"max_tokens": 8})
    monkeypatch.setattr(Settings, "_llm", short)
    return short


@pytest.fixture(scope="module")
def index() -> SummaryIndex:
    return SummaryIndex.from_documents([Document(text=fact) for fact in FACTS])


def query(index: SummaryIndex, llm: SpecFuseLLM, mode: ResponseMode, streaming: bool = False) -> RESPONSE_TYPE:
    return index.as_query_engine(llm=llm, response_mode=mode, streaming=streaming).query(QUESTION)


def test_every_response_mode_is_tried() -> None:
    assert set(CALLS) == set(ResponseMode)


@pytest.mark.parametrize("mode", CALLS, ids=str)
def test_a_query_engine_answers_in_every_response_mode(
    mode: ResponseMode, index: SummaryIndex, llm: SpecFuseLLM, listener: Listener
) -> None:
    response = query(index, llm, mode)
    request, answered = listener.of("LLMChatStartEvent"), listener.of("LLMChatEndEvent")
    assert len(request) == len(answered) == CALLS[mode]
    if mode == ResponseMode.CONTEXT_ONLY:
        assert str(response) == "\n\n".join(FACTS)
    elif answered:
        assert (answered[-1].response.message.content or "") in str(response)
        assert len(str(response)) > 10
    if answered and mode != ResponseMode.GENERATION:
        assert FACTS[0] in listener.prompts()[0]


@pytest.mark.parametrize("mode", STREAMING, ids=str)
def test_a_query_engine_streams_the_segments(
    mode: ResponseMode, index: SummaryIndex, llm: SpecFuseLLM, listener: Listener
) -> None:
    response = query(index, llm, mode, streaming=True)
    assert isinstance(response, StreamingResponse)
    joined = "".join(response.response_gen)
    reported = listener.of("SpecFuseSegmentEvent")
    assert joined.endswith("".join(event.text for event in reported if event.span_id == reported[-1].span_id))
    assert joined == listener.of("LLMChatEndEvent")[-1].response.message.content


async def test_a_query_engine_answers_asynchronously(index: SummaryIndex, llm: SpecFuseLLM) -> None:
    engine = index.as_query_engine(llm=llm, response_mode=ResponseMode.COMPACT)
    assert str(await engine.aquery(QUESTION)) == str(engine.query(QUESTION))
