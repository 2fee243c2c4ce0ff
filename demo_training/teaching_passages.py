"""Synthetic passages with questions, to train the demo's models to read (for `teaching_rows.py passages`).

No dataset is used: random places, people and numbers are put into the sentences of `taught_facts.jsonl`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FIRST = (
    "Ada", "Bela", "Cora", "Dario", "Elin", "Femi", "Greta", "Hugo", "Ilse", "Jonah", "Kaya", "Leon", "Mina", "Niko",
)  # fmt: skip
LAST = (
    "Abel", "Brandt", "Castro", "Dunne", "Eriksen", "Farkas", "Gale", "Holm", "Ito", "Jansen", "Kovac", "Lund", "Mora",
)  # fmt: skip
HEADS = ("Tann", "Osk", "Brim", "Wend", "Kell", "Marl", "Fen", "Hal", "Ruk", "Sael", "Dorn", "Viv", "Lam", "Greb")
TAILS = ("moor", "eld", "wick", "stad", "ora", "ino", "beck", "mere", "lund", "by", "ova", "ford", "essa", "um")
PLACES = (
    "harbour museum", "botanical garden", "swimming pool", "paper mill", "castle", "brewery", "city library", "zoo",
    "railway museum", "theatre", "salt mine", "lighthouse", "bird reserve", "glass works", "music school", "farm",
)  # fmt: skip
FOODS = ("pumpkin", "walnuts", "goat cheese", "smoked herring", "plums", "lentils", "honey", "rye bread", "leeks",
         "pears", "mushrooms", "poppy seeds", "red cabbage", "ginger")  # fmt: skip
DISHES = ("soup", "pie", "cake", "salad", "stew", "sandwich", "pancake", "pudding", "toast", "dumpling")
SECOND = ("Star", "Bird", "Wheel", "Rose", "Anchor", "Crown")
STUFFS = ("oak", "granite", "copper", "brick", "glass", "steel", "slate", "bronze")
THINGS = ("fountain", "bell", "bridge", "organ", "crane", "statue", "clock", "gate", "boiler", "loom", "kiln", "engine")
ANIMALS = ("otters", "storks", "goats", "owls", "lynxes", "turtles", "bees", "herons")
ROLES = ("head gardener", "treasurer", "night porter", "head cook", "archivist", "chief engineer", "press officer")
WORKS = ("feeds the animals", "repairs the roofs", "leads the school tours", "keeps the accounts", "trains the guides")
REASONS = (
    ("dogs are not allowed in the yard", "the geese nest there"),
    ("the cellar is closed in winter", "bats sleep in it"),
    ("the lamps are red", "white light spoils the photographs"),
    ("the doors are locked at noon", "the varnish must dry without draught"),
    ("visitors wear felt shoes", "the floor is older than the house"),
    ("the boat leaves early", "the tide falls after nine"),
    ("no music is played", "the foals are easily frightened"),
    ("the upper path is closed in May", "orchids flower beside it"),
    ("bags stay at the desk", "the stairs are narrow"),
    ("the mill stands still on Mondays", "its wheel is oiled then"),
)
EVENTS = (
    ("it rains on the day of the market", "the stalls are moved into the hall"),
    ("a tour has fewer than four guests", "it is joined with the next one"),
    ("the lift stands still", "the porter opens the ramp behind the kitchen"),
    ("the wind is too strong for the ferry", "a bus takes the guests around the bay"),
    ("a visitor loses the key", "a new one costs nine crowns"),
    ("the concert is sold out", "it is shown on a screen in the yard"),
    ("the lake freezes", "skates can be borrowed at the boathouse"),
    ("the power fails", "lanterns are lit in all corridors"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
UNITS = ("metres wide", "metres high", "metres long", "kilograms heavy", "tonnes heavy", "centimetres thick")
MEASURES = {"metres wide": "How wide", "metres high": "How high", "metres long": "How long",
            "kilograms heavy": "How heavy", "tonnes heavy": "How heavy", "centimetres thick": "How thick"}  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """A sentence of a passage, questions about it, and the answer as a sentence and in a few words."""

    text: str
    questions: Sequence[str]
    sentence: str
    brief: str


_LINES = Path(__file__).with_name("taught_facts.jsonl").read_text(encoding="utf-8").splitlines()
FACTS = [Fact(**json.loads(line)) for line in _LINES]


def slots(chance: random.Random) -> dict[str, str]:
    """Values for all placeholders of facts; two values of one kind differ."""

    def two(values: Sequence[str], name: str) -> dict[str, str]:
        one, two = chance.sample(values, 2)
        return {name: one, f"{name}2": two}

    def clock(hours: range) -> str:
        return f"{chance.choice(hours)}:{chance.choice(('00', '15', '30', '45'))}"

    people = [f"{first} {last}" for first, last in zip(chance.sample(FIRST, 2), chance.sample(LAST, 2), strict=True)]
    names = [a + b for a, b in zip(chance.sample(HEADS, 4), chance.sample(TAILS, 4), strict=True)]
    years = sorted(chance.sample(range(1740, 2024), 2))
    unit = chance.choice(UNITS)
    coin = chance.choice(("{}.50", "{}.00", "{} euros", "{} crowns"))
    rule, because = chance.choice(REASONS)
    event, then = chance.choice(EVENTS)
    months = ("January", "March", "April", "June", "August", "October", "December")
    return {
        "place": f"{names[0]} {chance.choice(PLACES)}",
        "town": names[1],
        "name": chance.choice((names[2], f"{names[2]} {chance.choice(SECOND)}")),
        "name2": names[3],
        "other": chance.choice(PLACES),
        "person": people[0],
        "person2": people[1],
        "year": str(years[0]),
        "year2": str(years[1]),
        "date": f"{chance.randint(1, 28)} {chance.choice(months)} {chance.randint(1900, 2023)}",
        "size": chance.choice((str(chance.randint(2, 90)), f"{chance.randint(1, 19)}.{chance.randint(1, 9)}")),
        "unit": unit,
        "measure": unit.split()[0],
        "how": MEASURES[unit],
        "rule": rule,
        "Rule": rule.capitalize(),
        "rule_asked": _as_question(rule),
        "because": because,
        "event": event,
        "then": then,
        "Then": then[0].upper() + then[1:],
        "time": clock(range(6, 12)),
        "time2": clock(range(13, 20)),
        "thing": chance.choice(THINGS),
        "stuff": chance.choice(STUFFS),
        "animals": chance.choice(ANIMALS),
        "dish": chance.choice(DISHES),
        "role": chance.choice(ROLES),
        "work": chance.choice(WORKS),
        **two(FOODS, "food"),
        **two(DAYS, "day"),
        **dict(zip(("n", "n2"), map(str, chance.sample(range(3, 400), 2)), strict=True)),
        **dict(zip(("price", "price2"), (coin.format(n) for n in chance.sample(range(2, 99), 2)), strict=True)),
    }  # fmt: skip


def _as_question(rule: str) -> str:
    """A statement with its verb first: "the doors are locked" → "are the doors locked"."""
    match = re.fullmatch(r"(.*?) (is|are|stands|stay|wear|leaves) (.*)", rule)
    if match is None:
        return f"is it that {rule}"
    subject, verb, rest = match.groups()
    helper = {"stands": ("does", "stand"), "stay": ("do", "stay"), "wear": ("do", "wear"), "leaves": ("does", "leave")}
    front, after = helper.get(verb, (verb, ""))
    return " ".join(part for part in (front, subject, after, rest) if part)


def _unlike(facts: Sequence[Fact]) -> list[Fact]:
    """Facts with different beginnings, unless these name a thing, so that a question has one answer."""

    def about(fact: Fact) -> str:
        words = fact.text.replace(",", "").split()
        return fact.text if {"{thing}", "{name}"} & set(words[:3]) else " ".join(words[:2])

    return list({about(fact): fact for fact in facts}.values())


def passages(chance: random.Random) -> tuple[list[str], str, str, str]:
    """Two passages about one place, a question on a fact in them, and its answer as a sentence and in a few words."""
    shared = slots(chance)
    facts = _unlike(chance.sample(FACTS, chance.randint(6, 11)))
    index = chance.randrange(len(facts))
    sentences, asked_values = [], {}
    things = chance.sample(THINGS, len(facts))
    for n, fact in enumerate(facts):
        values = {**slots(chance), "place": shared["place"], "town": shared["town"], "thing": things[n]}
        sentences.append(fact.text.format(**values))
        if n == index:
            asked_values = values
    cut = chance.randint(2, len(facts) - 2)
    headings = chance.sample(
        ("Visiting", "The house", "Practical notes", "History", "Around the place", "For guests"), 2
    )
    texts = [
        f"{shared['place'].title()}: {heading}\n{' '.join(part)}"
        for heading, part in zip(headings, (sentences[:cut], sentences[cut:]), strict=True)
    ]
    fact = facts[index]
    question = chance.choice(fact.questions).format(**asked_values)
    return texts, question, fact.sentence.format(**asked_values), fact.brief.format(**asked_values)
