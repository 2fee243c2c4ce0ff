"""What the quality benchmark asks, and where its answers lie."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from figures import RESULTS
from typer import BadParameter

TASKS = {
    "open": "open",
    "rag": "rag_en",
    "rag-sentence": "rag_en",
    "ifeval": "ifeval",
    "instruct": "instruct",
    "math": "gsm8k",
    "rag-zh": "rag_zh",
}
"""Set of rows → file of the data folder, without its ending."""
BUDGET = {"open": 128, "rag": 32, "rag-sentence": 48, "ifeval": 160, "instruct": 96, "math": 128, "rag-zh": 32}
"""Most tokens (of the reference member) of an answer."""
PLEAS = {
    "rag": "Answer the question with a few words.",
    "rag-sentence": "Answer the question in one short sentence.",
    "rag-zh": "请用原文中的几个字回答问题。",
}
"""What comes before a passage and its question."""
FOLDER = RESULTS / "quality"

Row = dict[str, Any]


def read_rows(
    data: Path, tasks: Iterable[str], half: str, most: int | None = None, tokens: int | None = None
) -> list[Row]:
    """The rows of a half, each with its set, its budget and a key of its own: sets may share rows."""
    if half not in ("choose", "confirm", "all"):
        raise BadParameter(f"--half must be choose, confirm or all, not {half!r}")
    found: list[Row] = []
    for task in tasks:
        if task not in TASKS:
            raise BadParameter(f"there is no task {task!r}: use {', '.join(TASKS)}")
        lines = (data / f"{TASKS[task]}.jsonl").read_text(encoding="utf-8").splitlines()
        picked = [json.loads(line) for line in (lines if half == "all" else lines[half == "confirm" :: 2])[:most]]
        found += [
            {**row, "set": task, "key": f"{task}/{row['id']}", "budget": tokens or BUDGET[task]} for row in picked
        ]
    return found


def question(row: Row) -> str:
    """What is asked; a passage comes with a plea for a short answer, a sum with one for the number."""
    if row["task"] == "rag":
        return f"{PLEAS[row['set']]}\n\n{row['context']}\n\n{row['prompt']}"
    if row["task"] == "math":
        return f"{row['prompt']}\n\nThink step by step and end with the number that answers the question."
    return str(row["prompt"])


def stored_as(name: str, tokens: int | None) -> str:
    """Answers of another length are another variant."""
    return name if tokens is None else f"{name}@{tokens}"


def answers_file(name: str) -> Path:
    return FOLDER / f"{name}.jsonl"


def timing_file(name: str) -> Path:
    return FOLDER / f"{name}.timing.json"


def read_answers(name: str) -> dict[str, dict[str, Any]]:
    """A variant's answers, by the key of their rows."""
    file = answers_file(name)
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return {answer["key"]: answer for answer in map(json.loads, lines)}
