"""Agents from the ends of tutorials, with the demo: hand-offs, human approval, middlewares, fallbacks, traces.

The members decide words and arguments. Calls are forced here, since models this small may repeat an earlier call. Each
test asserts how LangChain handled our messages.
"""

from collections.abc import Callable
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    HumanInTheLoopMiddleware,
    ModelFallbackMiddleware,
    ModelRequest,
    ModelResponse,
    ModelRetryMiddleware,
    TodoListMiddleware,
    wrap_model_call,
)
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import BaseTool, tool
from langchain_core.tracers import BaseTracer
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, ToolRuntime
from langgraph.types import Command
from pydantic import BaseModel, Field

from langchain_specfuse import ChatSpecFuse, errors
from specfuse_shared import EnsembleEngine

pytestmark = pytest.mark.slow
RUN: list[str] = []
FACT = "The observatory opens at seven in the evening."


@tool
def opening_hours(day: str) -> str:
    """When the observatory opens on a day."""
    RUN.append(day)
    return "It opens at seven in the evening."


class Verdict(BaseModel):
    """Whether the observatory is open."""

    is_open: bool


@pytest.fixture(scope="module")
def llm(demo_engine: EnsembleEngine) -> ChatSpecFuse:
    return ChatSpecFuse(engine=demo_engine, max_tokens=80)


def once(choice: str = "any") -> Any:
    """A middleware: the first turn calls a tool, the next one answers.

    With a `ProviderStrategy` LangChain passes a choice on only in the model's settings.
    """

    @wrap_model_call
    def force(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
        now = "none" if any(isinstance(message, ToolMessage) for message in request.messages) else choice
        if isinstance(request.response_format, ProviderStrategy):
            return handler(request.override(model_settings={"tool_choice": now}))
        return handler(request.override(tool_choice=now))

    return force


def kinds(state: dict[str, Any]) -> list[str]:
    return [message.type for message in state["messages"]]


# ── hand-offs ────────────────────────────────────────────────────────────────────────────────────


class Route(BaseModel):
    """Who answers."""

    worker: Literal["astronomer", "cook"] = Field(description="astronomer: stars and planets; cook: food and drink")


class Routed(MessagesState):
    worker: str


@pytest.mark.parametrize("question", ["What is a comet?", "How is bread baked?"])
def test_a_supervisor_hands_over_to_the_worker_it_names(llm: ChatSpecFuse, question: str) -> None:
    def supervise(state: Routed) -> Command[Any]:
        route = llm.with_structured_output(Route).invoke([*state["messages"], ("user", "Who shall answer?")])
        assert isinstance(route, Route)
        return Command(goto=route.worker, update={"worker": route.worker})

    def work(name: str) -> Callable[[Routed], dict[str, Any]]:
        persona = ("system", f"You are {name}. Answer briefly.")
        return lambda state: {"messages": [llm.invoke([persona, *state["messages"]], max_tokens=12, stop=["\n"])]}

    graph = StateGraph(Routed).add_node("supervisor", supervise, destinations=("astronomer", "cook"))
    for name in ("astronomer", "cook"):
        graph.add_node(name, work(name)).add_edge(name, END)
    app = graph.add_edge(START, "supervisor").compile()
    nodes = [
        node for update in app.stream({"messages": [("user", question)]}, stream_mode="updates") for node in update
    ]
    state = app.invoke({"messages": [("user", question)]})
    assert nodes == ["supervisor", state["worker"]]
    assert kinds(state) == ["human", "ai"]
    assert state["messages"][1].usage_metadata["input_tokens"] > 0


def transfer_to(agent: str, about: str) -> BaseTool:
    @tool(f"transfer_to_{agent}", description=f"Hands the conversation over to the {agent}, who knows {about}.")
    def transfer(runtime: ToolRuntime) -> Command[Any]:
        request = runtime.state["messages"][-1]
        note = ToolMessage(f"The {agent} answers now.", tool_call_id=runtime.tool_call_id or "")
        return Command(goto=agent, graph=Command.PARENT, update={"messages": [request, note]})

    return transfer


def test_an_agent_hands_over_with_a_tool(llm: ChatSpecFuse) -> None:
    tools = [transfer_to("astronomer", "stars"), transfer_to("cook", "food")]
    desk = create_agent(llm, tools, middleware=[once()], name="desk")
    brief = llm.model_copy(update={"max_tokens": 12})
    workers = {name: create_agent(brief, [], name=name) for name in ("astronomer", "cook")}
    graph = StateGraph(MessagesState).add_node("desk", desk, destinations=tuple(workers))
    for name, agent in workers.items():
        graph.add_node(name, agent).add_edge(name, END)
    state = graph.add_edge(START, "desk").compile().invoke({"messages": [("user", "Ask the cook: how is bread made?")]})
    assert kinds(state) == ["human", "ai", "tool", "ai"]
    _, called, reported, answer = state["messages"]
    [call] = called.tool_calls
    assert reported.tool_call_id == call["id"]
    assert answer.name == call["name"].removeprefix("transfer_to_")
    assert reported.text == f"The {answer.name} answers now."
    assert answer.text


# ── people, values, plans ────────────────────────────────────────────────────────────────────────


def test_an_approved_agent_continues_to_a_value_of_its_schema(llm: ChatSpecFuse) -> None:
    RUN.clear()
    ask = HumanInTheLoopMiddleware(interrupt_on={"opening_hours": True})
    agent = create_agent(
        llm,
        [opening_hours],
        middleware=[ask, once()],
        checkpointer=InMemorySaver(),
        response_format=ProviderStrategy(Verdict),
    )
    config: Any = {"configurable": {"thread_id": "1"}}
    stopped = agent.invoke({"messages": [("user", "Is the observatory open on Monday evening?")]}, config)
    [request] = stopped["__interrupt__"][0].value["action_requests"]
    assert RUN == []
    state = agent.invoke(Command(resume={"decisions": [{"type": "approve"}]}), config)
    assert [{"day": day} for day in RUN] == [request["args"]]
    assert kinds(state) == ["human", "ai", "tool", "ai"]
    assert isinstance(state["structured_response"], Verdict)
    assert Verdict.model_validate_json(state["messages"][-1].text) == state["structured_response"]


@pytest.mark.parametrize("strategy", [ProviderStrategy, ToolStrategy])
def test_an_agent_without_tools_returns_the_value(llm: ChatSpecFuse, strategy: Callable[[type], Any]) -> None:
    agent = create_agent(llm, [], response_format=strategy(Verdict))
    state = agent.invoke({"messages": [("user", "The observatory is open now. Is it open?")]})
    answer = next(message for message in state["messages"] if isinstance(message, AIMessage))
    reported = answer.tool_calls[0]["args"] if strategy is ToolStrategy else Verdict.model_validate_json(answer.text)
    assert Verdict.model_validate(reported) == state["structured_response"]
    assert [call["name"] for call in answer.tool_calls] == (["Verdict"] if strategy is ToolStrategy else [])


def test_a_class_alone_selects_the_strategy_with_a_grammar(llm: ChatSpecFuse) -> None:
    state = create_agent(llm, [], response_format=Verdict).invoke({"messages": [("user", "Is it open? Yes.")]})
    assert kinds(state) == ["human", "ai"]
    assert isinstance(state["structured_response"], Verdict)


def test_an_agent_writes_a_list_of_todos_and_answers(llm: ChatSpecFuse) -> None:
    wide = llm.model_copy(update={"max_tokens": 200})
    agent = create_agent(wide, [opening_hours], middleware=[TodoListMiddleware(), once("write_todos")])
    state = agent.invoke({"messages": [("user", "Plan one step: find out when the observatory opens.")]})
    assert kinds(state) == ["human", "ai", "tool", "ai"]
    [call] = state["messages"][1].tool_calls
    assert state["todos"] == call["args"]["todos"]
    assert all(set(todo) == {"content", "status"} for todo in state["todos"])


def test_a_sub_agent_is_a_tool_of_another_one(llm: ChatSpecFuse) -> None:
    inner = create_agent(llm.model_copy(update={"max_tokens": 12}), [])
    requests: list[str] = []

    @tool
    def ask_the_expert(question: str) -> str:
        """Asks the expert of the sea."""
        requests.append(question)
        return str(inner.invoke({"messages": [("user", question)]})["messages"][-1].text)

    outer = create_agent(llm.model_copy(update={"max_tokens": 60}), [ask_the_expert], middleware=[once()])
    state = outer.invoke({"messages": [("user", "Ask the expert: is the sea deep?")]})
    assert kinds(state) == ["human", "ai", "tool", "ai"]
    assert requests == [state["messages"][1].tool_calls[0]["args"]["question"]]
    assert state["messages"][2].text == inner.invoke({"messages": [("user", requests[0])]})["messages"][-1].text


# ── middlewares around a model ───────────────────────────────────────────────────────────────────


def test_configurable_models_fall_back_retry_and_are_cached(llm: ChatSpecFuse, demo_engine: EnsembleEngine) -> None:
    model = ChatSpecFuse(engine=demo_engine, max_tokens=8, cache=InMemoryCache())
    chosen = model.configurable_fields(timeout=ConfigurableField(id="seconds"))
    hurry: Any = {"configurable": {"seconds": 1e-4}}
    with pytest.raises(errors.RequestTimeoutError):
        chosen.invoke("What is the sea?", hurry)
    reported = chosen.with_fallbacks([model], exceptions_to_handle=(TimeoutError,)).invoke("What is the sea?", hurry)
    before = demo_engine.metrics().forwards
    assert model.invoke("What is the sea?").text == reported.text
    assert demo_engine.metrics().forwards == before, "the cache answered"


class Failures(BaseCallbackHandler):
    """The errors of models."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.errors.append(error)


def test_middlewares_retry_and_fall_back(llm: ChatSpecFuse, demo_engine: EnsembleEngine) -> None:
    hurried = ChatSpecFuse(engine=demo_engine, max_tokens=8, timeout=1e-4)
    model = ChatSpecFuse(engine=demo_engine, max_tokens=8)
    retries = ModelRetryMiddleware(max_retries=1, initial_delay=0, on_failure="error")
    options = {"messages": [HumanMessage("What is the sea?")]}
    failures = Failures()
    with pytest.raises(errors.RequestTimeoutError):
        create_agent(hurried, [], middleware=[retries]).invoke(options, {"callbacks": [failures]})
    assert len(failures.errors) == 2
    state = create_agent(hurried, [], middleware=[ModelFallbackMiddleware(model), retries]).invoke(options)
    assert state["messages"][-1].text == model.invoke("What is the sea?").text


def test_a_tracer_receives_an_answer(llm: ChatSpecFuse) -> None:
    class Runs(BaseTracer):
        def __init__(self) -> None:
            super().__init__()
            self.runs: list[Any] = []

        def _persist_run(self, run: Any) -> None:
            self.runs.append(run)

    runs = Runs()
    answer = llm.invoke("What is the sea?", {"callbacks": [runs]}, max_tokens=8)
    [run] = runs.runs
    assert run.extra["invocation_params"]["model"] == llm._model_name()
    usage = run.outputs["generations"][0][0]["message"]["kwargs"]["usage_metadata"]
    assert usage == answer.usage_metadata


# ── retrieval that the model asks for ────────────────────────────────────────────────────────────


class Grade(BaseModel):
    """Whether a text helps to answer a question."""

    relevant: bool


def test_an_agent_retrieves_documents_grades_them_and_answers(llm: ChatSpecFuse) -> None:
    """LangGraph's tutorial: ask for documents, grade them, ask in other words or answer."""

    @tool
    def search(query: str) -> str:
        """Searches the documents of the observatory."""
        return FACT

    def ask(state: MessagesState) -> dict[str, list[BaseMessage]]:
        return {"messages": [llm.bind_tools([search], tool_choice="any").invoke(state["messages"][:1])]}

    def grade(state: MessagesState) -> Literal["answer", "rewrite"]:
        question, text = state["messages"][0].text, state["messages"][-1].text
        result = llm.with_structured_output(Grade).invoke(f"Question: {question}\nText: {text}\nDoes the text help?")
        assert isinstance(result, Grade)
        return "answer" if result.relevant else "rewrite"

    def rewrite(state: MessagesState) -> dict[str, list[BaseMessage]]:
        request = f"Ask this in other words: {state['messages'][0].text}"
        return {"messages": [HumanMessage(llm.invoke(request, max_tokens=16, stop=["\n"]).text)]}

    def answer(state: MessagesState) -> dict[str, list[BaseMessage]]:
        result = next(message.text for message in state["messages"] if isinstance(message, ToolMessage))
        prompt = f"Notes: {result}\nQuestion: {state['messages'][0].text}\nAnswer in one short sentence."
        return {"messages": [llm.invoke(prompt, max_tokens=24)]}

    graph = StateGraph(MessagesState).add_node(ask).add_node("search", ToolNode([search])).add_node(rewrite)
    graph.add_node(answer).add_edge(START, "ask").add_edge("ask", "search").add_conditional_edges("search", grade)
    app = graph.add_edge("rewrite", "answer").add_edge("answer", END).compile()
    state = app.invoke({"messages": [("user", "When does the observatory open?")]})
    way = ["human", "ai", "tool", "human", "ai"] if len(state["messages"]) == 5 else ["human", "ai", "tool", "ai"]
    assert kinds(state) == way
    assert state["messages"][2].tool_call_id == state["messages"][1].tool_calls[0]["id"]
    assert "seven" in state["messages"][-1].text
