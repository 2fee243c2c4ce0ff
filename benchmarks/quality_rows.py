"""The quality benchmark's questions, and the files of its answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from figures import RESULTS
from typer import BadParameter

from specfuse_shared.comparing import Answer, Question
from specfuse_shared.comparing.run.run_file import RunFile

TASKS = {
    "open": "open",
    "rag": "rag_en",
    "rag-sentence": "rag_en",
    "ifeval": "ifeval",
    "instruct": "instruct",
    "math": "gsm8k",
    "rag-zh": "rag_zh",
    "own": "own_questions",
    "squad": "squad",
    "facts": "nq_open",
    "choice": "arc_challenge",
    "math-more": "gsm8k_more",
}
"""Set of rows → file in the data folder, without its suffix."""
BUDGET = {
    "open": 128,
    "rag": 32,
    "rag-sentence": 48,
    "ifeval": 160,
    "instruct": 96,
    "math": 320,
    "rag-zh": 32,
    "own": 128,
    "squad": 32,
    "facts": 32,
    "choice": 8,
    "math-more": 320,
}
"""Maximum tokens of an answer, in the reference member's encoding."""
INSTRUCTIONS = {
    "rag": "Answer the question with a few words.",
    "rag-sentence": "Read the passage, then reply to the question with one full sentence.",
    "rag-zh": "请用原文中的几个字回答问题。",
    "squad": "Answer the question with a few words.",
}
"""Text before a passage and its question. No training row of the demo's members has this wording."""
FOLDER = RESULTS / "quality"

KINDS = {
    "open": "text",
    "instruct": "text",
    "rag": "short",
    "qa": "short",
    "math": "number",
    "choice": "choice",
    "ifeval": "instructions",
    "own": "open",
}
"""Task of a row → kind of its question."""


def read_rows(
    data: Path, tasks: Iterable[str], half: str, limit: int | None = None, tokens: int | None = None
) -> list[Question]:
    """The questions of a half, at most `limit` of each task. Group and id name the set, since sets can share rows."""
    if half not in ("choose", "confirm", "all"):
        raise BadParameter(f"--half must be choose, confirm or all, not {half!r}")
    questions: list[Question] = []
    for task in tasks:
        if task not in TASKS:
            raise BadParameter(f"there is no task {task!r}: use {', '.join(TASKS)}")
        lines = (data / f"{TASKS[task]}.jsonl").read_text(encoding="utf-8").splitlines()
        picked = [json.loads(line) for line in (lines if half == "all" else lines[half == "confirm" :: 2])[:limit]]
        questions += [question(row, task, tokens or BUDGET[task]) for row in picked]
    return questions


def question(row: Mapping[str, Any], task: str, budget: int) -> Question:
    """The question of a row; a passage has an instruction before it."""
    prompt = f"{INSTRUCTIONS[task]}\n\n{row['context']}\n\n{row['prompt']}" if task in INSTRUCTIONS else row["prompt"]
    choices = row.get("choices", ())
    checks = zip(row.get("instruction_id_list", ()), row.get("kwargs", ()), strict=True)
    return Question(
        text=prompt,
        id=f"{task}/{row['id']}",
        references=[choices[row["answer"]]] if choices else row.get("references", ()),
        choices=choices,
        instructions=[{**settings, "name": name} for name, settings in checks],
        kind=KINDS[row["task"]],
        group=task,
        max_tokens=budget,
    )


def stored_as(name: str, tokens: int | None) -> str:
    """The name of a variant's file: each limit of tokens has a separate one."""
    return name if tokens is None else f"{name}@{tokens}"


def answers_file(name: str) -> Path:
    return FOLDER / f"{name}.jsonl"


def read_answers(name: str) -> dict[str, Answer]:
    """A variant's answers, by the id of their questions."""
    if not answers_file(name).is_file():
        return {}
    with RunFile(answers_file(name)) as file:
        return file.by_question()
