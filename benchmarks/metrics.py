"""Further measures of the quality benchmark: cosines of embeddings, coherence, repetition.

The other metrics are in `specfuse_shared.comparing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from specfuse_shared import demo_encoder
from specfuse_shared.comparing.metrics import any_thrice

Encode = Callable[[list[str]], NDArray[np.float32]]
"""Texts → their embeddings, a row of length 1 each."""


def sentence_vectors() -> Encode:
    """Embeddings of the demo's sentence encoder (all-MiniLM-L6-v2)."""
    return partial(demo_encoder().encode, normalize_embeddings=True, show_progress_bar=False)


def cosines(references: Sequence[Sequence[str]], answers: Sequence[str], encode: Encode) -> list[float]:
    """How near each answer is in meaning to the nearest of its references: the cosine of their embeddings, times 100.

    It complements ROUGE, which favours brevity. An empty answer scores 0, as does one with the opposite direction.
    """
    wanted = list(dict.fromkeys(text for own in references for text in own))
    place = {text: n for n, text in enumerate(wanted)}
    targets, found = encode(wanted), encode(list(answers))
    nearest = [
        max(float(targets[place[text]] @ vector) for text in own) if answer.strip() else 0.0
        for own, answer, vector in zip(references, answers, found, strict=True)
    ]
    return [100.0 * max(0.0, cosine) for cosine in nearest]


def says_a_line_thrice(answer: str) -> bool:
    """Whether any line, however short, is in the answer three times."""
    return any_thrice(line.strip() for line in answer.splitlines() if line.strip())


def repeated_share(answer: str) -> float:
    """Share of the answer's stretches of four words that were in it before, 0 to 1."""
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
