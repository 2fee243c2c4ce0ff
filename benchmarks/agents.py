"""Do agents over the demo call the right tool, and none where none helps? Ten and ten plain questions, two tools.

    python benchmarks/agents.py [--settings JSON]

`create_agent` of LangChain and LlamaIndex's `FunctionAgent`, `tool_choice` "auto", no examples in the prompt. Neither
the tools nor the questions, nor the questions' forms, are those the demo's members were taught with.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from llama_index.core.agent.workflow import FunctionAgent, ToolCall

from langchain_specfuse import ChatSpecFuse
from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import EnsembleConfig, EnsembleEngine, demo_members

NEEDED = (
    ("Should I expect sun in San Francisco, CA?", "get_weather"),
    ("What's the weather like in Madrid?", "get_weather"),
    ("Is it raining in Glasgow right now?", "get_weather"),
    ("Tell me the weather in Toronto.", "get_weather"),
    ("How is the weather in Lisbon today?", "get_weather"),
    ("Can you work out 17 × 25 for me?", "multiply"),
    ("I need the product of 6 and 14.", "multiply"),
    ("How much is 33 times 12?", "multiply"),
    ("Please compute 19 * 8.", "multiply"),
    ("What do you get if you multiply 41 and 7?", "multiply"),
)
NOT_NEEDED = (
    "Hi there!",
    "Thanks, that was helpful.",
    "What is the capital of Italy?",
    "Who painted the Mona Lisa?",
    "Name four colours.",
    "Write a short sentence about cats.",
    "What is the opposite of small?",
    "How many days are in a week?",
    "Tell me something about elephants.",
    "What is photosynthesis?",
)


def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    return f"It is sunny and 22 degrees in {city}."


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


TOOLS: list[Callable[..., Any]] = [get_weather, multiply]


def main(settings: Annotated[str, typer.Option(help="settings of the ensemble, as JSON")] = "{}") -> None:
    """Ask both agents everything."""
    warnings.simplefilter("ignore")
    with EnsembleEngine(EnsembleConfig(demo_members(), **json.loads(settings))) as engine:
        for name, ask in (("create_agent", with_langchain(engine)), ("FunctionAgent", with_llamaindex(engine))):
            print(f"\n{name}")
            called = [show(ask, question, [wanted]) for question, wanted in NEEDED]
            quiet = [show(ask, question, []) for question in NOT_NEEDED]
            print(f"{name}: the right tool in {sum(called)} of {len(called)}, none in {sum(quiet)} of {len(quiet)}")


Ask = Callable[[str], tuple[list[str], str]]


def show(ask: Ask, question: str, wanted: list[str]) -> bool:
    """Whether the first calls are the wanted ones."""
    calls, answer = ask(question)
    right = [call.partition("(")[0] for call in calls[:1]] == wanted
    print(f"{'+' if right else '-'} {question}  {' '.join(calls)}\n    {answer}")
    return right


def with_langchain(engine: EnsembleEngine) -> Ask:
    agent = create_agent(ChatSpecFuse(engine=engine, max_tokens=80), TOOLS)

    def ask(question: str) -> tuple[list[str], str]:
        messages: list[Any] = []
        asked = {"messages": [("user", question)]}
        try:
            for state in agent.stream(asked, {"recursion_limit": 8}, stream_mode="values"):
                messages = state["messages"]
            answer = messages[-1].text
        except Exception as error:
            answer = f"{type(error).__name__}: {error}".partition("\n")[0]
        calls = [call for message in messages if isinstance(message, AIMessage) for call in message.tool_calls]
        return [f"{call['name']}({call['args']})" for call in calls], answer

    return ask


def with_llamaindex(engine: EnsembleEngine) -> Ask:
    agent = FunctionAgent(tools=TOOLS, llm=SpecFuseLLM(engine=engine, max_tokens=80), streaming=False)

    async def run(question: str) -> tuple[list[str], str]:
        handler, calls = agent.run(question, max_iterations=4), []
        async for event in handler.stream_events():
            if type(event) is ToolCall:
                calls.append(f"{event.tool_name}({event.tool_kwargs})")
        try:
            return calls, str(await handler)
        except Exception as error:
            return calls, f"{type(error).__name__}: {error}"

    return lambda question: asyncio.run(run(question))


if __name__ == "__main__":
    typer.run(main)
