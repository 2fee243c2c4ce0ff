"""How good are the ensemble's answers? Each member alone and every variant, on the same rows with the same budget.

    python benchmarks/quality.py run --data DIR [--half choose|confirm|all] [--rows N] [--variants NAME]…
    python benchmarks/quality.py table --data DIR [--half …] [--against best] [--variants NAME]…
    python benchmarks/quality.py beside --data DIR OUT.md [--half …] [--rows 10] [--words 30] [--variants NAME]…
    python benchmarks/quality.py variants
    python benchmarks/quality.py exit --data FILE.jsonl [--prompts 40] [--tokens 64] [--json FILE]

DIR holds the JSONL files named in `quality_rows.TASKS` (`id, task, prompt, references, context?`); `own` is in
`benchmarks/` itself. Rows alternate between the half on which settings are chosen and the half that confirms them.
Answers are appended to `results/quality/VARIANT.jsonl` and never made twice, so that a run may be stopped and go on.
Greedy, in bf16 where the processor has it, as many answers at a time as `--together`.

With `--member FILE` further members may stand beside the demo's: their variants are called `a+b+c`.

`table` scores what is there: open questions by ROUGE-L and by the cosine of sentence embeddings (the better of two
references), passages by F1 and by whether the answer holds a reference (asked for a few words and for a sentence),
verifiable instructions by whether all are followed. Each column has the difference to the best of a variant's members
with its paired bootstrap interval (95 %, 10,000 samples), and below the table stands how small a difference the rows
can show. JSON and a plot lie beside it. First segment and tokens a second are those of lone requests (`--timed`).
`--coherence` adds how long answers hang together (`--tokens 400`).

`exit`: the default settings with and without exit, where weak members stand beside the demo's two: noisy copies of
them, with Gaussian noise on every weight matrix, in standard deviations of that matrix. Each row of FILE has `prompt`
and `references`. All prompts at once, greedy. Prints ROUGE-L, active members a round and seconds for each exit policy.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import numpy as np
import typer
from bench_members import noisy
from figures import RESULTS, peak_bytes, shortened
from numpy.typing import NDArray
from quality_rows import FOLDER, answers_file, read_answers, read_rows, stored_as
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rouge_score.rouge_scorer import RougeScorer
from variants import BARS, VARIANTS, ensemble, with_further

from specfuse_shared import (
    EnsembleConfig,
    EnsembleEngine,
    EnsembleResult,
    MemberConfig,
    SamplingParams,
    demo_encoder,
    demo_members,
)
from specfuse_shared.comparing import Question
from specfuse_shared.comparing.intervals import POWER, Interval, difference
from specfuse_shared.comparing.metrics import any_thrice, is_looping, score
from specfuse_shared.comparing.run.asking import Asker, EvalRun
from specfuse_shared.comparing.run.run_file import RunFile
from specfuse_shared.comparing.scores import cost_of
from specfuse_shared.config import PRESETS

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


# ── tables ────────────────────────────────────────────────────────────────────────────────────────


def measured(
    name: str, asked: Sequence[Question], encode: Encode | None = None, hanging: bool = False
) -> dict[str, Any] | None:
    """Each column's single scores and mean, and how the answers were made; None where answers are missing.

    A column is a set of rows and a metric. `encode` is needed for cosines and for `hanging` (coherence).
    """
    answers = read_answers(name)
    if any(row.id not in answers for row in asked):
        return None
    found: dict[str, Any] = {"columns": {}, "sets": {}}
    for task in dict.fromkeys(row.group for row in asked):
        rows = [row for row in asked if row.group == task]
        texts = [answers[row.id].text for row in rows]
        for metric, each in _scores(rows, texts, encode).items():
            found["columns"][f"{task}: {metric}"] = {"each": each, "mean": statistics.mean(each)}
        found["sets"][task] = _habits(rows, texts)
    made = [answers[row.id] for row in asked]
    if hanging:
        assert encode is not None, "coherence needs an encoder"
        told = (coherence(row.prompt, answers[row.id].text, encode) for row in asked)
        found["coherence"] = [one for one in told if one]
    found["active"] = sum(a.active * a.rounds for a in made) / max(1, sum(a.rounds for a in made))
    found["rounds"] = statistics.mean(a.rounds for a in made)
    return {**found, "cost": cost_of({row.id: answers[row.id] for row in asked}, 0)}


def _scores(rows: Sequence[Question], texts: Sequence[str], encode: Encode | None) -> dict[str, list[float]]:
    """Metric → the score of each row, of one set."""
    single = [score(row, text) for row, text in zip(rows, texts, strict=True)]
    found = {metric: [one[metric] for one in single] for metric in single[0]}
    if rows[0].group == "open":
        assert encode is not None, "cosines need an encoder"
        found["cosine"] = cosines([row.references for row in rows], texts, encode)
    return found


def _habits(rows: Sequence[Question], texts: Sequence[str]) -> dict[str, Any]:
    """How the answers of one set read."""
    keyed = list(zip((row.id for row in rows), texts, strict=True))
    return {
        "words": statistics.mean(len(text.split()) for text in texts),
        "circles": 100 * statistics.mean(is_looping(text) for text in texts),
        "repeated": 100 * statistics.mean(repeated_share(text) for text in texts),
        "thrice": [key for key, text in keyed if says_a_line_thrice(text)],
    }


Rivals = Mapping[str, Mapping[str, str]]
"""Column → variant → the variant that it is compared with there."""


def rivals_of(whole: Mapping[str, Any], against: str) -> Rivals:
    """`best`: the best of a variant's own members."""
    columns = next(iter(whole.values()))["columns"]
    if against != "best":
        return {column: dict.fromkeys(whole, against) for column in columns}

    def best(name: str, column: str) -> str:
        bars = [bar for bar in VARIANTS[name].bars if bar in whole]
        return max(bars, key=lambda bar: whole[bar]["columns"][column]["mean"])

    return {column: {name: best(name, column) for name in whole} for column in columns}


def seen(whole: Mapping[str, Any], rivals: Rivals) -> list[str]:
    """For each column how small a difference its rows can show, in the middle over the ensembles of the table."""
    lines = []
    for column, of in rivals.items():
        told = [
            facts["columns"][column] for name, facts in whole.items() if name not in (*VARIANTS[name].bars, of[name])
        ]
        spread = [one["difference"].least_seen for one in told if one["difference"].least_seen > 0]
        if spread:
            count, least = len(told[0]["each"]), statistics.median(spread)
            lines.append(f"{column}, {count} rows: differences below {least:.1f} cannot be seen ({POWER:.0%} power).")
    return lines


def show(whole: Mapping[str, Any], rivals: Rivals, title: str, plain: bool) -> None:
    """On the terminal, or as Markdown; without the columns of what was not measured."""
    rows = [_cells(name, whole, rivals) for name in whole]
    columns = [column for column in rows[0] if any(cells[column] for cells in rows)]
    if plain:
        for cells in (columns, ["---"] * len(columns), *([row[c] for c in columns] for row in rows)):
            print("| " + " | ".join(cells) + " |")
        print()
        return
    printed = Table(*columns, title=title)
    for row in rows:
        printed.add_row(*(row[c] for c in columns))
    Console(width=240).print(printed)


def loudest(whole: Mapping[str, Any]) -> list[str]:
    """How many answers say a line three times, where any do."""
    return [
        f"{name}: {len(habits['thrice'])} {task} answers say a line thrice"
        for name, facts in whole.items()
        for task, habits in facts["sets"].items()
        if habits["thrice"]
    ]


def _cells(name: str, whole: Mapping[str, Any], rivals: Rivals) -> dict[str, str]:
    """Column → text, empty where it was not measured."""
    facts = whole[name]

    def compared(column: str) -> str:
        d = facts["columns"][column]["difference"]
        gap = "" if d.low == d.high == 0 else f" {d}"
        return f"{facts['columns'][column]['mean']:.1f}{gap}"

    def listed(habit: str) -> str:
        return ", ".join(f"{habits[habit]:.0f}" for habits in facts["sets"].values())

    cost, hanging = facts["cost"], facts.get("coherence")
    return {
        "variant": name,
        **{f"{column} (to {_rival(of)})": compared(column) for column, of in rivals.items()},
        "words": listed("words"),
        "words ÷ members'": _ratios(name, whole),
        "circles %": listed("circles"),
        "repeated %": listed("repeated"),
        "rounds": f"{facts['rounds']:.1f}",
        "active": f"{facts['active']:.2f}",
        "neighbours": _mean(hanging, "neighbours"),
        "on topic": _mean(hanging, "on_topic"),
        "first segment": f"{cost.first_seconds:.2f} s" if cost.timed else "",
        "tokens/s": f"{cost.tokens_per_second:.1f}" if cost.timed else "",
    }


def _rival(of: Mapping[str, str]) -> str:
    """Whom a column's variants are compared with, where it is the same one for all."""
    return next(iter(of.values())) if len(set(of.values())) == 1 else "their best member"


def _ratios(name: str, whole: Mapping[str, Any]) -> str:
    """Words an answer, by the mean of those of the ensemble's members alone; empty where one was not asked."""
    alone = VARIANTS[name].alone
    if name in alone or any(member not in whole for member in alone):
        return ""
    means = {task: statistics.mean(whole[m]["sets"][task]["words"] for m in alone) for task in whole[name]["sets"]}
    return ", ".join(f"{h['words'] / max(1.0, means[task]):.2f}" for task, h in whole[name]["sets"].items())


def _mean(found: Sequence[Mapping[str, float]] | None, key: str) -> str:
    """With how many answers it is a mean of."""
    return f"{statistics.mean(one[key] for one in found):.0f} ({len(found)})" if found else ""


_PANELS = 4
"""Beside each other; more go below."""


def plot(whole: Mapping[str, Any], rivals: Rivals, file: Path) -> None:
    """Differences to the rival with their intervals, a panel for each column."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(whole)
    across = min(_PANELS, len(rivals))
    down = -(-len(rivals) // across)
    size = (3.0 * across, down * (0.8 + 0.34 * len(names)))
    figure, grid = pyplot.subplots(down, across, figsize=size, sharey=True, squeeze=False)
    for panel in grid.flat[len(rivals) :]:
        panel.set_visible(False)
    for panel, (column, of) in zip(grid.flat, rivals.items(), strict=False):
        gaps = [whole[name]["columns"][column]["difference"] for name in names]
        means = [g.mean for g in gaps]
        spread = [[g.mean - g.low for g in gaps], [g.high - g.mean for g in gaps]]
        colours = ["#8a8f98" if name in VARIANTS[name].bars else "#0b6e99" for name in names]
        panel.axvline(0, color="#444", linewidth=0.8)
        panel.errorbar(means, range(len(names)), xerr=spread, fmt="none", ecolor=colours, elinewidth=2)
        panel.scatter(means, range(len(names)), color=colours, zorder=3)
        panel.set_title(f"{column}\nagainst {_rival(of)}", fontsize=9)
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    grid[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


# ── further measures: cosines of embeddings, coherence, repetition ────────────────────────────────

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


# ── exit with weak members ────────────────────────────────────────────────────────────────────────

COPIES = ((0, 0.3), (1, 0.3), (0, 0.6))
"""(demo member, noise) of the three degraded members."""
POLICIES: dict[str, Mapping[str, Any]] = {
    "never": {"exit": "never"},
    "entropy-two": {"exit": "entropy", "exit_threshold": 0.5, "min_active": 2},
    "entropy-0.7": {"exit": "entropy", "exit_threshold": 0.7},
    "entropy-0.5": {"exit": "entropy", "exit_threshold": 0.5},
    "entropy-0.25": {"exit": "entropy", "exit_threshold": 0.25},
    "fixed-0.5": {"exit": "fixed", "exit_threshold": 0.5},
    "fast": PRESETS["fast"],
}


def _with_copies(folder: Path) -> list[MemberConfig]:
    real = demo_members()
    return [*real, *(noisy(real[i], noise, folder) for i, noise in COPIES)]


def _answers(config: EnsembleConfig, rows: list[dict[str, Any]], tokens: int) -> tuple[list[EnsembleResult], float]:
    """The answers to all rows, and how many seconds they took."""
    with EnsembleEngine(config).load() as engine:
        began = time.monotonic()
        found = engine.generate_batch([row["prompt"] for row in rows], SamplingParams(max_tokens=tokens))
        took = time.monotonic() - began
    return [result for result in found if isinstance(result, EnsembleResult)], took


@app.command("exit")
def weak_members(
    data: Annotated[Path, typer.Option(help="file of rows")],
    prompts: Annotated[int, typer.Option(help="the first so many rows")] = 40,
    tokens: Annotated[int, typer.Option(help="most tokens of an answer")] = 64,
    policies: Annotated[list[str], typer.Option(help="exit policies, by name")] = list(POLICIES),  # noqa: B006
    out: Annotated[Path, typer.Option("--json", help="file of the report")] = RESULTS / "exit.json",
) -> None:
    """Exit policies with three noisy copies of the demo's members."""
    if unknown := set(policies) - set(POLICIES):
        raise typer.BadParameter(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(POLICIES)}")
    rows = [json.loads(line) for line in data.read_text().splitlines()][:prompts]
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    printed = Table(title=f"exit, 2 demo members and 3 degraded copies, {len(rows)} prompts, {tokens} tokens, greedy")
    for column in ("exit", "ROUGE-L", "active members a round", "rounds", "seconds"):
        printed.add_column(column)
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = EnsembleConfig(_with_copies(Path(folder)), reuse_prefixes=False)
        for name in policies:
            results, took = _answers(replace(config, **POLICIES[name]), rows, tokens)
            rouge = [
                max(scorer.score(ref, r.text)["rougeL"].fmeasure for ref in row["references"])
                for row, r in zip(rows, results, strict=True)
            ]
            report[name] = {
                "rougeL": 100 * statistics.mean(rouge),
                "active": statistics.mean(len(r.active) for x in results for r in x.rounds),
                "rounds": statistics.mean(len(x.rounds) for x in results),
                "seconds": took,
                "answers": [x.to_dict() for x in results],
            }
            printed.add_row(name, *(f"{report[name][key]:.2f}" for key in ("rougeL", "active", "rounds", "seconds")))
    Console(width=110).print(printed)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    app()
