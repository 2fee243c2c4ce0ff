"""Verifiable instructions on the form of an answer, to train the demo's models to follow them (for `teaching_rows.py
obeyed`). The answer is changed so that it follows the instructions."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Sequence

Obeyed = tuple[Sequence[str], str]
"""Wordings of the instruction, and an answer that follows it."""


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
    wordings = ("Put the whole reply in double quotes.", "Begin and end with a double quotation mark.")
    return wordings, '"' + answer.replace('"', "'") + '"'


def _closing(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    words = chance.choice(("That is all.", "I hope this helps.", "Ask me more.", "Good luck with it!"))
    wordings = (f'End with exactly these words: "{words}"', f'The last sentence must be "{words}"')
    return wordings, f"{answer} {words}"


def _postscript(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    mark, words = chance.choice(
        (("P.S.", "Thank you for asking."), ("P.P.S", "There is more to say."), ("P.S.", "Take care."))
    )
    wordings = (
        f"Add a postscript that begins with {mark}",
        f"After the reply, write a postscript starting with {mark}",
    )
    return wordings, f"{answer}\n\n{mark} {words}"


def _title(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    words = " ".join(word.title() for word in re.findall(r"[A-Za-z]+", prompt)[-4:])
    wordings = (
        "Give it a title in double angular brackets, like <<title>>.",
        "Start with a title such as <<my title>>.",
    )
    return wordings, f"<<{words}>>\n\n{answer}"


def _bullets(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    parts = _sentences(answer)[: chance.choice((2, 3, 4))]
    points = "1 bullet point" if len(parts) == 1 else f"{len(parts)} bullet points"
    wordings = (
        f"Answer with exactly {points}, like * this one.",
        f"Use {points} in markdown (* point).",
    )
    return wordings, "\n".join(f"* {part}" for part in parts)


def _few_sentences(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    count = chance.choice((1, 2, 3))
    wordings = (f"Use at most {count} sentences.", f"Fewer than {count + 1} sentences, please.")
    return wordings, " ".join(_sentences(answer)[:count])


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
    wordings = (
        f"Write {count} paragraphs, separated by ***",
        f"There should be {count} paragraphs with the markdown divider *** between them.",
    )
    return wordings, "\n\n***\n\n".join(groups)


def _sections(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    word = chance.choice(("SECTION", "Part", "Section"))
    parts = _sentences(answer)
    groups = [" ".join(parts[: len(parts) // 2 + 1]), " ".join(parts[len(parts) // 2 + 1 :])]
    wordings = (
        f"Write two sections, each marked with {word} X.",
        f"Divide it into 2 parts that start with {word} and a number.",
    )
    return wordings, "\n\n".join(f"{word} {n}\n{text}" for n, text in enumerate(filter(None, groups), 1))


def _keywords(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    candidates = _long_words(answer) or ["answer"]
    words = chance.sample(candidates, min(len(candidates), chance.choice((1, 2, 3))))
    wordings = (f"Include the words {', '.join(words)}.", f"Use these keywords: {', '.join(words)}.")
    return wordings, answer


def _avoided(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    absent = [
        word for word in ("however", "water", "money", "people", "always", "nothing") if word not in answer.lower()
    ]
    words = chance.sample(absent, min(len(absent), 2))
    return (f"Do not use the words {', '.join(words)}.", f"Leave out these words: {' and '.join(words)}."), answer


def _repeated(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    wordings = (
        "First repeat the request word for word, then answer it.",
        "Before you answer, repeat the sentence above without change.",
    )
    return wordings, f"{prompt}\n\n{answer}"


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
    key1, key2 = chance.choice(PAIRS)
    first, *rest = [*_sentences(answer), ""]
    subject = " ".join(re.findall(r"[A-Za-z]+", prompt)[-4:])
    parted = chance.random() < 0.6
    if key1 == "question":
        values = prompt, first
    elif key1 in ("problem", "topic", "subject") or not parted:
        values = subject, first
    else:
        values = first, " ".join(rest[:2]).strip() or subject
    wordings = (
        f"Return the result as a JSON with '{key1}' and '{key2}' keys.",
        f'Answer with a JSON object that has the keys "{key1}" and "{key2}".',
        f"Reply in JSON only, with `{key1}` and `{key2}`.",
        f"The output must be JSON with two keys, {key1} and {key2}, and nothing else.",
        f'Use this form: {{"{key1}": "...", "{key2}": "..."}}',
    )
    return wordings, json.dumps({key1: values[0], key2: values[1]}, ensure_ascii=False)


def _highlighted(chance: random.Random, prompt: str, answer: str) -> Obeyed:
    count = 0
    for word in _long_words(answer)[: chance.choice((1, 2, 3))]:
        answer, replaced = re.subn(rf"(?i)\b({word})\b", r"*\1*", answer, count=1)
        count += replaced
    wordings = (f"Highlight at least {count} words in markdown, *like this*.", f"Mark {count} parts with *asterisks*.")
    return wordings, answer


LAYOUTS: tuple[Callable[[random.Random, str, str], Obeyed], ...] = (
    _upper, _bullets, _few_sentences, _few_words, _many_words, _paragraphs, _sections, _keywords, _avoided, _as_json,
    with_keys, _highlighted,
)  # fmt: skip
"""Each of these changes the structure of the answer."""
FINISHES: tuple[Callable[[random.Random, str, str], Obeyed], ...] = (
    _lower, _no_commas, _quoted, _closing, _postscript, _title, _repeated,
)  # fmt: skip
"""Each of these changes the text of the answer, alone or after a layout that it does not undo."""


EXPLAIN = ("Explain.", "Answer in detail.", "Please explain.", "Say more than a sentence.", "Explain it fully.")
LONG = 40
"""Minimum words of an answer to an instruction to explain."""


def obeyed(chance: random.Random, prompt: str, answer: str) -> tuple[str, str]:
    """A prompt with one or two instructions on form, or one to explain, and the answer that follows it."""
    if len(answer.split()) >= LONG and chance.random() < 0.4:
        return f"{prompt} {chance.choice(EXPLAIN)}", answer
    one = chance.choice((*LAYOUTS, *FINISHES))
    steps = [one]
    if one in LAYOUTS and one not in (_upper, _as_json, with_keys, _few_words) and chance.random() < 0.3:
        steps.append(chance.choice((_no_commas, _quoted, _closing, _title)))
    instructions = []
    for step in steps:
        wordings, answer = step(chance, prompt, answer)
        instructions.append(chance.choice(wordings))
    joint = chance.choice((" ", " ", "\n\n", "\n"))
    return prompt + joint + " ".join(instructions), answer
