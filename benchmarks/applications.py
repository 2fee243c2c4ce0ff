"""The demo in applications: questions over documents, agents with tools, and forms filled from notes.

    python benchmarks/applications.py questions [--settings JSON] [--member NAME] [--published] [--out FILE.md]
    python benchmarks/applications.py agents [--settings JSON]
    python benchmarks/applications.py extraction

`questions`: twenty questions over the documents of the examples, with the chain of `examples/rag_langchain.py`. It
prints the answers and how many are right. A right answer contains all facts of its question.

`agents`: whether agents call the right tool for twenty questions, and no tool for twenty others. There are four tools.
The agents are LangChain's `create_agent` and LlamaIndex's `FunctionAgent`, with `tool_choice` "auto" and no examples in
the prompt. The demo's members were trained with other tools, other subjects and none of these questions.

`extraction`: the share of right fields in ten forms filled from short notes, with three prompts for the schema.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from figures import shortened
from pydantic import BaseModel, Field

from langchain_specfuse import ChatSpecFuse
from specfuse_shared import EnsembleConfig, EnsembleEngine, Grammar, MemberConfig, Message, SamplingParams, demo_members
from specfuse_shared.text.grammars.grammar import schema_request

app = typer.Typer(help=__doc__, add_completion=False, no_args_is_help=True)

EXAMPLES = Path(__file__).parents[1] / "examples"
WORDS = 10
"""Maximum words of an answer on the page."""


@app.command()
def questions(
    out: Annotated[Path | None, typer.Option(help="Markdown file for the questions and answers")] = None,
    settings: Annotated[str, typer.Option(help="settings of the ensemble, as JSON")] = "{}",
    member: Annotated[str | None, typer.Option(help="use only this member")] = None,
    published: Annotated[bool, typer.Option(help="SmolLM2 without its adapter")] = False,
) -> None:
    """Answer twenty questions over the documents of the examples."""
    smol, gemma = demo_members()
    pair = (replace(smol, adapter=None) if published else smol, gemma)
    members = [m for m in pair if member in (None, m.name)]
    answers = ask_all(members, json.loads(settings))
    right = 0
    for row, answer in answers:
        hit = is_right(row, answer)
        right += hit
        print(f"{'+' if hit else '-'} {row['question']}\n    {answer}")
    print(f"{right} of {len(answers)} contain the fact")
    if out is not None:
        out.write_text(page(answers, right), encoding="utf-8")


def page(answers: Sequence[tuple[dict[str, Any], str]], right: int) -> str:
    """The questions and answers as Markdown. Whole answers are graded; the page has their first `WORDS` words."""
    lines = [
        "# Twenty questions",
        "",
        "The demo ensemble answers all questions over `examples/documents`, with the chain of",
        "`examples/rag_langchain.py` (`python benchmarks/applications.py questions --out FILE`).",
        f"{right} of {len(answers)} answers contain the fact. Answers are cut after {WORDS} words here.",
        "The members were not trained on these documents or on the wording of the prompt. 12 questions have the form",
        "of training questions about synthetic facts ([training data](experiments.md#training-data)).",
        "",
    ]
    for row, answer in answers:
        mark = "" if is_right(row, answer) else " *Wrong.*"
        lines.append(f"- **{row['question']}** {' '.join(shortened(answer, WORDS).split())}{mark}")
    return "\n".join(lines) + "\n"


def ask_all(members: Sequence[MemberConfig], settings: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Every question with its answer."""
    sys.path.insert(0, str(EXAMPLES))
    import _corpus
    import rag_langchain

    _corpus.quiet()
    rows = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder, EnsembleEngine(EnsembleConfig(members, **settings)) as engine:
        store = rag_langchain.open_store(Path(folder), rag_langchain.MiniLM())
        model = ChatSpecFuse(engine=engine, max_tokens=rag_langchain.MAX_TOKENS)
        chain = rag_langchain.build_chain(store, model)
        results = [chain.invoke(row["question"]) for row in rows]  # one by one: in bf16, batches change answers
        store.client.close()
    return [(row, answer["answer"].text.strip()) for row, answer in zip(rows, results, strict=True)]


def is_right(row: dict[str, Any], answer: str) -> bool:
    return all(fact.lower() in answer.lower() for fact in row["facts"])


# ── agents ────────────────────────────────────────────────────────────────────────────────────────

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


@app.command()
def agents(settings: Annotated[str, typer.Option(help="settings of the ensemble, as JSON")] = "{}") -> None:
    """Ask twenty questions that need a tool and twenty that need none, with both frameworks."""
    warnings.simplefilter("ignore")
    with EnsembleEngine(EnsembleConfig(demo_members(), **json.loads(settings))) as engine:
        for name, ask in (("create_agent", with_langchain(engine)), ("FunctionAgent", with_llamaindex(engine))):
            print(f"\n{name}")
            called = [show(ask, question, [tool]) for question, tool in NEEDED]
            quiet = [show(ask, question, []) for question in NOT_NEEDED]
            print(f"{name}: the right tool in {sum(called)} of {len(called)}, none in {sum(quiet)} of {len(quiet)}")


Ask = Callable[[str], tuple[list[str], str]]


def show(ask: Ask, question: str, expected: list[str]) -> bool:
    """Ask and print; whether the first call is the expected one, or, if `expected` is empty, there is no call."""
    calls, answer = ask(question)
    right = [call.partition("(")[0] for call in calls[:1]] == expected
    print(f"{'+' if right else '-'} {question}  {' '.join(calls)}\n    {answer}")
    return right


def with_langchain(engine: EnsembleEngine) -> Ask:
    from langchain.agents import create_agent
    from langchain_core.messages import AIMessage

    agent = create_agent(ChatSpecFuse(engine=engine, max_tokens=80), TOOLS)

    def ask(question: str) -> tuple[list[str], str]:
        messages: list[Any] = []
        request: Any = {"messages": [("user", question)]}
        try:
            for state in agent.stream(request, {"recursion_limit": 8}, stream_mode="values"):
                messages = state["messages"]
            answer = messages[-1].text
        except Exception as error:
            answer = f"{type(error).__name__}: {error}".partition("\n")[0]
        calls = [call for message in messages if isinstance(message, AIMessage) for call in message.tool_calls]
        return [f"{call['name']}({call['args']})" for call in calls], answer

    return ask


def with_llamaindex(engine: EnsembleEngine) -> Ask:
    from llama_index.core.agent.workflow import FunctionAgent, ToolCall

    from llamaindex_specfuse import SpecFuseLLM

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


# ── extraction ────────────────────────────────────────────────────────────────────────────────────


class Booking(BaseModel):
    """A visit to the observatory."""

    adults: int = Field(ge=0, le=9)
    children: int = Field(ge=0, le=9)
    day: Literal["Thursday", "Friday", "Saturday", "Sunday"]
    arrival: Literal["car", "train", "bus"]
    room: bool


class Event(BaseModel):
    title: str = Field(description="what the event is, in a few words")
    date: str = Field(description="the day, as YYYY-MM-DD", json_schema_extra={"format": "date"})
    place: str


class Person(BaseModel):
    name: str
    age: int
    city: str
    profession: str


class Review(BaseModel):
    product: str
    stars: int = Field(ge=1, le=5, description="the rating, 1 to 5")
    sentiment: Literal["positive", "negative", "neutral"]


class Order(BaseModel):
    item: str
    quantity: int = Field(ge=1)
    color: Literal["red", "blue", "green", "black"]
    express: bool


Note = tuple[type[BaseModel], str, dict[str, Any]]
NOTES: tuple[Note, ...] = (
    (
        Booking,
        "Fill in the booking from the note.\n\n"
        "Note: 2 adults and 1 child come on Saturday. They arrive by train and need a room for one night.",
        {"adults": 2, "children": 1, "day": "Saturday", "arrival": "train", "room": True},
    ),
    (
        Booking,
        "Fill in the booking from the note.\n\n"
        "Note: Four adults and no children will visit on Sunday by bus. They need no room.",
        {"adults": 4, "children": 0, "day": "Sunday", "arrival": "bus", "room": False},
    ),
    (
        Event,
        "Extract the event.\n\nText: The harvest fair takes place in Bristol on 3 May 2024.",
        {"date": "2024-05-03", "place": "Bristol"},
    ),
    (
        Event,
        "Extract the event.\n\nText: On 12 October 2025 a piano concert will be held in Vienna.",
        {"date": "2025-10-12", "place": "Vienna"},
    ),
    (
        Person,
        "Extract the person: Maria Lopez is a 34 year old nurse who lives in Lisbon.",
        {"name": "Maria Lopez", "age": 34, "city": "Lisbon", "profession": "nurse"},
    ),
    (
        Person,
        "Extract the person: Tom Becker, 51, works as a carpenter in Hamburg.",
        {"name": "Tom Becker", "age": 51, "city": "Hamburg", "profession": "carpenter"},
    ),
    (
        Review,
        "Read the review: I bought this kettle last week and it is wonderful. Five stars!",
        {"product": "kettle", "stars": 5, "sentiment": "positive"},
    ),
    (
        Review,
        "Read the review: The lamp broke after two days. Terrible, one star.",
        {"product": "lamp", "stars": 1, "sentiment": "negative"},
    ),
    (
        Order,
        "Read the order: Please send me three green umbrellas, with express delivery.",
        {"quantity": 3, "color": "green", "express": True},
    ),
    (
        Order,
        "Read the order: One black suitcase, normal delivery is fine.",
        {"quantity": 1, "color": "black", "express": False},
    ),
)


def whole_schema(schema: dict[str, Any]) -> Message:
    return Message("system", f"Answer with JSON that fits this JSON schema:\n{json.dumps(schema)}")


PROMPTS: dict[str, Callable[[dict[str, Any]], Message | None]] = {
    "nothing": lambda schema: None,
    "the whole schema": whole_schema,
    "names, descriptions, formats (as in both adapters)": schema_request,
}


@app.command()
def extraction() -> None:
    """Fill ten forms from notes, with three prompts for the schema."""
    with EnsembleEngine(EnsembleConfig(demo_members())) as engine:
        for name, schema_prompt in PROMPTS.items():
            right = fields = 0
            for output_cls, text, expected in NOTES:
                schema = output_cls.model_json_schema()
                message = schema_prompt(schema)
                messages = [Message("user", text), *([message] if message else [])]
                params = SamplingParams(max_tokens=100, grammar=Grammar.json_schema(schema))
                value = json.loads(engine.generate(messages, params).text)
                right += sum(str(value[key]).lower() == str(fact).lower() for key, fact in expected.items())
                fields += len(expected)
                print(f"    {json.dumps(value)}")
            print(f"{right:2} of {fields} fields right: {name}")


if __name__ == "__main__":
    app()
