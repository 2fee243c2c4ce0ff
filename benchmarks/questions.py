"""Twenty questions over the documents of the examples: the demo's answers, and how many contain the fact.

    python benchmarks/questions.py [--settings JSON] [--member NAME] [--published] [--out FILE.md]

The chain is the one in `examples/rag_langchain.py`. An answer is right if it contains all facts of its question.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from figures import shortened

from langchain_specfuse import ChatSpecFuse
from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, demo_members

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
SHOWN = 10
"""Words of an answer on the page."""


def main(
    out: Annotated[Path | None, typer.Option(help="Markdown file for the questions and answers")] = None,
    settings: Annotated[str, typer.Option(help="settings of the ensemble, as JSON")] = "{}",
    member: Annotated[str | None, typer.Option(help="ask this member alone")] = None,
    published: Annotated[bool, typer.Option(help="SmolLM2 without its adapter")] = False,
) -> None:
    """Ask, print, count."""
    smol, gemma = demo_members()
    pair = (replace(smol, adapter=None) if published else smol, gemma)
    members = [m for m in pair if member in (None, m.name)]
    answers = ask(members, json.loads(settings))
    right = 0
    for row, answer in answers:
        hit = is_right(row, answer)
        right += hit
        print(f"{'+' if hit else '-'} {row['question']}\n    {answer}")
    print(f"{right} of {len(answers)} hold the fact")
    if out is not None:
        out.write_text(page(answers, right), encoding="utf-8")


def page(answers: Sequence[tuple[dict[str, Any], str]], right: int) -> str:
    """The questions and answers as Markdown; an answer counts in full, and is cut after `SHOWN` words."""
    lines = [
        "# Twenty questions",
        "",
        "The demo ensemble answers all questions over `examples/documents`, with the chain of",
        "`examples/rag_langchain.py` (`python benchmarks/questions.py --out FILE`).",
        f"{right} of {len(answers)} answers contain the fact. Answers are cut after {SHOWN} words here.",
        "The members were not trained on these documents or on the wording of the prompt. 12 questions have the form",
        "of training questions about synthetic facts ([training data](experiments.md#training-data)).",
        "",
    ]
    for row, answer in answers:
        mark = "" if is_right(row, answer) else " *Wrong.*"
        lines.append(f"- **{row['question']}** {' '.join(shortened(answer, SHOWN).split())}{mark}")
    return "\n".join(lines) + "\n"


def ask(members: Sequence[MemberConfig], settings: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Every question with its answer."""
    import _corpus
    import rag_langchain

    _corpus.quiet()
    rows = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder, EnsembleEngine(EnsembleConfig(members, **settings)) as engine:
        store = rag_langchain.open_store(Path(folder), rag_langchain.MiniLM())
        model = ChatSpecFuse(engine=engine, max_tokens=rag_langchain.MAX_TOKENS)
        chain = rag_langchain.build_chain(store, model)
        found = [chain.invoke(row["question"]) for row in rows]  # one by one: company changes answers in bf16
        store.client.close()
    return [(row, answer["answer"].text.strip()) for row, answer in zip(rows, found, strict=True)]


def is_right(row: dict[str, Any], answer: str) -> bool:
    return all(fact.lower() in answer.lower() for fact in row["facts"])


if __name__ == "__main__":
    typer.run(main)
