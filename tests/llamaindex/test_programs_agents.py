"""Two agents and a person in one workflow, over the real demo ensemble.

Members this small follow examples rather than instructions. Without examples they call LlamaIndex's `handoff`, whose
agent is free text, with a name that does not exist ("Book visits."), repeat it after the error, and end at the limit of
iterations. So the tests use worked examples, or a custom tool that names the agents in its schema, which a grammar
enforces.
"""

from typing import Any, Literal

import pytest
from llama_index.core.agent.workflow import AgentInput, AgentWorkflow, FunctionAgent, ToolCallResult
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.workflow import Context, HumanResponseEvent, InputRequiredEvent

from llamaindex_specfuse import SpecFuseLLM
from tests.support.agents import called, result

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_of_ours_fails"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # LlamaIndex's agents use old pydantic
]
QUESTION = "When is it open on Friday, and can you book for 2 guests?"
EXAMPLES = (("Monday", "18 to 22", 3), ("Sunday", "20 to 24", 4), ("Tuesday", "17 to 21", 5))
TASK = "Call the tools that the question needs, then answer in one sentence."


def opening_hours(day: str) -> str:
    """The opening hours on a day."""
    return f"On {day} it is open from 19 to 23."


async def book_visit(ctx: Context, day: str, guests: int) -> str:
    """Books a visit, if the guest agrees."""
    request = InputRequiredEvent(prefix=f"Book {guests} guests for {day}?")  # type: ignore[call-arg]
    answer = await ctx.wait_for_event(HumanResponseEvent, waiter_event=request, waiter_id="book")
    return f"{guests} guests are booked for {day}." if answer.response == "yes" else "The guest does not want it."


def worked(day: str, hours: str, guests: int) -> list[ChatMessage]:
    """A conversation in which the task was done."""
    passed = "Agent booking is now handling the request due to the following reason: the booking.\n"
    passed += "Please continue with the current request."
    return [
        ChatMessage(f"When is it open on {day}, and can you book for {guests} guests?"),
        called(f"o{day}", "opening_hours", day=day),
        result(f"o{day}", f"On {day} it is open from {hours}."),
        called(f"h{day}", "handoff", to_agent="booking", reason="the booking"),
        result(f"h{day}", passed),
        called(f"b{day}", "book_visit", day=day, guests=guests),
        result(f"b{day}", f"{guests} guests are booked for {day}."),
        ChatMessage(f"On {day} it is open from {hours}, and {guests} guests are booked.", role="assistant"),
    ]


@pytest.fixture(scope="module")
def settings(llm: SpecFuseLLM) -> dict[str, Any]:
    return {
        "llm": llm.model_copy(update={"max_tokens": 60}),
        "system_prompt": TASK,
        "allow_parallel_tool_calls": False,
    }


@pytest.mark.parametrize("answer", ["yes", "no"])
async def test_two_agents_and_a_person_finish_a_booking(settings: dict[str, Any], answer: str) -> None:
    desk = FunctionAgent(
        name="desk", description="Knows opening hours.", tools=[opening_hours], can_handoff_to=["booking"], **settings
    )
    booking = FunctionAgent(
        name="booking", description="Books visits.", tools=[book_visit], can_handoff_to=[], **settings
    )
    workflow = AgentWorkflow(agents=[desk, booking], root_agent="desk")
    history = [message for example in EXAMPLES for message in worked(*example)]
    handler = workflow.run(user_msg=QUESTION, chat_history=history, max_iterations=6)
    requests, calls = [], []
    async for event in handler.stream_events():
        if isinstance(event, InputRequiredEvent):
            requests.append(event.prefix)
            handler.ctx.send_event(HumanResponseEvent(response=answer))  # type: ignore[call-arg]
        if isinstance(event, ToolCallResult):
            calls.append((event.tool_name, event.tool_kwargs, event.tool_output.content))
    output: Any = await handler
    assert requests == ["Book 2 guests for Friday?"]
    assert [name for name, *_ in calls] == ["opening_hours", "handoff", "book_visit"]
    booked = "2 guests are booked for Friday." if answer == "yes" else "The guest does not want it."
    assert calls[-1] == ("book_visit", {"day": "Friday", "guests": 2}, booked)
    assert output.current_agent_name == "booking"
    assert "from 19 to 23" in str(output)


async def send_to(ctx: Context, agent: Literal["guide", "booking"]) -> str:
    """Sends the guest to another agent: "guide" knows opening hours, "booking" books visits."""
    await ctx.store.set("next_agent", agent)
    return f"The agent {agent} answers now."


@pytest.mark.parametrize("question", ["Please book a visit for 2 guests on Friday.", "When is it open on Friday?"])
async def test_a_tool_whose_schema_names_the_agents_hands_over_to_one_of_them(
    settings: dict[str, Any], question: str
) -> None:
    """Which one is up to the members; that there is one, and that it answers, is not."""
    desk = FunctionAgent(
        name="desk", description="Welcomes.", tools=[send_to], initial_tool_choice="send_to", **settings,
        can_handoff_to=[],
    )  # fmt: skip
    specialists = [
        FunctionAgent(name=name, description=name, tools=[], can_handoff_to=[], **settings)
        for name in ("guide", "booking")
    ]
    handler = AgentWorkflow(agents=[desk, *specialists], root_agent="desk").run(user_msg=question, max_iterations=3)
    turns, sent = [], []
    async for event in handler.stream_events():
        if isinstance(event, AgentInput):
            turns.append(event)
        if isinstance(event, ToolCallResult):
            sent.append(event.tool_kwargs["agent"])
    output: Any = await handler
    assert [turn.current_agent_name for turn in turns] == ["desk", *sent]
    assert output.current_agent_name == sent[0]
    assert turns[1].input[-1].additional_kwargs["tool_call_id"]
    assert str(output)
