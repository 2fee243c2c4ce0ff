"""The quality of an answer in points from 0 to 100, and other properties of its text."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from specfuse_shared.comparing.instructions import followed
from specfuse_shared.comparing.libraries import library
from specfuse_shared.fusion.repetition import TIMES, ends_in_loop

if TYPE_CHECKING:
    from specfuse_shared.comparing.questions import Question

LABELS = {
    "f1": "F1",
    "contains": "holds a reference",
    "rougeL": "ROUGE-L",
    "chrf": "chrF",
    "exact": "right number",
    "right": "right choice",
    "followed": "followed",
}
"""Metric → its label. The first metric of a question is its main one, which counts in the verdict."""
_NUMBER = re.compile(r"-?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)")
_LATIN_SHARE = 0.9


def score(question: Question, answer: str) -> dict[str, float]:
    """Every metric of the question, 0 to 100, the main one first; empty for open questions.

    An empty answer scores 0.
    """
    if not question.scored:
        return {}
    return {name: 100.0 * value for name, value in _KINDS[str(question.kind)](question, answer.strip()).items()}


def number_in(text: str, *, whole: bool = False) -> float | None:
    """The last number of a text; commas may only separate thousands. `whole`: the text is nothing else."""
    text = text.replace("\u2212", "-")
    numbers = _NUMBER.findall(text)
    if not numbers or (whole and numbers[-1].strip() != text.strip().removesuffix(".")):
        return None
    return float(numbers[-1].replace(",", "").replace("$", ""))


def final_answer(question: Question, text: str) -> str | None:
    """The final answer in a normal form: its letter, its number, or its plain words.

    None if it has none, and for kinds of answers that cannot be counted ("text", "instructions", "open").
    """
    if question.kind == "choice":
        return letter_in(text)
    if question.kind == "number":
        number = number_in(text)
        return None if number is None else repr(number)
    return " ".join(plain_words(text) or text.split()) or None if question.kind == "short" else None


def letter_in(text: str) -> str | None:
    """The first isolated letter."""
    match = re.search(r"\b[A-Z]\b", text)
    return None if match is None else match[0]


# ── habits ───────────────────────────────────────────────────────────────────────────────────────


def agreement(first: str, second: str) -> float:
    """The overlap of two answers: F1 of their words, 0 to 100."""
    one, two = plain_words(first), plain_words(second)
    return 100.0 if one == two else 100.0 * _f1(one, two)


def is_looping(answer: str) -> bool:
    """Whether the answer contains a line of three or more words three times, or ends with a span three times."""
    lines = (line.strip().lower() for line in answer.splitlines() if len(line.split()) >= 3)
    return any_thrice(lines) or ends_in_loop(answer.split())


def any_thrice(lines: Iterable[str]) -> bool:
    return any(count >= TIMES for count in Counter(lines).values())


def plain_words(text: str) -> list[str]:
    """Words in lower case without punctuation and English articles; each Chinese or Japanese character is a word."""
    return [word for word in _bare_words(text) if word not in ("a", "an", "the")]


def _bare_words(text: str) -> list[str]:
    bare = "".join(" " if unicodedata.category(c)[0] == "P" else c for c in text.lower())
    bare = re.sub(r"([\u3040-\u30ff\u3400-\u9fff])", r" \1 ", bare)
    return [word for word in bare.split() if word not in string.punctuation]


# ── by kind ──────────────────────────────────────────────────────────────────────────────────────


def _text(question: Question, answer: str) -> dict[str, float]:
    """ROUGE-L (Lin 2004), or chrF (Popović 2015) for other letters than a to z, which ROUGE-L ignores."""
    transliterated = _in_other_letters(question.references)
    compared = _chrf if transliterated else _rouge
    return {
        "chrf" if transliterated else "rougeL": max(compared(reference, answer) for reference in question.references)
    }


def _rouge(reference: str, answer: str) -> float:
    return float(_rouge_scorer().score(reference, answer)["rougeL"].fmeasure)


def _chrf(reference: str, answer: str) -> float:
    if not answer or not reference:
        return 0.0
    return float(library("nltk.translate.chrf_score").sentence_chrf(reference, answer, beta=2.0))


@cache
def _rouge_scorer() -> Any:
    return library("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=True)


def _in_other_letters(references: Sequence[str]) -> bool:
    letters = [c for text in references for c in text if c.isalpha()]
    return sum(c.isascii() for c in letters) < _LATIN_SHARE * len(letters)


def _short(question: Question, answer: str) -> dict[str, float]:
    """F1 over normalised words (SQuAD, Rajpurkar et al. 2016), and whether a reference is in the answer."""
    pairs = [_compared_words(answer, reference) for reference in question.references]
    return {
        "f1": max(_f1(answered, expected) for answered, expected in pairs),
        "contains": float(any(_contains(answered, expected) for answered, expected in pairs)),
    }


def _compared_words(answer: str, reference: str) -> tuple[list[str], list[str]]:
    """The words of both. A reference that consists of articles or punctuation ("A", "!") keeps them."""
    for read in (plain_words, _bare_words):
        if expected := read(reference):
            return read(answer), expected
    return answer.split(), reference.split()


def _contains(words: Sequence[str], reference: Sequence[str]) -> bool:
    """Whether the answer contains the expected words in a row."""
    size = len(reference)
    return size > 0 and any(list(words[n : n + size]) == list(reference) for n in range(len(words) - size + 1))


def _f1(answered: Sequence[str], reference: Sequence[str]) -> float:
    shared = sum((Counter(answered) & Counter(reference)).values())
    return 2 * shared / (len(answered) + len(reference)) if shared else 0.0


def _number(question: Question, answer: str) -> dict[str, float]:
    """Whether the last number of the answer is a reference."""
    number, expected = number_in(answer), [number_in(text) for text in question.references]
    return {"exact": float(number is not None and any(w is not None and abs(number - w) < 1e-6 for w in expected))}


def _choice(question: Question, answer: str) -> dict[str, float]:
    """Whether the first isolated letter is the right choice's."""
    return {"right": float(letter_in(answer) == question.letter)}


def _instructions(question: Question, answer: str) -> dict[str, float]:
    return {"followed": float(followed(answer, question.instructions))}


_KINDS: dict[str, Callable[[Question, str], dict[str, float]]] = {
    "short": _short,
    "text": _text,
    "number": _number,
    "choice": _choice,
    "instructions": _instructions,
}
