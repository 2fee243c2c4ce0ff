"""Do agents over the demo call the right tool, and none where none helps? Twenty and twenty questions, four tools.

    python benchmarks/agents.py [--settings JSON]

`create_agent` of LangChain and LlamaIndex's `FunctionAgent`, `tool_choice` "auto", no examples in the prompt. The
demo's members were taught with other tools, of other subjects, and with none of these questions.
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
    ("Is the air at Harbour Street fit for a run?", "air_quality"),
    ("I would like to know how clean the air at North Park is.", "air_quality"),
    ("Could you check the air around the Old Mill station?", "air_quality"),
    ("My son has asthma. May he play outside near Castle Square?", "air_quality"),
    ("Give me the latest reading of the sensor on Mill Road.", "air_quality"),
    ("Please keep a parking space in the Tower Garage for three hours.", "reserve_parking"),
    ("I need to leave my car at Riverside for 2 hours.", "reserve_parking"),
    ("Reserve parking at West Gate, I stay for five hours.", "reserve_parking"),
    ("Can I get a space in the Opera Garage for four hours?", "reserve_parking"),
    ("We arrive by car and want to park at Station Yard for 6 hours.", "reserve_parking"),
    ("When can I see The Silent Valley in the cinema?", "film_times"),
    ("Are there any showings of Blue Lantern tonight?", "film_times"),
    ("At what times do you show Paper Moon?", "film_times"),
    ("My friends want to watch Harvest Home. Which showings are left?", "film_times"),
    ("Show me the programme for The Last Ferry.", "film_times"),
    ("I want to borrow A Room of Stones.", "lend_book"),
    ("Could you put The Glass Orchard on my library card?", "lend_book"),
    ("May I take home Winter Atlas?", "lend_book"),
    ("Please lend me Songs of the Marsh until next week.", "lend_book"),
    ("I would love to read Letters to a Lighthouse, can I have it?", "lend_book"),
)
NOT_NEEDED = (
    "Hi there, how was your morning?",
    "You have been a great help. See you tomorrow.",
    "What is the tallest mountain in Africa?",
    "Why do leaves turn red in autumn?",
    "Who painted the ceiling of the Sistine Chapel?",
    "How many days has a leap year?",
    "Think of a title for a poem about rain.",
    "Sort these numbers from small to large: 9, 4, 7.",
    "Do spiders have eight legs?",
    "What is the opposite of generous?",
    "Complete this: A stitch in time saves",
    "What is longer, a mile or a kilometre?",
    "Cheer up a colleague who lost a match.",
    "Name the four seasons.",
    "How is paper made?",
    "Who wrote The Jungle Book?",
    "Explain to a beginner what a password is for.",
    "Can ostriches swim?",
    "Make this sentence shorter: I am writing to let you know that I agree.",
    "What does one bring to a picnic?",
)


def air_quality(station: str) -> str:
    """The air quality at a station."""
    return f"The air at {station} is good, 18 points."


def reserve_parking(garage: str, hours: int) -> str:
    """Reserve a parking space in a garage."""
    return f"A space in {garage} is reserved for {hours} hours."


def film_times(film: str) -> str:
    """When a film is shown."""
    return f"{film} is shown at 17:15 and 20:30."


def lend_book(title: str) -> str:
    """Lend a book to the reader who asks."""
    return f"{title} is lent until the end of the month."


TOOLS: list[Callable[..., Any]] = [air_quality, reserve_parking, film_times, lend_book]


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
        asked: Any = {"messages": [("user", question)]}
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
