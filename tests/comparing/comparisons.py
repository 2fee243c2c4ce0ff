"""Comparisons of given answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specfuse_shared import EnsembleConfig
from specfuse_shared.comparing import ENSEMBLE, Answer, Comparison, QuestionSet
from specfuse_shared.comparing.run.asking import systems_of


def answer(text: str, pieces: Sequence[tuple[str, str]] = (), **facts: Any) -> Answer:
    fields = {"finish": "stop", "tokens": len(text.split()), "rounds": 1, "active": 2.0, "forwards": 3, **facts}
    return Answer(text=text, pieces=tuple(pieces), **fields)


def made(
    texts: Mapping[str, Sequence[str]], references: Sequence[str] | str | None = "the sea", **facts: Any
) -> Comparison:
    """Name → answers; `ENSEMBLE` is the ensemble's name. `references`: one for all, or one each; None: none."""
    members = [name for name in texts if name != ENSEMBLE and not name.startswith("without ")]
    count = len(texts[ENSEMBLE])
    each = [references] * count if isinstance(references, str) or references is None else references
    rows = [
        {"text": f"Question {n}?", "id": f"q{n}", "references": [] if r is None else [r]} for n, r in enumerate(each)
    ]
    questions = QuestionSet.of(rows).questions
    askers = [asker for asker in systems_of(EnsembleConfig(members), leave_one_out=True) if asker.name in texts]
    answers = {
        asker.name: {q.id: answer(text, **facts) for q, text in zip(questions, texts[asker.name], strict=True)}
        for asker in askers
    }
    return Comparison(questions, tuple(askers), answers, dict.fromkeys(texts, 0))
