"""Which of a member's samples is its answer: by nothing but what the member itself said, without references."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from specfuse_shared.comparing.metrics import final_answer, score
from specfuse_shared.comparing.questions import Question
from specfuse_shared.comparing.run.run_file import Answer


def chosen(question: Question, samples: Sequence[Answer]) -> Answer:
    """The most frequent final answer (letter, number, few words); of as frequent ones that with the highest mean log p.

    Where answers cannot be counted, the sample of which the member itself is most certain: mean log p a token.
    """
    alike: dict[str, list[Answer]] = defaultdict(list)
    for sample in samples:
        if (said := final_answer(question, sample.text)) is not None:
            alike[said].append(sample)
    voted = max(alike.values(), key=lambda same: (len(same), fmean(map(certainty, same))), default=samples)
    return max(voted, key=certainty)


def best_by_references(question: Question, samples: Sequence[Answer]) -> Answer:
    """The sample with the most points: a ceiling, as choosing it takes the references."""
    return max(samples, key=lambda sample: next(iter(score(question, sample.text).values())))


def certainty(sample: Answer) -> float:
    """Mean log p of a token; nothing is less certain than an empty answer."""
    return -math.inf if sample.logprob is None else sample.logprob
