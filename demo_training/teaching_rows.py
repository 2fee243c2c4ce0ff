"""Training rows for tools and for a common style of the demo's models (for `train_demo_adapter.py`).

    python demo_training/teaching_rows.py tools OUT.jsonl [--rows 700] [--kinds call,said,second,plain] [--data FILE]
    python demo_training/teaching_rows.py own DATA.jsonl OUT.jsonl [--rows 400]
    python demo_training/teaching_rows.py notes DATA.jsonl OUT.jsonl [--rows 400]
    python demo_training/teaching_rows.py passages OUT.jsonl [--rows 300]
    python demo_training/teaching_rows.py obeyed DATA.jsonl OUT.jsonl [--rows 300]
    python demo_training/teaching_rows.py keyed DATA.jsonl OUT.jsonl [--rows 150]

`tools`: synthetic conversations with synthetic tools: a call if one is needed, an answer to its result, a second call
if there are two questions, and no call if none helps (small talk, or the short answers of DATA). `own`: the answers of
the published SmolLM2-135M-Instruct to the prompts of DATA without a passage, if they end and do not loop. `notes`:
questions on a passage with a short answer, each with two retrieval prompts that contain the right passage and another
row's. `passages`: questions on synthetic passages. `obeyed`: the prompts of DATA with an instruction on the form of the
answer, which is changed to follow it, or, for long answers, with an instruction to explain. `keyed`: the same prompts,
answered as JSON with two requested keys, half of them in JSON mode. Rows are `{"messages", "tools", "answer"}`, with
messages and tools in OpenAI's format. Equal seeds give equal rows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import teaching_forms
import teaching_passages
import typer

from specfuse_shared import (
    EnsembleConfig,
    EnsembleEngine,
    EnsembleResult,
    FinishReason,
    Message,
    SamplingParams,
    demo_members,
)
from specfuse_shared.comparing.metrics import is_looping
from specfuse_shared.text.grammars.grammar import schema_request
from specfuse_shared.text.tool_calls import call_text

app = typer.Typer(add_completion=False, help=__doc__, no_args_is_help=True)
Row = dict[str, Any]

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant with access to tools.",
    "Answer the user. Call a tool if it helps.",
    "You help visitors of a website.",
    "Be brief.",
)
CITIES = (
    "Paris", "Oslo", "Lima", "Nairobi", "Kyoto", "Denver, CO", "Leeds", "Porto", "Bern", "Hanoi", "Cairo", "Boston, MA",
    "Ghent", "Turin", "Quito", "Perth", "Graz", "Cork", "Accra", "Austin, TX", "New York, NY", "São Paulo", "Mumbai",
)  # fmt: skip
PEOPLE = ("Ada", "Bruno", "Chen", "Dalia", "Emil", "Fatima", "Goran", "Hana", "Ines", "Jonas", "Kofi", "Lena", "Mara")
THINGS = ("lamp", "kettle", "bicycle", "tent", "blue jacket", "notebook", "headphones", "garden chair", "clock", "mug")
WORDS = ("ephemeral", "garden", "bridge", "moonlight", "patience", "harbour", "thunder", "window", "river", "copper")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "tomorrow")
TIMES = ("7:30", "9:00", "12:15", "16:45", "18:00", "20:30")
CODES = ("A17", "QX-204", "7781", "B-33", "LN9042", "C5", "2210", "K-8")
COINS = ("USD", "EUR", "GBP", "JPY", "CHF", "CAD")
TOPICS = ("opening hours", "refunds", "parking", "school groups", "the summer concert", "lost property", "membership")
DISHES = ("pancakes", "lentil soup", "apple pie", "fried rice", "tomato salad", "banana bread")


@dataclass(frozen=True)
class Taught:
    """A synthetic tool: its parameters with the sources of their values, the requests for it, and its results."""

    name: str
    description: str
    values: Mapping[str, Sequence[Any]]
    questions: Sequence[str]
    results: Sequence[str]
    answer: str
    chosen: Sequence[str] = ()
    """Parameters whose values the schema lists."""

    def schema(self) -> Row:
        properties: Row = {}
        for name, values in self.values.items():
            kind = {int: "integer", float: "number", bool: "boolean"}.get(type(values[0]), "string")
            properties[name] = {"type": kind} | ({"enum": list(values)} if name in self.chosen else {})
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


NUMBERS = (3, 4, 6, 7, 8, 9, 11, 12, 14, 15, 18, 21, 23, 26, 31, 37, 45, 48, 52, 64, 75, 88, 96, 120, 144, 250, 365)
TOOLS = (
    Taught("forecast", "Weather forecast for a city.", {"city": CITIES},
           ("What is the weather like in {city}?", "Will it rain in {city}?", "What's the weather in {city} today?",
            "How warm is it in {city} now?", "Do I need an umbrella in {city}?", "Tell me the weather for {city}."),
           ("Sunny, 24 degrees.", "It's raining.", "Light rain, 11 degrees", "cloudy and mild", "snow, -3 degrees"),
           "The weather in {city} is: {result}"),
    Taught("current_temperature", "Get the temperature at a location.", {"location": CITIES},
           ("What is the temperature in {location}?", "How cold is it in {location}?", "Is it hot in {location}?"),
           ("18 degrees", "31 degrees", "-2 degrees"), "The temperature in {location} is {result}."),
    Taught("add", "Adds two numbers.", {"a": NUMBERS, "b": NUMBERS},
           ("What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} + {b}?", "What is the sum of {a} and {b}?"),
           ("{sum}",), "{a} plus {b} is {result}."),
    Taught("product", "Multiplies two whole numbers.", {"x": NUMBERS, "y": NUMBERS},
           ("What is {x} times {y}?", "Multiply {x} by {y}.", "How much is {x} * {y}?", "Compute {x} x {y}."),
           ("{times}",), "{x} times {y} is {result}."),
    Taught("subtract", "Subtracts the second number from the first.", {"first": NUMBERS, "second": NUMBERS},
           ("What is {first} minus {second}?", "Take {second} away from {first}."), ("{less}",),
           "{first} minus {second} is {result}."),
    Taught("local_time", "The time of day in a city.", {"city": CITIES},
           ("What time is it in {city}?", "Tell me the time in {city}.", "Is it already evening in {city}?"),
           TIMES, "It is {result} in {city}."),
    Taught("convert_currency", "Converts an amount of money.", {"amount": NUMBERS, "source": COINS, "target": COINS},
           ("How much is {amount} {source} in {target}?", "Convert {amount} {source} to {target}.",
            "What are {amount} {source} worth in {target}?"),
           ("{amount}.40", "about {amount}"), "{amount} {source} are {result} {target}.", ("source", "target")),
    Taught("search_documents", "Searches the documents of the house.", {"query": TOPICS},
           ("What do our documents say about {query}?", "Look up {query}.", "Find something about {query}.",
            "Search the documents for {query}."),
           ("Open daily from 9:00 to 17:00.", "Ask at the desk, it is free for members."), "About {query}: {result}"),
    Taught("web_search", "Searches the web.", {"query": ("tall trees", "new films", "train strikes", "solar panels")},
           ("Search the web for {query}.", "What does the web say about {query}?", "Find news on {query} online."),
           ("Three pages were found.", "No results."), "The search for {query} says: {result}"),
    Taught("opening_hours", "When a place is open on a day.",
           {"place": ("library", "museum", "pool", "pharmacy", "zoo"), "day": DAYS},
           ("When is the {place} open on {day}?", "Is the {place} open {day}?", "Hours of the {place} on {day}?"),
           ("10:00 to 18:00", "closed"), "The {place} on {day}: {result}."),
    Taught("ticket_price", "The price of a ticket.", {"visitor": ("adult", "child", "student", "senior")},
           ("How much is a ticket for a {visitor}?", "What does a {visitor} pay?", "Price for one {visitor}?"),
           ("8.50 euros", "12 euros", "free"), "A ticket for a {visitor} costs: {result}.", ("visitor",)),
    Taught("order_status", "Where an order is.", {"order_id": CODES},
           ("Where is my order {order_id}?", "What is the status of order {order_id}?", "Has {order_id} been shipped?"),
           ("shipped", "waiting for payment", "delivered on Monday"), "Order {order_id}: {result}."),
    Taught("track_parcel", "Tracks a parcel by its number.", {"number": CODES},
           ("Track parcel {number}.", "Where is parcel {number} now?"), ("in the depot", "out for delivery"),
           "Parcel {number} is {result}."),
    Taught("stock", "How many pieces of an article are in stock.", {"article": THINGS},
           ("How many of the {article} are in stock?", "Is the {article} in stock?", "Do you have the {article}?"),
           ("12", "none", "3 pieces"), "In stock of the {article}: {result}."),
    Taught("product_price", "Price of a product in the shop.", {"product": THINGS},
           ("How much does the {product} cost?", "What is the price of the {product}?"), ("19.90", "45 euros"),
           "The {product} costs {result}."),
    Taught("send_email", "Sends an email.", {"to": PEOPLE, "subject": TOPICS},
           ("Send {to} an email about {subject}.", "Write to {to} about {subject}, please.", "Mail {to} on {subject}."),
           ("sent", "ok"), "The email about {subject} has been sent to {to}."),
    Taught("create_reminder", "Reminds the user of something.",
           {"text": ("call the dentist", "water the plants", "pay the rent", "buy milk"), "day": DAYS},
           ("Remind me to {text} on {day}.", "Set a reminder for {day}: {text}."), ("saved", "done"),
           "I will remind you to {text} on {day}."),
    Taught("set_timer", "Starts a timer.", {"minutes": (3, 5, 8, 10, 15, 25, 40)},
           ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.", "Timer, {minutes} minutes."),
           ("started",), "The timer runs for {minutes} minutes."),
    Taught("phone_number", "Finds the phone number of a person.", {"name": PEOPLE},
           ("What is {name}'s phone number?", "How can I call {name}?"), ("555-0171", "555-0148"),
           "{name}'s number is {result}."),
    Taught("birthday_of", "Birthday of a colleague.", {"person": PEOPLE},
           ("When is {person}'s birthday?", "When was {person} born?"), ("4 May", "19 October"),
           "{person}'s birthday is {result}."),
    Taught("translate", "Translates a word.", {"word": WORDS, "language": ("German", "French", "Spanish", "Italian")},
           ("Translate {word} into {language}.", "What is {word} in {language}?", "How is {word} said in {language}?"),
           ("Brücke", "jardin", "luna"), "In {language}, {word} is {result}."),
    Taught("define", "Looks a word up in the dictionary.", {"word": WORDS},
           ("What does {word} mean?", "Define {word}.", "Look up the word {word}."),
           ("a thing that lasts a short time", "see the long entry"), "{word}: {result}."),
    Taught("find_flights", "Finds flights between two cities.", {"origin": CITIES, "destination": CITIES},
           ("Find a flight from {origin} to {destination}.", "Which flights go from {origin} to {destination}?"),
           ("two flights, at 8:10 and 17:40", "none today"), "From {origin} to {destination}: {result}."),
    Taught("next_train", "The next train to a place.", {"destination": CITIES},
           ("When does the next train to {destination} leave?", "Next train to {destination}?"), TIMES,
           "The next train to {destination} leaves at {result}."),
    Taught("book_table", "Books a table in the restaurant.", {"guests": (2, 3, 4, 5, 6, 8), "time": TIMES},
           ("Book a table for {guests} at {time}.", "We are {guests} people and want to eat at {time}."),
           ("booked", "full at that time"), "A table for {guests} at {time}: {result}."),
    Taught("recipe", "Finds a recipe.", {"dish": DISHES},
           ("Find me a recipe for {dish}.", "How do I make {dish}? Look it up.", "Get the recipe for {dish}."),
           ("six eggs, flour, milk", "see page 12"), "For {dish}: {result}."),
    Taught("light", "Switches a light.", {"room": ("kitchen", "hall", "bedroom", "cellar"), "on": (True, False)},
           ("Switch the light in the {room}: {on}.", "Set the {room} light to {on}."), ("done",),
           "The light in the {room} is set."),
    Taught("heating", "Sets the heating of a room, in degrees.",
           {"room": ("kitchen", "hall", "bedroom", "office"), "degrees": (17, 18, 19, 20, 21, 22)},
           ("Heat the {room} to {degrees} degrees.", "Set the {room} to {degrees} degrees, please."), ("ok",),
           "The {room} is heated to {degrees} degrees."),
    Taught("play_music", "Plays music.", {"genre": ("jazz", "folk", "techno", "piano music")},
           ("Play some {genre}.", "I want to hear {genre}."), ("playing",), "Here is some {genre}."),
    Taught("distance", "Distance between two places, in kilometres.", {"start": CITIES, "end": CITIES},
           ("How far is it from {start} to {end}?", "What is the distance between {start} and {end}?"),
           ("840 km", "5120 km"), "From {start} to {end} it is {result}."),
    Taught("share_value", "Latest price of a share.", {"symbol": ("ACME", "NORD", "ZETA", "OAK")},
           ("What is the share price of {symbol}?", "How is {symbol} trading?"), ("41.2", "103.75"),
           "{symbol} is at {result}."),
    Taught("room_free", "Whether a meeting room is free.", {"room": CODES, "day": DAYS},
           ("Is room {room} free on {day}?", "Can I have room {room} on {day}?"), ("yes", "no, taken"),
           "Room {room} on {day}: {result}."),
)  # fmt: skip
TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi, how are you?", "I am fine, thank you. What can I do for you?"),
    ("Thank you very much.", "You are welcome."),
    ("Good morning", "Good morning! What would you like to know?"),
    ("Who are you?", "I am an assistant that answers questions and can use tools."),
    ("What can you do?", "I can answer your questions, and call tools where they help."),
    ("Tell me a joke.", "Why did the book go to the doctor? It had lost its appendix."),
    ("Goodbye.", "Goodbye! Have a good day."),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("Which planet is the largest?", "Jupiter is the largest planet of our solar system."),
    ("How many legs has a spider?", "A spider has eight legs."),
    ("What colour is the sky?", "The sky is blue on a clear day."),
    ("Name three fruits.", "Apples, pears and plums."),
    ("Name two animals that fly.", "Bats and swallows."),
    ("Write one sentence about the sea.", "The sea is wide, and its waves never rest."),
    (
        "Write a short poem about autumn.",
        "The leaves come down in red and gold,\nthe mornings grow both bright and cold.",
    ),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("Who wrote Hamlet?", "William Shakespeare wrote Hamlet."),
    ("What is water made of?", "Water is made of hydrogen and oxygen."),
    ("Why do leaves fall in autumn?", "Trees drop their leaves in autumn to save water and energy for the winter."),
    ("What is a noun?", "A noun is a word for a person, a place or a thing."),
    ("Give me a synonym of big.", "A synonym of big is large."),
    ("What language do people speak in Brazil?", "People in Brazil speak Portuguese."),
    ("What do bees make?", "Bees make honey."),
    ("Explain in one sentence what a bridge is.", "A bridge is a structure that carries a way over an obstacle."),
)
NOTE, LONGEST_REPLY = (150, 900), 200
"""Minimum and maximum characters of a passage, and maximum characters of its answer."""
FRAMES = (
    "Use the notes to answer the question{how}.\n\nNotes:\n{notes}\n\nQuestion: {question}",
    "Answer the question{how}, from the context alone.\n\nContext:\n{notes}\n\nQuestion: {question}",
    "Context information is below.\n\n{notes}\n\nGiven this, answer the query{how}.\nQuery: {question}\nAnswer:",
    "{notes}\n\n{question}\nAnswer{how}.",
)
TASK_FIRST = "Answer the question{how}.\n\n{notes}\n\n{question}"
OBEYED = (60, 700)
"""Minimum and maximum characters of an answer whose form is changed."""
BRIEFLY = (" in a few words", " briefly", " in as few words as possible")
SENTENCE = (" in one short sentence", " in one sentence", " in a sentence")
PLAINLY = ("",)


@app.command()
def tools(
    out: Path,
    rows: int = 700,
    seed: int = 0,
    kinds: Annotated[
        str, typer.Option(help="kinds of rows, drawn uniformly")
    ] = "call,call,call,call,said,said,second,plain,plain,plain",
    data: Annotated[Path | None, typer.Option(help="rows whose short answers need no tool")] = None,
) -> None:
    """Conversations with tools."""
    chance, makers = random.Random(seed), {"call": call, "said": after_result, "second": second, "plain": plain}
    if data is not None:
        short = [(_question(row), str(row["references"][0]).strip()) for row in _read(data) if not _passage(row)]
        talk = [pair for pair in short if len(pair[1]) <= LONGEST_REPLY]
        makers["plain"] = lambda chance: plain(chance, chance.choice((TALK, talk)))
    write(out, (makers[chance.choice(kinds.split(","))](chance) for _ in range(rows)))


@app.command("own")
def published_answers(data: Path, out: Path, rows: int = 400, together: Annotated[int, typer.Option()] = 24) -> None:
    """Answers of SmolLM2 as published, a third of them with tools in the prompt."""
    prompts = [row["prompt"].strip() for row in _read(data) if not _passage(row)][:rows]
    member = replace(demo_members(dtype="bfloat16")[0], adapter=None)
    chance, rows_out = random.Random(1), []
    with EnsembleEngine(EnsembleConfig([member], max_concurrent=together)) as engine:
        results = engine.generate_batch(prompts, SamplingParams(max_tokens=160))
    for prompt, result in zip(prompts, results, strict=True):
        if (
            isinstance(result, EnsembleResult)
            and result.finish_reason == FinishReason.STOP
            and not is_looping(result.text)
        ):
            rows_out.append(
                _row([_user(prompt)], offered(chance) if chance.random() < 0.33 else [], result.text.strip())
            )
    write(out, rows_out)


@app.command()
def notes(data: Path, out: Path, rows: int = 400, seed: int = 2) -> None:
    """Questions on one of two passages, each with two prompts."""
    chance = random.Random(seed)
    candidates = [(_question(row), _passage(row), str(row["references"][0]).strip()) for row in _read(data)]
    usable = [each for each in candidates if NOTE[0] <= len(each[1]) <= NOTE[1] and len(each[2]) <= LONGEST_REPLY]
    twice = [each for each in usable[: rows // 2] for _ in range(2)]
    write(out, (noted(chance, each, chance.choice([o for o in usable if o is not each])[1]) for each in twice))


def noted(chance: random.Random, row: tuple[str, str, str], distractor: str) -> Row:
    """A prompt with a question, its passage and another passage."""
    question, passage, answer = row
    how = BRIEFLY if len(answer.split()) < 4 else SENTENCE if answer.count(". ") == 0 else PLAINLY
    texts = [passage, distractor] if chance.random() < 0.5 else [distractor, passage]
    frame = chance.choice(FRAMES)
    return _row([_user(frame.format(how=chance.choice(how), notes="\n\n".join(texts), question=question))], [], answer)


@app.command()
def passages(out: Path, rows: int = 300, seed: int = 3) -> None:
    """Questions on a fact in two synthetic passages."""
    chance = random.Random(seed)
    write(out, (read(chance) for _ in range(rows)))


def read(chance: random.Random) -> Row:
    """Synthetic passages with a question; the answer is a sentence or a few words, as the frame requests."""
    texts, question, sentence, brief = teaching_passages.passages(chance)
    chance.shuffle(texts)
    how = chance.choice((BRIEFLY, SENTENCE, SENTENCE, PLAINLY))
    frame = chance.choice((*FRAMES, TASK_FIRST))
    prompt = frame.format(how=chance.choice(how), notes="\n\n".join(texts), question=question)
    return _row([_user(prompt)], [], brief if how is BRIEFLY else sentence)


@app.command()
def obeyed(data: Path, out: Path, rows: int = 300, seed: int = 4) -> None:
    """Answers that follow an instruction on their form, or one to explain."""
    chance = random.Random(seed)
    pairs = (teaching_forms.obeyed(chance, *pair) for pair in chance.sample(_usable(data), rows))
    write(out, (_row([_user(prompt)], [], answer) for prompt, answer in pairs))


@app.command()
def keyed(data: Path, out: Path, rows: int = 150, seed: int = 5) -> None:
    """Answers as JSON with the requested keys."""
    chance = random.Random(seed)
    request = schema_request({"type": "object"})
    assert request is not None, "JSON mode has a request for an object without fields"
    mode = {"role": "system", "content": request.content}

    def row(prompt: str, answer: str) -> Row:
        wordings, value = teaching_forms.with_keys(chance, prompt, answer)
        user = _user(prompt + chance.choice((" ", "\n")) + chance.choice(wordings))
        return _row([mode, user] if chance.random() < 0.5 else [user], [], value)

    write(out, [row(*pair) for pair in chance.sample(_usable(data), rows)])


def _usable(data: Path) -> list[tuple[str, str]]:
    """Prompts without a passage, with answers of suitable length."""
    pairs = [(_question(row), str(row["references"][0]).strip()) for row in _read(data) if not _passage(row)]
    return [pair for pair in pairs if OBEYED[0] <= len(pair[1]) <= OBEYED[1]]


def call(chance: random.Random) -> Row:
    """A question that a tool answers."""
    tool, unused = _picked(chance)
    values = drawn(tool, chance)
    question = chance.choice(tool.questions).format(**spoken(values))
    history = list(_history(chance))
    return _row([*history, _user(question)], _schemas(chance, tool, unused), call_text(tool.name, values))


def after_result(chance: random.Random) -> Row:
    """The answer after the result of a call."""
    tool, unused = _picked(chance)
    messages, result, values = _called(tool, chance)
    answer = tool.answer.format(**spoken(values), result=result)
    return _row(messages, _schemas(chance, tool, unused), answer.replace("..", "."))


def second(chance: random.Random) -> Row:
    """A prompt with two questions: the second call after the first result."""
    one, two = chance.sample(TOOLS, 2)
    first, then = drawn(one, chance), drawn(two, chance)
    questions = [chance.choice(t.questions).format(**spoken(v)) for t, v in ((one, first), (two, then))]
    messages = [_user(" ".join(questions)), _calling(one, first), _result(_result_text(one, first, chance))]
    return _row(messages, _schemas(chance, one, [two]), call_text(two.name, then))


def plain(chance: random.Random, talk: Sequence[tuple[str, str]] = TALK) -> Row:
    """A question with tools of which none helps."""
    question, answer = chance.choice(talk)
    return _row([*_history(chance), _user(question)], offered(chance), answer)


def offered(chance: random.Random) -> list[Row]:
    return [tool.schema() for tool in chance.sample(TOOLS, chance.choice((1, 2, 2, 3)))]


def drawn(tool: Taught, chance: random.Random) -> Row:
    """Arguments of a call, all different."""
    while True:
        values = {name: chance.choice(choices) for name, choices in tool.values.items()}
        if len(set(map(str, values.values()))) == len(values):
            return values


def spoken(values: Row) -> Row:
    return {name: {True: "on", False: "off"}.get(v, v) if isinstance(v, bool) else v for name, v in values.items()}


def _result_text(tool: Taught, values: Row, chance: random.Random) -> str:
    numbers = [value for value in values.values() if isinstance(value, int)] + [0, 0]
    sums = {"sum": numbers[0] + numbers[1], "times": numbers[0] * numbers[1], "less": numbers[0] - numbers[1]}
    return chance.choice(tool.results).format(**spoken(values), **sums)


def _called(tool: Taught, chance: random.Random) -> tuple[list[Row], str, Row]:
    values = drawn(tool, chance)
    result = _result_text(tool, values, chance)
    question = chance.choice(tool.questions).format(**spoken(values))
    return [_user(question), _calling(tool, values), _result(result)], result, values


def _history(chance: random.Random) -> Iterator[Row]:
    """No message, a system message, or an earlier exchange."""
    dice = chance.random()
    if dice < 0.4:
        yield {"role": "system", "content": chance.choice(SYSTEMS)}
    elif dice < 0.55:
        question, answer = chance.choice(TALK)
        yield from (_user(question), {"role": "assistant", "content": answer})
    elif dice < 0.7:
        tool = chance.choice(TOOLS)
        messages, result, values = _called(tool, chance)
        yield from messages
        yield {"role": "assistant", "content": tool.answer.format(**spoken(values), result=result).replace("..", ".")}


def _picked(chance: random.Random) -> tuple[Taught, list[Taught]]:
    tool, *unused = chance.sample(TOOLS, chance.choice((1, 2, 2, 3)))
    return tool, unused


def _schemas(chance: random.Random, tool: Taught, unused: Sequence[Taught]) -> list[Row]:
    schemas = [each.schema() for each in (tool, *unused)]
    chance.shuffle(schemas)
    return schemas


def _user(text: str) -> Row:
    return {"role": "user", "content": text}


def _calling(tool: Taught, values: Row) -> Row:
    function = {"name": tool.name, "arguments": json.dumps(values, ensure_ascii=False)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


def _result(text: str) -> Row:
    return {"role": "tool", "content": text, "tool_call_id": "call_1"}


def _row(messages: list[Row], schemas: list[Row], answer: str) -> Row:
    for message in messages:
        Message.from_dict(message)  # raises if the engine would refuse it
    return {"messages": messages, "tools": schemas, "answer": answer}


def _read(data: Path) -> list[Row]:
    return [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]


def _question(row: Row) -> str:
    return str(row["prompt"]).strip().partition("\n\n")[0]


def _passage(row: Row) -> str:
    return str(row["prompt"]).strip().partition("\n\n")[2]


def write(out: Path, rows: Iterator[Row] | Sequence[Row]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} rows in {out}")


if __name__ == "__main__":
    app()
