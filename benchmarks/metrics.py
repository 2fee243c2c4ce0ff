"""How good an answer is: one number in 0 to 100 for each task, and what else can be said of it."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import ifeval
import numpy as np
from numpy.typing import NDArray
from rouge_score.rouge_scorer import RougeScorer

from specfuse_shared.fusion.repetition import TIMES, ends_in_circle
from specfuse_shared.loading.demo import sentence_encoder

Encode = Callable[[list[str]], NDArray[np.float32]]
"""Texts → their embeddings, a row of length 1 each."""

_ROUGE = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
_NUMBER = re.compile(r"-?\$?\d[\d,]*\.?\d*")

COMPARED = {
    "open": ("rougeL", "cosine"),
    "instruct": ("rougeL",),
    "rag": ("f1", "contains"),
    "math": ("exact",),
    "ifeval": ("followed",),
}
"""The metrics by which each task is judged."""


def score(row: Mapping[str, Any], answer: str) -> dict[str, float]:
    """Every metric of the row's task that needs no model, 0 to 100; an empty answer scores 0."""
    return {name: 100.0 * value for name, value in _TASKS[row["task"]](row, answer.strip()).items()}


def sentence_vectors() -> Encode:
    """Embeddings of the demo's sentence encoder (all-MiniLM-L6-v2)."""
    return partial(sentence_encoder().encode, normalize_embeddings=True, show_progress_bar=False)


def cosines(references: Sequence[Sequence[str]], answers: Sequence[str], encode: Encode) -> list[float]:
    """How near each answer is in meaning to the nearest of its references: the cosine of their embeddings, times 100.

    Beside ROUGE, which brevity flatters. An empty answer scores 0, as does one that points elsewhere.
    """
    wanted = list(dict.fromkeys(text for own in references for text in own))
    place = {text: n for n, text in enumerate(wanted)}
    targets, found = encode(wanted), encode(list(answers))
    nearest = [
        max(float(targets[place[text]] @ vector) for text in own) if answer.strip() else 0.0
        for own, answer, vector in zip(references, answers, found, strict=True)
    ]
    return [100.0 * max(0.0, cosine) for cosine in nearest]


def goes_in_circles(answer: str) -> bool:
    """Whether a line (of three words or more) stands in the answer three times, or its end is one stretch thrice."""
    lines = (line.strip().lower() for line in answer.splitlines() if len(line.split()) >= 3)
    return _any_thrice(lines) or ends_in_circle(answer.split())


def says_a_line_thrice(answer: str) -> bool:
    """Whether any line at all, however short, stands in the answer three times."""
    return _any_thrice(line.strip() for line in answer.splitlines() if line.strip())


def _any_thrice(lines: Iterable[str]) -> bool:
    return any(count >= TIMES for count in Counter(lines).values())


def repeated_share(answer: str) -> float:
    """Share of the answer's stretches of four words that stood in it before, 0 to 1."""
    words = answer.lower().split()
    stretches = [tuple(words[n : n + 4]) for n in range(len(words) - 3)]
    return 1 - len(set(stretches)) / len(stretches) if stretches else 0.0


STRETCH = 40
"""Words of a stretch of a long answer."""


def coherence(question: str, answer: str, encode: Encode) -> dict[str, float]:
    """Cosines, times 100, of embeddings: `neighbours`, the mean of a stretch and the next one; `on_topic`, the question
    and the last stretch. Nothing for an answer of one stretch. One that repeats itself has high ones, too: see
    `repeated_share`."""
    words = answer.split()
    whole = len(words) // STRETCH
    if whole < 2:
        return {}
    vectors = encode([question, *(" ".join(words[n * STRETCH : (n + 1) * STRETCH]) for n in range(whole))])
    steps = (vectors[1:-1] * vectors[2:]).sum(axis=1)
    return {"neighbours": 100 * float(steps.mean()), "on_topic": 100 * float(vectors[0] @ vectors[-1])}


def _rouge(row: Mapping[str, Any], answer: str) -> dict[str, float]:
    found = [_ROUGE.score(reference, answer) for reference in row["references"]]
    return {name: max(f[name].fmeasure for f in found) for name in ("rouge1", "rouge2", "rougeL")}


def _passage(row: Mapping[str, Any], answer: str) -> dict[str, float]:
    """Exact match and F1 over normalised words (SQuAD, Rajpurkar et al. 2016), and whether a reference is in it."""
    return {
        "contains": float(any(_contains(_plain(answer), _plain(r)) for r in row["references"])),
        "exact": max(float(_plain(answer) == _plain(r)) for r in row["references"]),
        "f1": max(_f1(_plain(answer), _plain(r)) for r in row["references"]),
    }


def _contains(words: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether the wanted words stand among the words in a row."""
    size = len(wanted)
    return size > 0 and any(list(words[n : n + size]) == list(wanted) for n in range(len(words) - size + 1))


def _plain(text: str) -> list[str]:
    """Words in lower case without punctuation and English articles; each Chinese or Japanese character is a word."""
    bare = "".join(" " if unicodedata.category(c)[0] == "P" else c for c in text.lower())
    bare = re.sub(r"([\u3040-\u30ff\u3400-\u9fff])", r" \1 ", bare)
    return [w for w in bare.split() if w not in ("a", "an", "the") and w not in string.punctuation]


def _f1(found: Sequence[str], wanted: Sequence[str]) -> float:
    shared = sum((Counter(found) & Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted)) if shared else 0.0


def _number(row: Mapping[str, Any], answer: str) -> dict[str, float]:
    """Whether the last number of the answer is the one that is wanted."""
    found = [float(n.replace(",", "").replace("$", "").rstrip(".")) for n in _NUMBER.findall(answer)]
    wanted = float(row["references"][0].replace(",", ""))
    return {"exact": float(bool(found) and abs(found[-1] - wanted) < 1e-6)}


def _instructions(row: Mapping[str, Any], answer: str) -> dict[str, float]:
    return {"followed": float(ifeval.followed(answer, row["instruction_id_list"], row["kwargs"]))}


_TASKS: dict[str, Callable[[Mapping[str, Any], str], dict[str, float]]] = {
    "open": _rouge,
    "instruct": _rouge,
    "rag": _passage,
    "math": _number,
    "ifeval": _instructions,
}
