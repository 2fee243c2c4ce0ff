"""Programs of LlamaIndex's tutorials over the real demo ensemble: queries, chats, agents and a workflow.

The members decide their words. If LlamaIndex cannot read them, it raises its own error, never one of ours.
"""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import Document, SummaryIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.memory import Memory
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import CitationQueryEngine, RouterQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.selectors import LLMSingleSelector, PydanticSingleSelector
from llama_index.core.tools import QueryEngineTool
from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow, step
from pydantic import BaseModel, Field

from llamaindex_specfuse import SpecFuseLLM
from tests.llamaindex.instrumentation import Listener, readable_or_refused

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_of_ours_fails"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # LlamaIndex's agents use old pydantic
]
FACTS = ("The observatory opens at seven in the evening.", "The café of the observatory sells comet tarts.")
QUESTION = "When does the observatory open?"


class Hours(BaseModel):
    """Opening hours."""

    opens: str = Field(max_length=12, description="When it opens.")
    closed: bool


@pytest.fixture(scope="module")
def llm(llm: SpecFuseLLM) -> SpecFuseLLM:
    return llm.model_copy(update={"max_tokens": 10})


@pytest.fixture(scope="module")
def index() -> SummaryIndex:
    return SummaryIndex.from_documents([Document(text=fact) for fact in FACTS])


def tools(index: SummaryIndex, llm: SpecFuseLLM) -> list[QueryEngineTool]:
    engine = index.as_query_engine(llm=llm)
    return [
        QueryEngineTool.from_defaults(engine, name="hours", description="Answers questions about opening hours."),
        QueryEngineTool.from_defaults(engine, name="food", description="Answers questions about food and drink."),
    ]


def test_citations_are_answered_from_numbered_sources(index: SummaryIndex, llm: SpecFuseLLM) -> None:
    response = CitationQueryEngine.from_args(index, llm=llm).query(QUESTION)
    assert len(str(response)) > 0
    assert response.source_nodes[0].node.get_content().startswith("Source 1:")


def test_a_router_that_calls_a_function_always_chooses(
    index: SummaryIndex, llm: SpecFuseLLM, listener: Listener
) -> None:
    selector = PydanticSingleSelector.from_defaults(llm=llm.model_copy(update={"max_tokens": 50}))
    router = RouterQueryEngine(selector=selector, query_engine_tools=tools(index, llm), llm=llm)
    with readable_or_refused(listener, QUESTION):  # the members can name a choice that does not exist
        response = router.query(QUESTION)
        assert response.metadata is not None
        assert response.metadata["selector_result"].ind in (0, 1)


def test_a_router_that_reads_text_chooses_or_reports_the_unreadable_text(
    index: SummaryIndex, llm: SpecFuseLLM, listener: Listener
) -> None:
    selector = LLMSingleSelector.from_defaults(llm=llm.model_copy(update={"max_tokens": 30}))
    router = RouterQueryEngine(selector=selector, query_engine_tools=tools(index, llm), llm=llm)
    with readable_or_refused(listener, QUESTION):
        assert str(router.query(QUESTION))


async def test_sub_questions_are_asked_or_reported_as_unreadable(
    index: SummaryIndex, llm: SpecFuseLLM, listener: Listener
) -> None:
    both = "When does it open, and what is there to eat?"
    questions = LLMQuestionGenerator.from_defaults(llm=llm.model_copy(update={"max_tokens": 60}))
    engine = SubQuestionQueryEngine.from_defaults(tools(index, llm), llm=llm, question_gen=questions, verbose=False)
    with readable_or_refused(listener, both):
        assert str(await engine.aquery(both))


def test_the_fifth_chat_mode_answers_from_documents(index: SummaryIndex, llm: SpecFuseLLM) -> None:
    engine = index.as_chat_engine(chat_mode=ChatMode.BEST, llm=llm, memory=Memory.from_defaults(token_limit=2000))
    assert "".join(engine.stream_chat(QUESTION).response_gen)
    assert str(engine.chat("And what is sold there?"))
    assert len(engine.chat_history) == 4


async def test_an_agent_gives_its_answer_as_an_instance_of_a_class(llm: SpecFuseLLM) -> None:
    def opening_hours(day: str) -> str:
        """The opening hours on a day."""
        return f"On {day} it opens at seven."

    agent = FunctionAgent(tools=[opening_hours], llm=llm.model_copy(update={"max_tokens": 50}), output_cls=Hours)
    response: Any = await agent.run("When does it open on Friday?")
    assert isinstance(response.structured_response, dict)
    assert isinstance(response.get_pydantic_model(Hours), Hours)


class Draft(Event):
    text: str


class Review(Workflow):
    """Write, then ask whether it is good enough."""

    def __init__(self, llm: SpecFuseLLM, **options: Any) -> None:
        super().__init__(**options)
        self.llm = llm

    @step
    async def write(self, event: StartEvent) -> Draft:
        text = ""
        async for response in await self.llm.astream_chat([ChatMessage(f"Write one sentence about {event.topic}.")]):
            text += response.delta or ""
        return Draft(text=text)

    @step
    async def judge(self, event: Draft) -> StopEvent:
        prompt = PromptTemplate("Is this a sentence about a place?\n\n{text}")
        hours = await self.llm.astructured_predict(Hours, prompt, llm_kwargs={"max_tokens": 40}, text=event.text)
        return StopEvent(result={"text": event.text, "hours": hours})


async def test_a_custom_workflow_writes_and_judges(llm: SpecFuseLLM) -> None:
    result = await Review(llm, timeout=120).run(topic="the observatory")
    assert result["text"]
    assert isinstance(result["hours"], Hours)
