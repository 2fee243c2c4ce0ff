"""Two small models plan a visit with two tools, which read the opening hours and the prices of an observatory.

    python examples/agents_llamaindex.py [--react] ["Your question?"]

LlamaIndex's parts: FunctionAgent (or, with --react, ReActAgent), and SpecFuseLLM as the model. Models this small follow
examples rather than instructions, so the history has two worked examples. A grammar enforces the ReAct format.
"""

import argparse
import asyncio
import json
import re
from typing import Any

import _corpus
from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.base.llms.types import ChatMessage, TextBlock, ToolCallBlock
from llama_index.core.tools import FunctionTool

from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import Grammar

QUESTION = "When is it open in May, and what does an adult pay?"
SUMMER = ("April", "May", "June", "July", "August", "September")
TASK = "Call the tools that the question needs, then answer in one sentence."
USE = r'Action: {}\nAction Input: \{{"{}": "[A-Za-z]+"\}}'
WAYS = (USE.format("opening_hours", "month"), USE.format("ticket_price", "visitor"), r"Answer: [^\n]+")
STEP = r"Thought: [^\n.]{1,40}\.\n(" + "|".join(WAYS) + ")"


def page(name: str) -> str:
    return next(page.text for page in _corpus.pages() if page.name == name)


def opening_hours(month: str) -> str:
    """The opening hours of the visitor centre in a month."""
    summer, winter = re.findall(r"from (\d\d:\d\d to \d\d:\d\d)", page("opening-hours.md"))[:2]
    return str(summer if month in SUMMER else winter)


def ticket_price(visitor: str) -> str:
    """What a visitor pays for a day ticket."""
    rows = re.findall(r"^\| (\w+).* \| ([\d.]+) \|$", page("tickets.md"), re.MULTILINE)
    prices = {name.lower(): euros for name, euros in rows}
    return f"{prices[visitor.lower()]} euros"


def worked(month: str, visitor: str, react: bool) -> list[ChatMessage]:
    """A conversation that solves the task with the two tools."""
    hours, price = opening_hours(month), ticket_price(visitor)
    answer = f"In {month} it is open from {hours}, and a {visitor} pays {price}."
    return [
        ChatMessage(f"When is it open in {month}, and what does a {visitor} pay?"),
        *call("I need the opening hours.", "opening_hours", {"month": month}, hours, react),
        *call("I need the price.", "ticket_price", {"visitor": visitor}, price, react),
        ChatMessage(f"Thought: I can answer.\nAnswer: {answer}" if react else answer, role="assistant"),
    ]


def call(thought: str, tool: str, arguments: dict[str, Any], result: str, react: bool) -> list[ChatMessage]:
    """A call and its result, as messages for the chosen agent."""
    if react:
        step = f"Thought: {thought}\nAction: {tool}\nAction Input: {json.dumps(arguments)}"
        return [ChatMessage(step, role="assistant"), ChatMessage(f"Observation: {result}")]
    id_ = f"{tool} {arguments}"
    block = ToolCallBlock(tool_call_id=id_, tool_name=tool, tool_kwargs=arguments)
    return [
        ChatMessage(role="assistant", blocks=[TextBlock(text=""), block]),
        ChatMessage(result, role="tool", additional_kwargs={"tool_call_id": id_}),
    ]


async def answer(question: str, react: bool) -> None:
    """Run the agent; print its calls and its text as they arrive."""
    llm = SpecFuseLLM(members="demo", max_tokens=60, grammar=Grammar.regex(STEP) if react else None)
    tools: list[Any] = [FunctionTool.from_defaults(opening_hours), FunctionTool.from_defaults(ticket_price)]
    agent = (
        ReActAgent(tools=tools, llm=llm)
        if react
        else FunctionAgent(tools=tools, llm=llm, system_prompt=TASK, allow_parallel_tool_calls=False)
    )
    history = [*worked("January", "student", react), *worked("August", "child", react)]
    run = agent.run(user_msg=question, chat_history=history, max_iterations=6)
    async for event in run.stream_events():
        if isinstance(event, AgentStream):
            print(event.delta, end="", flush=True)
        elif isinstance(event, ToolCallResult):
            print(f"\n[{event.tool_name} {event.tool_kwargs} -> {event.tool_output}]")
    print(f"\n\nAnswer  {await run}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--react", action="store_true", help="use a ReActAgent, which writes its tool calls as text")
    options = parser.parse_args()
    _corpus.quiet()
    asyncio.run(answer(options.question, options.react))


if __name__ == "__main__":
    main()
