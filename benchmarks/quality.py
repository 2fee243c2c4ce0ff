"""How good are the ensemble's answers? Each member alone and every variant, on the same rows with the same budget.

    python benchmarks/quality.py run --data DIR [--half choose|confirm|all] [--rows N] [--variants NAME]…
    python benchmarks/quality.py table --data DIR [--half …] [--against best] [--variants NAME]…
    python benchmarks/quality.py beside --data DIR OUT.md [--half …] [--rows 10] [--words 30] [--variants NAME]…
    python benchmarks/quality.py variants

DIR holds the JSONL files named in `quality_rows.TASKS` (`id, task, prompt, references, context?`); `own` is in
`benchmarks/` itself. Rows alternate
between the half on which settings are chosen and the half that confirms them. Answers are appended to
`results/quality/VARIANT.jsonl` and never made twice, so that a run may be stopped and go on. Greedy, in bf16 where the
processor has it, as many answers at a time as `--together`.

With `--member FILE` further members may stand beside the demo's: their variants are called `a+b+c`.

`table` scores what is there: open questions by ROUGE-L and by the cosine of sentence embeddings (the better of two
references), passages by F1 and by whether the answer holds a reference (asked for a few words and for a sentence),
verifiable instructions by whether all are followed. Each column has the difference to the best of a variant's members
with its paired bootstrap interval (95 %, 10,000 samples), and below the table stands how small a difference the rows
can show. JSON and a plot lie beside it. First segment and tokens a second are those of lone requests (`--timed`).
`--coherence` adds how long answers hang together (`--tokens 400`).
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from figures import peak_bytes, shortened
from metrics import sentence_vectors
from quality_rows import FOLDER, answers_file, read_answers, read_rows, stored_as
from quality_table import loudest, measured, plot, rivals_of, seen, show
from rich.progress import Progress
from variants import BARS, VARIANTS, ensemble, with_further

from specfuse_shared.comparing.intervals import Interval, difference
from specfuse_shared.comparing.run.asking import Asker, EvalRun
from specfuse_shared.comparing.run.run_file import RunFile

COMPARED_TASKS = ("open", "rag", "rag-sentence", "ifeval")
COMPARED = (*BARS, "default", "specfuse")

app = typer.Typer(add_completion=False, help=__doc__, no_args_is_help=True)

Data = Annotated[Path, typer.Option(help="folder of JSONL files")]
Half = Annotated[str, typer.Option(help="choose, confirm or all")]
Names = Annotated[list[str], typer.Option(help="variants, by name")]
Tasks = Annotated[list[str], typer.Option(help="tasks, by name")]
Further = Annotated[list[str], typer.Option(help="a further member: a hub id, a folder or a GGUF file")]
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
    member: Further = [],  # noqa: B006
) -> None:
    """Answer the rows that a variant has not answered yet."""
    with_further(member)
    asked = read_rows(data, tasks, half, rows, tokens)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in variants:
        start, asker = time.monotonic(), Asker(name, ensemble(name, together))
        with RunFile(answers_file(stored_as(name, tokens))) as file, Progress() as progress:
            before, bar = len(file), progress.add_task(name, total=None)
            asking = EvalRun(
                [asker],
                asked,
                file,
                timed=timed,
                on_progress=lambda p, bar=bar: progress.update(bar, completed=p.done, total=p.total),
            )
            asking.ask_all()
        took, memory = time.monotonic() - start, peak_bytes() / 2**20
        print(f"{name}: {len(file) - before} records in {took:.0f} s, at most {memory:.0f} MiB of memory")
        for (_, row), why in asking.failures.items():
            print(f"{name}: {row} failed: {why}")


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
    member: Further = [],  # noqa: B006
    answered: Annotated[bool, typer.Option(help="only the rows that all of them have answered")] = False,
) -> None:
    """Score what has been answered."""
    with_further(member)
    asked = read_rows(data, tasks, half, rows, tokens)
    names = variants or [name for name in VARIANTS if answers_file(stored_as(name, tokens)).is_file()]
    rivals = [against] if against != "best" else [bar for name in names for bar in VARIANTS[name].bars]
    names = list(dict.fromkeys([*rivals, *names]))
    if answered:
        made = [read_answers(stored_as(name, tokens)) for name in names]
        asked = [row for row in asked if all(row.id in each for each in made)]
    encode = sentence_vectors() if coherence or "open" in tasks else None
    found = {name: measured(stored_as(name, tokens), asked, encode, coherence) for name in names}
    whole = {name: facts for name, facts in found.items() if facts is not None}
    for name in set(found) - set(whole):
        print(f"{name}: not all rows are answered, left out")
    if not asked or not set(rivals) & set(whole):
        raise typer.BadParameter("nothing to compare: see `run`, and `--answered` for a run that was cut short")
    compared = rivals_of(whole, against)
    for name, facts in whole.items():
        for column, of in compared.items():
            facts["columns"][column]["difference"] = difference(
                facts["columns"][column]["each"], whole[of[name]]["columns"][column]["each"]
            )
    show(whole, compared, f"{half} half, {len(asked)} rows, difference to {against}", markdown)
    for line in seen(whole, compared):
        print(line)
    if not markdown:
        print("\n".join(loudest(whole)))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(
            json.dumps({"half": half, "rivals": compared, "variants": whole}, indent=1, default=_plain) + "\n"
        )
        plot(whole, compared, out.with_suffix(".png"))


@app.command()
def beside(
    data: Data,
    out: Annotated[Path, typer.Argument(help="Markdown file")],
    variants: Names = (*BARS, "default"),
    half: Half = "confirm",
    tasks: Tasks = ("open",),
    rows: Annotated[int, typer.Option(help="the first so many of each task")] = 10,
    words: Annotated[int, typer.Option(min=1, help="cut answers after so many words")] = 30,
) -> None:
    """The answers to the first rows side by side, as they are. What stands above those of an earlier OUT.md stays."""
    known = {name: read_answers(stored_as(name, None)) for name in variants}
    of = "" if half == "all" else f" of the half to {half}"
    told = f"{', '.join(tasks)}{of}; unselected. Answers are cut after {words} words."
    head = f"# The first {rows} rows, answered by each\n\n{told}\n"
    if out.is_file():
        head, *_ = out.read_text(encoding="utf-8").partition("\n## ")
    lines = [head.rstrip("\n")]
    for row in read_rows(data, tasks, half, rows):
        lines += ["", f"## {row.id}", "", *_quoted(row.prompt)]
        for name, answers in known.items():
            text = answers[row.id].text.strip()
            lines += ["", f"**{name}**", "", *_quoted(shortened(text, words) or "(nothing)")]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _plain(value: object) -> object:
    """What JSON does not know."""
    return value.to_dict() if isinstance(value, Interval) else asdict(value)  # type: ignore[call-overload]


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
