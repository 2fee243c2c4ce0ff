"""How members should be asked for a schema's values: ten short notes, three ways, the share of right fields.

python benchmarks/extraction.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import typer
from pydantic import BaseModel, Field

from specfuse_shared import EnsembleConfig, EnsembleEngine, Grammar, Message, SamplingParams, demo_members
from specfuse_shared.text.grammars.grammar import schema_request


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


WAYS: dict[str, Callable[[dict[str, Any]], Message | None]] = {
    "nothing": lambda schema: None,
    "the whole schema": whole_schema,
    "names, descriptions, formats (what both adapters do)": schema_request,
}


def main() -> None:
    """Answer every note in every way."""
    with EnsembleEngine(EnsembleConfig(demo_members())) as engine:
        for name, way in WAYS.items():
            right = asked = 0
            for output_cls, text, expected in NOTES:
                schema = output_cls.model_json_schema()
                reported = way(schema)
                messages = [Message("user", text), *([reported] if reported else [])]
                params = SamplingParams(max_tokens=100, grammar=Grammar.json_schema(schema))
                value = json.loads(engine.generate(messages, params).text)
                right += sum(str(value[key]).lower() == str(wanted).lower() for key, wanted in expected.items())
                asked += len(expected)
                print(f"    {json.dumps(value)}")
            print(f"{right:2} of {asked} fields right: {name}")


if __name__ == "__main__":
    typer.run(main)
