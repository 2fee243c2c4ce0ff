"""Instructions on the form of an answer that can be checked, which teach the demo's models to obey (for
`teaching_rows.py obeyed`): the answer is changed until it follows them."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Sequence

Obeyed = tuple[Sequence[str], str]
"""Ways to say the instruction, and an answer that obeys."""


def _sentences(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"(?<=[A-Za-z)][.!?])\s+|\n+", text) if re.search(r"\w", part)]


def _long_words(text: str) -> list[str]:
    return sorted({word.lower() for word in re.findall(r"[A-Za-z]{5,}", text)})


def _lower(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    return (
        "Use lowercase letters only.",
        "No capital letters, please.",
        "Write all of it in lowercase.",
    ), answer.lower()


def _upper(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    short = " ".join(_sentences(answer)[:2])
    return ("Write in capital letters only.", "Everything in uppercase, please."), short.upper()


def _no_commas(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    return ("Do not use commas.", "Your reply must be free of commas.", "No commas anywhere."), answer.replace(",", "")


def _quoted(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    said = ("Put the whole reply in double quotes.", "Begin and end with a double quotation mark.")
    return said, '"' + answer.replace('"', "'") + '"'


def _closing(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    words = chance.choice(("That is all.", "I hope this helps.", "Ask me more.", "Good luck with it!"))
    said = (f'End with exactly these words: "{words}"', f'The last sentence must be "{words}"')
    return said, f"{answer} {words}"


def _postscript(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    mark, words = chance.choice(
        (("P.S.", "Thank you for asking."), ("P.P.S", "There is more to say."), ("P.S.", "Take care."))
    )
    said = (f"Add a postscript that begins with {mark}", f"After the reply, write a postscript starting with {mark}")
    return said, f"{answer}\n\n{mark} {words}"


def _title(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    words = " ".join(word.title() for word in re.findall(r"[A-Za-z]+", prompt)[-4:])
    said = ("Give it a title in double angular brackets, like <<title>>.", "Start with a title such as <<my title>>.")
    return said, f"<<{words}>>\n\n{answer}"


def _bullets(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    parts = _sentences(answer)[: chance.choice((2, 3, 4))]
    points = "1 bullet point" if len(parts) == 1 else f"{len(parts)} bullet points"
    said = (
        f"Answer with exactly {points}, like * this one.",
        f"Use {points} in markdown (* point).",
    )
    return said, "\n".join(f"* {part}" for part in parts)


def _few_sentences(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    count = chance.choice((1, 2, 3))
    said = (f"Use at most {count} sentences.", f"Fewer than {count + 1} sentences, please.")
    return said, " ".join(_sentences(answer)[:count])


def _few_words(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    text = " ".join(_sentences(answer)[:2])
    count = len(text.split()) + chance.randint(1, 15)
    return (f"Use fewer than {count} words.", f"At most {count} words."), text


def _many_words(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    count = max(5, len(answer.split()) // 10 * 10)
    return (
        f"Write at least {count} words.",
        f"Your reply should have {count} or more words.",
        "Explain it fully.",
    ), answer


def _paragraphs(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    parts = _sentences(answer)
    count = min(len(parts), chance.choice((2, 3)))
    cuts = [n * len(parts) // count for n in range(count + 1)]
    groups = [" ".join(parts[a:b]) for a, b in itertools.pairwise(cuts)]
    said = (
        f"Write {count} paragraphs, separated by ***",
        f"There should be {count} paragraphs with the markdown divider *** between them.",
    )
    return said, "\n\n***\n\n".join(groups)


def _sections(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    word = chance.choice(("SECTION", "Part", "Section"))
    parts = _sentences(answer)
    groups = [" ".join(parts[: len(parts) // 2 + 1]), " ".join(parts[len(parts) // 2 + 1 :])]
    said = (
        f"Write two sections, each marked with {word} X.",
        f"Divide it into 2 parts that start with {word} and a number.",
    )
    return said, "\n\n".join(f"{word} {n}\n{text}" for n, text in enumerate(filter(None, groups), 1))


def _keywords(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    known = _long_words(answer) or ["answer"]
    words = chance.sample(known, min(len(known), chance.choice((1, 2, 3))))
    said = (f"Include the words {', '.join(words)}.", f"Use these keywords: {', '.join(words)}.")
    return said, answer


def _avoided(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    absent = [
        word for word in ("however", "water", "money", "people", "always", "nothing") if word not in answer.lower()
    ]
    words = chance.sample(absent, min(len(absent), 2))
    return (f"Do not use the words {', '.join(words)}.", f"Leave out these words: {' and '.join(words)}."), answer


def _repeated(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    said = (
        "First repeat the request word for word, then answer it.",
        "Before you answer, repeat the sentence above without change.",
    )
    return said, f"{prompt}\n\n{answer}"


KEYS = ("answer", "text", "reply", "response", "result", "content", "output", "body")
PAIRS = (
    ("headline", "body"), ("first", "rest"), ("summary", "details"), ("question", "answer"), ("topic", "text"),
    ("opening", "ending"), ("short", "long"), ("name", "description"), ("subject", "message"), ("claim", "reason"),
    ("title", "paragraph"), ("problem", "solution"),
)  # fmt: skip


def _as_json(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    text = json.dumps({chance.choice(KEYS): " ".join(_sentences(answer)[:2])}, ensure_ascii=False)
    return ("Give the whole output as JSON.", "Wrap all of it in JSON format.", "Answer as a JSON object."), text


def with_keys(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    """A JSON object with two keys that the instruction names."""
    one, other = chance.choice(PAIRS)
    first, *rest = [*_sentences(answer), ""]
    subject = " ".join(re.findall(r"[A-Za-z]+", prompt)[-4:])
    parted = chance.random() < 0.6
    if one == "question":
        values = prompt, first
    elif one in ("problem", "topic", "subject") or not parted:
        values = subject, first
    else:
        values = first, " ".join(rest[:2]).strip() or subject
    said = (
        f"Return the result as a JSON with '{one}' and '{other}' keys.",
        f'Answer with a JSON object that has the keys "{one}" and "{other}".',
        f"Reply in JSON only, with `{one}` and `{other}`.",
        f"The output must be JSON with two keys, {one} and {other}, and nothing else.",
        f'Use this form: {{"{one}": "...", "{other}": "..."}}',
    )
    return said, json.dumps({one: values[0], other: values[1]}, ensure_ascii=False)


def _highlighted(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    count = 0
    for word in _long_words(answer)[: chance.choice((1, 2, 3))]:
        answer, found = re.subn(rf"(?i)\b({word})\b", r"*\1*", answer, count=1)
        count += found
    said = (f"Highlight at least {count} words in markdown, *like this*.", f"Mark {count} parts with *asterisks*.")
    return said, answer


LAYOUTS: tuple[Callable[[random.Random, str, str], Obeyed], ...] = (
    _upper, _bullets, _few_sentences, _few_words, _many_words, _paragraphs, _sections, _keywords, _avoided, _as_json,
    with_keys, _highlighted,
)  # fmt: skip
"""One of these gives the answer its shape …"""
FINISHES: tuple[Callable[[random.Random, str, str], Obeyed], ...] = (
    _lower, _no_commas, _quoted, _closing, _postscript, _title, _repeated,
)  # fmt: skip
"""… or one of these, or one after the other, where a finish does not undo the shape."""


EXPLAIN = ("Explain.", "Answer in detail.", "Please explain.", "Say more than a sentence.", "Explain it fully.")
LONG = 40
"""An answer with this number of words or more is a full one."""


def obeyed(chance: random.Random, prompt: str, answer: str) -> tuple[str, str]:
    """A prompt with one or two instructions on the answer's form and the answer that follows; or a plea to explain."""
    if len(answer.split()) >= LONG and chance.random() < 0.4:
        return f"{prompt} {chance.choice(EXPLAIN)}", answer
    one = chance.choice((*LAYOUTS, *FINISHES))
    steps = [one]
    if one in LAYOUTS and one not in (_upper, _as_json, with_keys, _few_words) and chance.random() < 0.3:
        steps.append(chance.choice((_no_commas, _quoted, _closing, _title)))
    reported = []
    for step in steps:
        ways, answer = step(chance, prompt, answer)
        reported.append(chance.choice(ways))
    joint = chance.choice((" ", " ", "\n\n", "\n"))
    return prompt + joint + " ".join(reported), answer
