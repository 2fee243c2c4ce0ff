"""Agents over the real demo ensemble finish a task of two tools, on their own decisions.

Models this small follow examples rather than instructions, so each agent is shown three worked examples as its history.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
from llama_index.core.agent.workflow import (
    AgentStream,
    AgentWorkflow,
    FunctionAgent,
    ReActAgent,
    ToolCallResult,
)
from llama_index.core.base.llms.types import ChatMessage

from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import Grammar
from tests.support.agents import (
    ANSWER,
    EXAMPLES,
    HOURS,
    PRICE,
    QUESTION,
    TASK,
    worked,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # LlamaIndex's agents use old pydantic


@pytest.fixture(scope="module")
def llm(llm: SpecFuseLLM) -> SpecFuseLLM:
    return llm.model_copy(update={"max_tokens": 60})


async def run(agent: FunctionAgent | ReActAgent | AgentWorkflow, history: list[ChatMessage]) -> Run:
    """The agent's answer to the question, its tool calls, and when its words arrived."""
    handler = agent.run(user_msg=QUESTION, chat_history=history, max_iterations=6)
    calls: list[Any] = []
    words: list[Any] = []
    async for event in handler.stream_events():
        if isinstance(event, ToolCallResult):
            calls.append((event.tool_name, event.tool_kwargs))
            words.clear()
        elif isinstance(event, AgentStream) and event.delta:
            words.append((time.monotonic(), event.delta))
            assert event.raw is not None
            assert event.raw["specfuse"]["member"] is not None
    return Run(str(await handler), calls, words)


class Run:
    def __init__(self, answer: str, calls: list[Any], words: list[tuple[float, str]]) -> None:
        self.answer, self.calls, self.words = answer, calls, words

    def assert_spread_out(self) -> None:
        """The last answer was streamed, segment by segment, as it was made."""
        times = [moment for moment, _ in self.words]
        assert len(times) > 2
        assert times[-1] - times[0] > 0.1
        assert max(b - a for a, b in pairwise(times)) < 0.9 * (times[-1] - times[0])


def worked_in_react(day: str, hours: str, visitor: str, price: str) -> list[ChatMessage]:
    """The same in ReAct's format."""
    prompt = 'Thought: I need {}.\nAction: {}\nAction Input: {{"{}": "{}"}}'
    answered = f"Thought: I can answer.\nAnswer: On {day} it is open from {hours}, and a {visitor} pays {price}."
    return [
        ChatMessage(f"When is it open on {day}, and what does a {visitor} pay?"),
        ChatMessage(prompt.format("the opening hours", "opening_hours", "day", day), role="assistant"),
        ChatMessage(f"Observation: On {day} it is open from {hours}."),
        ChatMessage(prompt.format("the price", "ticket_price", "visitor", visitor), role="assistant"),
        ChatMessage(f"Observation: {price}"),
        ChatMessage(answered, role="assistant"),
    ]


@pytest.mark.slow
async def test_a_function_agent_finishes_a_task_of_two_tools(llm: SpecFuseLLM) -> None:
    agent = FunctionAgent(tools=[HOURS, PRICE], llm=llm, system_prompt=TASK, allow_parallel_tool_calls=False)
    done = await run(agent, [message for example in EXAMPLES for message in worked(*example)])
    assert done.calls == [("opening_hours", {"day": "Friday"}), ("ticket_price", {"visitor": "child"})]
    assert done.answer == ANSWER
    done.assert_spread_out()


@pytest.mark.slow
async def test_a_react_agent_finishes_a_task_of_two_tools(llm: SpecFuseLLM) -> None:
    """A grammar holds ReAct's form: such small members give tools what LlamaIndex's header gives in its example."""
    use = r'Action: {}\nAction Input: \{{"{}": "[A-Za-z]+"\}}'
    ways = (use.format("opening_hours", "day"), use.format("ticket_price", "visitor"), r"Answer: [^\n]+")
    step = Grammar.regex(r"Thought: [^\n.]{1,40}\.\n(" + "|".join(ways) + ")")
    agent = ReActAgent(tools=[HOURS, PRICE], llm=llm.model_copy(update={"grammar": step}))
    done = await run(agent, [message for example in EXAMPLES for message in worked_in_react(*example)])
    assert done.calls == [("opening_hours", {"day": "Friday"}), ("ticket_price", {"visitor": "child"})]
    assert done.answer == ANSWER
    done.assert_spread_out()


@pytest.mark.slow
async def test_a_workflow_of_two_agents_hands_the_task_over_and_finishes_it(llm: SpecFuseLLM) -> None:
    settings: dict[str, Any] = {"llm": llm, "system_prompt": TASK, "allow_parallel_tool_calls": False}
    hours = FunctionAgent(
        name="hours", description="Knows opening hours.", tools=[HOURS], can_handoff_to=["prices"], **settings
    )
    prices = FunctionAgent(name="prices", description="Knows prices.", tools=[PRICE], can_handoff_to=[], **settings)
    workflow = AgentWorkflow(agents=[hours, prices], root_agent="hours")
    done = await run(workflow, [message for example in EXAMPLES for message in worked(*example, handoff=True)])
    assert [name for name, _ in done.calls] == ["opening_hours", "handoff", "ticket_price"]
    assert done.answer == ANSWER
    done.assert_spread_out()


async def test_a_react_step_ends_before_the_observation(llm: SpecFuseLLM) -> None:
    messages = ReActAgent(tools=[HOURS], llm=llm).formatter.format(
        [HOURS], chat_history=[*worked_in_react(*EXAMPLES[0]), ChatMessage(QUESTION)]
    )
    response = await llm.achat(messages)
    assert "Observation:" not in (response.message.content or "")
    assert (await llm.achat([ChatMessage("Write: 'Observation:'")])).raw["specfuse"]["stop_sequence"] is None
