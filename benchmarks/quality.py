"""How good are the ensemble's answers? Each member alone and every variant, on the same rows with the same budget.

    python benchmarks/quality.py run --data DIR [--half choose|confirm|all] [--rows N] [--variants NAME]…
    python benchmarks/quality.py table --data DIR [--half …] [--against best] [--variants NAME]…
    python benchmarks/quality.py beside --data DIR OUT.md [--half …] [--rows 10] [--variants NAME]…
    python benchmarks/quality.py variants

DIR holds the JSONL files named in `quality_rows.TASKS` (`id, task, prompt, references, context?`). Rows alternate
between the half on which settings are chosen and the half that confirms them. Answers are appended to
`results/quality/VARIANT.jsonl` and never made twice, so that a run may be stopped and go on. Greedy, in bf16 where the
processor has it, as many answers at a time as `--together`.

`table` scores what is there: open questions by ROUGE-L and by the cosine of sentence embeddings (the better of two
references), passages by F1 and by whether the answer holds a reference (asked for a few words and for a sentence),
verifiable instructions by whether all are followed. Each column has the difference to the best member with its paired
bootstrap interval (95 %, 10,000 samples), and below the table stands how small a difference the rows can show. JSON and
a plot lie beside it. First segment and tokens a second are those of lone requests (`--timed`). `--coherence` adds how
long answers hang together (`--tokens 400`).
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from metrics import sentence_vectors
from quality_rows import FOLDER, Row, answers_file, question, read_answers, read_rows, stored_as, timing_file
from quality_table import difference, loudest, measured, plot, rivals_of, seen, show
from rich.progress import Progress
from variants import BARS, VARIANTS, ensemble

from specfuse_shared import EnsembleEngine, EnsembleResult, Message, SamplingParams

COMPARED_TASKS = ("open", "rag", "rag-sentence", "ifeval")
COMPARED = (*BARS, "default", "specfuse")

app = typer.Typer(add_completion=False, help=__doc__, no_args_is_help=True)

Data = Annotated[Path, typer.Option(help="folder of JSONL files")]
Half = Annotated[str, typer.Option(help="choose, confirm or all")]
Names = Annotated[list[str], typer.Option(help="variants, by name")]
Tasks = Annotated[list[str], typer.Option(help="tasks, by name")]
Tokens = Annotated[int | None, typer.Option(help="most tokens of an answer, instead of the task's own budget")]


@app.command()
def run(
    data: Data,
    variants: Names = COMPARED,
    half: Half = "choose",
    tasks: Tasks = COMPARED_TASKS,
    rows: Annotated[int | None, typer.Option(help="at most this many of each task")] = None,
    together: Annotated[int, typer.Option(help="answers at a time")] = 24,
    timed: Annotated[int, typer.Option(help="lone requests to time for each variant")] = 0,
    tokens: Tokens = None,
) -> None:
    """Answer the rows that a variant has not answered yet."""
    asked = read_rows(data, tasks, half, rows, tokens)
    for name in variants:
        stored = stored_as(name, tokens)
        known = read_answers(stored)
        todo = [row for row in asked if row["key"] not in known]
        with EnsembleEngine(ensemble(name, together)).load() as engine:
            asyncio.run(answer_all(engine, stored, todo))
            if timed:
                time_alone(engine, stored, asked, timed)


async def answer_all(engine: EnsembleEngine, name: str, todo: Sequence[Row]) -> None:
    """Answers are written as they come, so that nothing is lost when the run is stopped."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()

    async def answer(row: Row) -> tuple[Row, EnsembleResult]:
        params = SamplingParams(max_tokens=row["budget"])
        return row, await engine.agenerate([Message("user", question(row))], params)

    with answers_file(name).open("a", encoding="utf-8") as file, Progress() as progress:
        bar = progress.add_task(name, total=len(todo))
        for job in asyncio.as_completed([answer(row) for row in todo]):
            row, result = await job
            file.write(json.dumps({"key": row["key"], **ledger(result)}, ensure_ascii=False) + "\n")
            file.flush()
            progress.advance(bar)
    if todo:
        took, memory = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{name}: {len(todo)} answers in {took:.0f} s, at most {memory:.0f} MiB of memory")


def ledger(result: EnsembleResult) -> dict[str, Any]:
    """What the tables need of an answer."""
    return {
        "text": result.text,
        "finish": str(result.finish_reason),
        "tokens": result.usage.completion_tokens,
        "rounds": len(result.rounds),
        "active": statistics.mean(len(r.active) for r in result.rounds) if result.rounds else 0.0,
        "won": {s.member: s.segments_won for s in result.summary()},
        "candidates": [
            [(c.text, c.drafters, c.ends, {j: round(p, 4) for j, p in c.scores.items()}) for c in r.candidates]
            for r in result.rounds
        ],
    }


def time_alone(engine: EnsembleEngine, name: str, asked: Sequence[Row], count: int) -> None:
    """First segment and tokens a second of lone requests, spread over the tasks."""
    firsts, speeds = [], []
    for row in list(asked)[:: max(1, len(asked) // count)][:count]:
        params = SamplingParams(max_tokens=row["budget"])
        result = engine.generate([Message("user", question(row))], params)
        firsts.append(result.first_segment_seconds or result.total_seconds)
        speeds.append(result.usage.completion_tokens / result.total_seconds)
    found = {"first_segment_seconds": statistics.median(firsts), "tokens_per_second": statistics.median(speeds)}
    timing_file(name).write_text(json.dumps({**found, "requests": count}) + "\n")


@app.command()
def table(
    data: Data,
    variants: Names = (),
    half: Half = "choose",
    tasks: Tasks = COMPARED_TASKS,
    rows: Annotated[int | None, typer.Option(min=2, help="at most this many of each task")] = None,
    against: Annotated[str, typer.Option(help="a variant, or `best`: the best member of each column")] = "best",
    out: Annotated[Path | None, typer.Option(help="JSON file; the plot goes beside it")] = None,
    markdown: Annotated[bool, typer.Option(help="print a Markdown table")] = False,
    tokens: Tokens = None,
    coherence: Annotated[bool, typer.Option(help="how answers of two stretches or more hang together")] = False,
) -> None:
    """Score what has been answered."""
    asked = read_rows(data, tasks, half, rows, tokens)
    names = variants or [name for name in VARIANTS if answers_file(stored_as(name, tokens)).is_file()]
    names = [*(m for m in BARS if against == "best" and m not in names), *names]
    encode = sentence_vectors() if coherence or "open" in tasks else None
    found = {name: measured(stored_as(name, tokens), asked, encode, coherence) for name in names}
    whole = {name: facts for name, facts in found.items() if facts is not None}
    for name in set(found) - set(whole):
        print(f"{name}: not all rows are answered, left out")
    rivals = rivals_of(whole, against)
    for facts in whole.values():
        for column, rival in rivals.items():
            facts["columns"][column]["difference"] = difference(
                facts["columns"][column]["each"], whole[rival]["columns"][column]["each"]
            )
    show(whole, rivals, f"{half} half, {len(asked)} rows, difference to {against}", markdown)
    for line in seen(whole, rivals):
        print(line)
    if not markdown:
        print("\n".join(loudest(whole)))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"half": half, "rivals": rivals, "variants": whole}, indent=1) + "\n")
        plot(whole, rivals, out.with_suffix(".png"))


@app.command()
def beside(
    data: Data,
    out: Annotated[Path, typer.Argument(help="Markdown file")],
    variants: Names = (*BARS, "default"),
    half: Half = "confirm",
    tasks: Tasks = ("open",),
    rows: Annotated[int, typer.Option(help="the first so many of each task")] = 10,
) -> None:
    """The answers to the first rows side by side, as they are."""
    known = {name: read_answers(stored_as(name, None)) for name in variants}
    lines = [
        f"# The first {rows} rows, answered by each",
        "",
        f"Of the half to {half}, {', '.join(tasks)}; unselected.",
    ]
    for row in read_rows(data, tasks, half, rows):
        lines += ["", f"## {row['key']}", "", *_quoted(question(row))]
        for name, answers in known.items():
            lines += ["", f"**{name}**", "", *_quoted(answers[row["key"]]["text"] or "(nothing)")]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _quoted(text: str) -> list[str]:
    """A text as an indented block of code: it may be Markdown with fences of its own, and shall not be read as such."""
    return [f"    {line}".rstrip() for line in text.strip().splitlines()]


@app.command("variants")
def list_variants() -> None:
    """Name every variant and what it sets."""
    for name, variant in VARIANTS.items():
        print(f"{name:24} {variant.about}")


if __name__ == "__main__":
    app()
