"""How good are the ensemble's answers? Each member alone and every variant, on the same rows with the same budget.

    python benchmarks/quality.py run --data DIR [--half choose|confirm|all] [--variants NAME …] [--rows N]
    python benchmarks/quality.py table --data DIR [--half …] [--variants NAME …] [--against best]
    python benchmarks/quality.py variants

DIR holds the JSONL files named in TASKS (`id, task, prompt, references, context?`). Rows alternate between the half
on which settings are chosen and the half that confirms them. Answers are appended to `results/quality/VARIANT.jsonl`
and never made twice, so that a run may be stopped and go on. Greedy, bf16, as many answers at a time as `--together`.
`table` scores what is there: means with paired bootstrap intervals (95 %, 10,000 samples) of the difference to the
best member, JSON and a plot beside it. First segment and tokens a second are those of lone requests (`--timed`).
`--coherence` adds how long answers hang together (`--tokens 400`; needs the demo's sentence encoder).
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import numpy as np
import typer
from figures import RESULTS
from metrics import MAIN, Encode, coherence, goes_in_circles, repeated_share, says_a_line_thrice, score
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy.stats import bootstrap
from variants import MEMBERS, VARIANTS, ensemble

from specfuse_shared import EnsembleEngine, EnsembleResult, Message, SamplingParams
from specfuse_shared.loading.demo import sentence_encoder

TASKS = {"instruct": "instruct", "rag": "rag_en", "ifeval": "ifeval", "math": "gsm8k", "rag_zh": "rag_zh"}
"""Task → file of DIR, without its ending."""
BUDGET = {"instruct": 96, "rag": 32, "ifeval": 160, "math": 128, "rag_zh": 32}
"""Most tokens (of the reference member) of an answer."""
FOLDER = RESULTS / "quality"
COMPARED_TASKS = ("instruct", "rag", "ifeval")
COMPARED = (*MEMBERS, "default", "specfuse")

Row = dict[str, Any]
app = typer.Typer(add_completion=False, help=__doc__, no_args_is_help=True)

Data = Annotated[Path, typer.Option(help="folder of JSONL files")]
Half = Annotated[str, typer.Option(help="choose, confirm or all")]
Names = Annotated[list[str], typer.Option(help="variants, by name")]
Tasks = Annotated[list[str], typer.Option(help="tasks, by name")]
Tokens = Annotated[int | None, typer.Option(help="most tokens of an answer, instead of the task's own budget")]


def read_rows(
    data: Path, tasks: Iterable[str], half: str, most: int | None = None, tokens: int | None = None
) -> list[Row]:
    """The rows of a half, each with its set and its budget."""
    if half not in ("choose", "confirm", "all"):
        raise typer.BadParameter(f"--half must be choose, confirm or all, not {half!r}")
    found: list[Row] = []
    for task in tasks:
        lines = (data / f"{TASKS[task]}.jsonl").read_text(encoding="utf-8").splitlines()
        picked = lines if half == "all" else lines[half == "confirm" :: 2]
        budget = tokens or BUDGET[task]
        found += [{**json.loads(line), "set": task, "budget": budget} for line in picked[:most]]
    return found


def question(row: Row) -> str:
    """What is asked; a passage comes with the plea for a short answer, a sum with one for the number."""
    if row["task"] == "rag":
        ask = "请用原文中的几个字回答问题。" if row["set"] == "rag_zh" else "Answer the question with a few words."
        return f"{ask}\n\n{row['context']}\n\n{row['prompt']}"
    if row["task"] == "math":
        return f"{row['prompt']}\n\nThink step by step and end with the number that answers the question."
    return str(row["prompt"])


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
        known = {answer["id"] for answer in read_answers(stored)}
        todo = [row for row in asked if row["id"] not in known]
        with EnsembleEngine(ensemble(name, together)).load() as engine:
            asyncio.run(answer_all(engine, stored, todo))
            if timed:
                time_alone(engine, stored, asked, timed)


def stored_as(name: str, tokens: int | None) -> str:
    """Answers of another length are another variant."""
    return name if tokens is None else f"{name}@{tokens}"


async def answer_all(engine: EnsembleEngine, name: str, todo: Sequence[Row]) -> None:
    """Answers are written as they come, so that nothing is lost when the run is stopped."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()

    async def answer(row: Row) -> tuple[Row, EnsembleResult]:
        params = SamplingParams(max_tokens=row["budget"])
        return row, await engine.agenerate([Message("user", question(row))], params)

    with (FOLDER / f"{name}.jsonl").open("a", encoding="utf-8") as file, Progress() as progress:
        bar = progress.add_task(name, total=len(todo))
        for job in asyncio.as_completed([answer(row) for row in todo]):
            row, result = await job
            file.write(json.dumps({"id": row["id"], **ledger(result)}, ensure_ascii=False) + "\n")
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
    (FOLDER / f"{name}.timing.json").write_text(json.dumps({**found, "requests": count}) + "\n")


def read_answers(name: str) -> list[dict[str, Any]]:
    file = FOLDER / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


@app.command()
def table(
    data: Data,
    variants: Names = (),
    half: Half = "choose",
    tasks: Tasks = COMPARED_TASKS,
    rows: int | None = None,
    against: Annotated[str, typer.Option(help="a variant, or `best`: the best member of each task")] = "best",
    out: Annotated[Path | None, typer.Option(help="JSON file; the plot goes beside it")] = None,
    markdown: Annotated[bool, typer.Option(help="print a Markdown table")] = False,
    tokens: Tokens = None,
    hanging: Annotated[
        bool, typer.Option("--coherence", help="how answers of two stretches or more hang together")
    ] = False,
) -> None:
    """Score what has been answered."""
    asked = read_rows(data, tasks, half, rows, tokens)
    names = variants or [name for name in VARIANTS if (FOLDER / f"{stored_as(name, tokens)}.jsonl").is_file()]
    names = [*(m for m in MEMBERS if against == "best" and m not in names), *names]
    encode = encoder() if hanging else None
    found = {name: measured(stored_as(name, tokens), asked, tasks, encode) for name in names}
    whole = {name: facts for name, facts in found.items() if facts is not None}
    for name in set(found) - set(whole):
        print(f"{name}: not all rows are answered, left out")
    rivals = {task: _rival(whole, task, against) for task in tasks}
    for facts in whole.values():
        for task in tasks:
            facts[task]["difference"] = difference(facts[task]["each"], whole[rivals[task]][task]["each"])
    show(whole, rivals, tasks, f"{half} half, {len(asked)} rows, difference to {against}", markdown)
    if not markdown:
        show_repeated(whole, rivals, tasks)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"half": half, "rivals": rivals, "variants": whole}, indent=1) + "\n")
        plot(whole, tasks, rivals, out.with_suffix(".png"))


def encoder() -> Encode:
    return partial(sentence_encoder().encode, normalize_embeddings=True, show_progress_bar=False)


def measured(
    name: str, asked: Sequence[Row], tasks: Sequence[str], encode: Encode | None = None
) -> dict[str, Any] | None:
    """Means and single scores of each task, and how the answers were made; None where answers are missing."""
    answers = {a["id"]: a for a in read_answers(name)}
    if any(row["id"] not in answers for row in asked):
        return None
    found: dict[str, Any] = {}
    for task in tasks:
        own = [(row, answers[row["id"]]) for row in asked if row["set"] == task]
        scores = [score(row, answer["text"]) for row, answer in own]
        found[task] = {metric: statistics.mean(s[metric] for s in scores) for metric in scores[0]}
        found[task]["each"] = [s[MAIN[own[0][0]["task"]]] for s in scores]
        found[task]["mean"] = statistics.mean(found[task]["each"])
        found[task]["circles"] = [row["id"] for row, answer in own if goes_in_circles(answer["text"])]
        found[task]["thrice"] = [row["id"] for row, answer in own if says_a_line_thrice(answer["text"])]
        found[task]["repeated"] = 100 * statistics.mean(repeated_share(answer["text"]) for _, answer in own)
        found[task]["tokens"] = statistics.mean(answer["tokens"] for _, answer in own)
    made = [answers[row["id"]] for row in asked]
    if encode is not None:
        hanging = [coherence(question(row), answers[row["id"]]["text"], encode) for row in asked]
        found["coherence"] = [one for one in hanging if one]
    found["active"] = sum(a["active"] * a["rounds"] for a in made) / max(1, sum(a["rounds"] for a in made))
    found["rounds"] = statistics.mean(a["rounds"] for a in made)
    timing = FOLDER / f"{name}.timing.json"
    return {**found, "timing": json.loads(timing.read_text()) if timing.is_file() else None}


def _rival(whole: Mapping[str, Any], task: str, against: str) -> str:
    if against != "best":
        return against
    return max((m for m in MEMBERS if m in whole), key=lambda m: whole[m][task]["mean"])


def difference(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Mean of the paired differences and its 95 % bootstrap interval."""
    gaps = np.subtract(ours, theirs)
    if not gaps.any():
        return {"mean": 0.0, "low": 0.0, "high": 0.0}
    found = bootstrap((gaps,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(0))
    low, high = found.confidence_interval
    return {"mean": float(gaps.mean()), "low": float(low), "high": float(high)}


def show(whole: Mapping[str, Any], rivals: Mapping[str, str], tasks: Sequence[str], title: str, plain: bool) -> None:
    """On the terminal, or as Markdown; without the columns of what was not measured."""
    rows = [_cells(name, facts, tasks, rivals) for name, facts in whole.items()]
    columns = [column for column in rows[0] if any(cells[column] for cells in rows)]
    if plain:
        for cells in (columns, ["---"] * len(columns), *([row[c] for c in columns] for row in rows)):
            print("| " + " | ".join(cells) + " |")
        return
    printed = Table(*columns, title=title)
    for row in rows:
        printed.add_row(*(row[c] for c in columns))
    Console(width=200).print(printed)


def show_repeated(whole: Mapping[str, Any], rivals: Mapping[str, str], tasks: Sequence[str]) -> None:
    """Answers with a line three times, and those of them where the rival's answer has none."""
    for name, facts in whole.items():
        for task in tasks:
            rows, rival = set(facts[task]["thrice"]), rivals[task]
            worse = rows - set(whole[rival][task]["thrice"])
            if rows:
                print(f"{name}: {len(rows)} {task} answers say a line thrice, {len(worse)} where {rival}'s do not")


def _cells(name: str, facts: Mapping[str, Any], tasks: Sequence[str], rivals: Mapping[str, str]) -> dict[str, str]:
    """Column → text, empty where it was not measured."""

    def compared(task: str) -> str:
        d = facts[task]["difference"]
        gap = "" if d["low"] == d["high"] == 0 else f" {d['mean']:+.1f} [{d['low']:+.1f}, {d['high']:+.1f}]"
        return f"{facts[task]['mean']:.1f}{gap}"

    def listed(fact: Callable[[str], float]) -> str:
        return ", ".join(f"{fact(task):.0f}" for task in tasks)

    timing, hanging = facts["timing"], facts.get("coherence")
    return {
        "variant": name,
        **{f"{task}: {MAIN[TASK_OF[task]]} (to {rivals[task]})": compared(task) for task in tasks},
        "circles": listed(lambda task: len(facts[task]["circles"])),
        "repeated %": listed(lambda task: facts[task]["repeated"]),
        "tokens": listed(lambda task: facts[task]["tokens"]),
        "rounds": f"{facts['rounds']:.1f}",
        "active": f"{facts['active']:.2f}",
        "neighbours": _mean(hanging, "neighbours"),
        "on topic": _mean(hanging, "on_topic"),
        "first segment": f"{timing['first_segment_seconds']:.2f} s" if timing else "",
        "tokens/s": f"{timing['tokens_per_second']:.1f}" if timing else "",
    }


def _mean(found: Sequence[Mapping[str, float]] | None, key: str) -> str:
    """With how many answers it is a mean of."""
    return f"{statistics.mean(one[key] for one in found):.0f} ({len(found)})" if found else ""


TASK_OF = {"instruct": "instruct", "rag": "rag", "ifeval": "ifeval", "math": "math", "rag_zh": "rag"}
"""Set of rows → the task by whose metric it is judged."""


def plot(whole: Mapping[str, Any], tasks: Sequence[str], rivals: Mapping[str, str], file: Path) -> None:
    """Differences to the rival with their intervals, a panel for each task."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(whole)
    figure, panels = pyplot.subplots(1, len(tasks), figsize=(3.6 * len(tasks), 0.8 + 0.34 * len(names)), sharey=True)
    for panel, task in zip(np.atleast_1d(panels), tasks, strict=True):
        gaps = [whole[name][task]["difference"] for name in names]
        means = [g["mean"] for g in gaps]
        spread = [[g["mean"] - g["low"] for g in gaps], [g["high"] - g["mean"] for g in gaps]]
        colours = ["#8a8f98" if name in MEMBERS else "#0b6e99" for name in names]
        panel.axvline(0, color="#444", linewidth=0.8)
        panel.errorbar(means, range(len(names)), xerr=spread, fmt="none", ecolor=colours, elinewidth=2)
        panel.scatter(means, range(len(names)), color=colours, zorder=3)
        panel.set_title(f"{task}: {MAIN[TASK_OF[task]]} against {rivals[task]}", fontsize=9)
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.invert_yaxis() if panel is np.atleast_1d(panels)[0] else None
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=150)


@app.command("variants")
def list_variants() -> None:
    """Name every variant and what it sets."""
    for name, variant in VARIANTS.items():
        print(f"{name:24} {variant.about}")


if __name__ == "__main__":
    app()
