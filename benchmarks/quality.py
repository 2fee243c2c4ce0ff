"""Quality of the ensemble's answers: each member alone and each variant, on the same rows with the same token limits.

    python benchmarks/quality.py run --data DIR [--half choose|confirm|all] [--rows N] [--variants NAME]…
    python benchmarks/quality.py table --data DIR [--half …] [--against best] [--variants NAME]…
    python benchmarks/quality.py beside --data DIR OUT.md [--half …] [--rows 10] [--words 30] [--variants NAME]…
    python benchmarks/quality.py variants
    python benchmarks/quality.py exit --data FILE.jsonl [--prompts 40] [--tokens 64] [--json FILE]

DIR contains the JSONL files named in `quality_rows.TASKS` (`id, task, prompt, references, context?`). The rows of the
task `own` are in `benchmarks/`. Rows alternate between the half on which settings are chosen and the half that confirms
them. `run` appends answers to `results/quality/VARIANT.jsonl` and skips rows with an answer, so that you can stop and
resume it. Answers are greedy, in bf16 if the processor supports it; `--together` sets how many are concurrent.

`--member FILE` adds further members to the demo's two; the variants with them are named `a+b+c`.

`table` scores the stored answers: open questions by ROUGE-L and by the cosine of sentence embeddings (the better of two
references); passages, with answers of a few words and of a sentence, by F1 and by whether the answer contains a
reference; verifiable instructions by whether all are followed. Each column has the difference to the best of the
variant's members with its paired bootstrap interval (95 %, 10,000 samples). The lines below the table state the
smallest difference that the rows can show. `--out` writes JSON and a plot. With `run --timed`, the table also has the
time to the first segment and the tokens a second of single requests. `--coherence` adds the coherence of long answers
(`--tokens 400`).

`exit`: exit policies with the demo's two members and three weak ones. The weak members are noisy copies: every weight
matrix has Gaussian noise, in standard deviations of that matrix. Each row of FILE has `prompt` and `references`. All
prompts are concurrent and greedy. It prints ROUGE-L, active members a round and seconds for each exit policy.
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
Tokens = Annotated[int | None, typer.Option(help="maximum tokens of an answer, instead of the task's")]


@app.command()
def run(
    data: Data,
    variants: Names = COMPARED,
    half: Half = "choose",
    tasks: Tasks = COMPARED_TASKS,
    rows: Annotated[int | None, typer.Option(help="at most this many of each task")] = None,
    together: Annotated[int, typer.Option(help="concurrent answers")] = 24,
    timed: Annotated[int, typer.Option(help="single requests to time for each variant")] = 0,
    tokens: Tokens = None,
    member: Further = [],  # noqa: B006
) -> None:
    """Answer the rows for which a variant has no answer yet."""
    with_further(member)
    questions = read_rows(data, tasks, half, rows, tokens)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in variants:
        start, asker = time.monotonic(), Asker(name, ensemble(name, together))
        with RunFile(answers_file(stored_as(name, tokens))) as file, Progress() as progress:
            before, bar = len(file), progress.add_task(name, total=None)
            asking = EvalRun(
                [asker],
                questions,
                file,
                timed=timed,
                on_progress=lambda p, bar=bar: progress.update(bar, completed=p.done, total=p.total),
            )
            asking.ask_all()
        took, memory = time.monotonic() - start, peak_bytes() / 2**20
        print(f"{name}: {len(file) - before} records in {took:.0f} s, at most {memory:.0f} MiB of memory")
        for (_, row), error in asking.failures.items():
            print(f"{name}: {row} failed: {error}")


@app.command()
def table(
    data: Data,
    variants: Names = (),
    half: Half = "choose",
    tasks: Tasks = COMPARED_TASKS,
    rows: Annotated[int | None, typer.Option(min=2, help="at most this many of each task")] = None,
    against: Annotated[str, typer.Option(help="a variant, or `best`: the best member of each column")] = "best",
    out: Annotated[Path | None, typer.Option(help="JSON file; the plot has the same name with .png")] = None,
    markdown: Annotated[bool, typer.Option(help="print a Markdown table")] = False,
    tokens: Tokens = None,
    coherence: Annotated[bool, typer.Option(help="coherence of answers of two stretches or more")] = False,
    member: Further = [],  # noqa: B006
    answered: Annotated[bool, typer.Option(help="only the rows that all variants have answered")] = False,
) -> None:
    """Score the stored answers."""
    with_further(member)
    questions = read_rows(data, tasks, half, rows, tokens)
    names = variants or [name for name in VARIANTS if answers_file(stored_as(name, tokens)).is_file()]
    rivals = [against] if against != "best" else [bar for name in names for bar in VARIANTS[name].bars]
    names = list(dict.fromkeys([*rivals, *names]))
    if answered:
        stored = [read_answers(stored_as(name, tokens)) for name in names]
        questions = [row for row in questions if all(row.id in answers for answers in stored)]
    encode = sentence_vectors() if coherence or "open" in tasks else None
    results = {name: measured(stored_as(name, tokens), questions, encode, coherence) for name in names}
    whole = {name: facts for name, facts in results.items() if facts is not None}
    for name in set(results) - set(whole):
        print(f"{name}: not all rows are answered, left out")
    if not questions or not set(rivals) & set(whole):
        raise typer.BadParameter("nothing to compare: see `run`, and `--answered` for an interrupted run")
    compared = rivals_of(whole, against)
    for name, facts in whole.items():
        for column, of in compared.items():
            facts["columns"][column]["difference"] = difference(
                facts["columns"][column]["each"], whole[of[name]]["columns"][column]["each"]
            )
    show(whole, compared, f"{half} half, {len(questions)} rows, difference to {against}", markdown)
    for line in smallest_differences(whole, compared):
        print(line)
    if not markdown:
        print("\n".join(repeated_lines(whole)))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(
            json.dumps({"half": half, "rivals": compared, "variants": whole}, indent=1, default=_plain) + "\n"
        )
        plot(whole, compared, out.with_suffix(".png"))


@app.command("beside")
def side_by_side(
    data: Data,
    out: Annotated[Path, typer.Argument(help="Markdown file")],
    variants: Names = (*BARS, "default"),
    half: Half = "confirm",
    tasks: Tasks = ("open",),
    rows: Annotated[int, typer.Option(help="number of rows of each task")] = 10,
    words: Annotated[int, typer.Option(min=1, help="cut answers after this many words")] = 30,
) -> None:
    """Write the answers to the first rows side by side. The introduction of an existing OUT.md stays."""
    stored = {name: read_answers(stored_as(name, None)) for name in variants}
    of = "" if half == "all" else f" of the half to {half}"
    about = f"{', '.join(tasks)}{of}; unselected. Answers are cut after {words} words."
    head = f"# The first {rows} rows, with the answer of each variant\n\n{about}\n"
    if out.is_file():
        head, *_ = out.read_text(encoding="utf-8").partition("\n## ")
    lines = [head.rstrip("\n")]
    for row in read_rows(data, tasks, half, rows):
        lines += ["", f"## {row.id}", "", *_quoted(row.prompt)]
        for name, answers in stored.items():
            text = answers[row.id].text.strip()
            lines += ["", f"**{name}**", "", *_quoted(shortened(text, words) or "(nothing)")]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _plain(value: object) -> object:
    """JSON for the two other types of the report."""
    return value.to_dict() if isinstance(value, Interval) else asdict(value)  # type: ignore[call-overload]


def _quoted(text: str) -> list[str]:
    """The text as an indented block of code, so that Markdown in it, with fences, is not rendered."""
    return [f"    {line}".rstrip() for line in text.strip().splitlines()]


@app.command("variants")
def list_variants() -> None:
    """List all variants with a description."""
    for name, variant in VARIANTS.items():
        print(f"{name:24} {variant.about}")


# ── tables ────────────────────────────────────────────────────────────────────────────────────────


def measured(
    name: str, questions: Sequence[Question], encode: Encode | None = None, with_coherence: bool = False
) -> dict[str, Any] | None:
    """Each column's scores and mean, with rounds and cost of the answers; None if answers are missing.

    A column is a set of rows and a metric. Cosines and coherence need `encode`.
    """
    answers = read_answers(name)
    if any(row.id not in answers for row in questions):
        return None
    result: dict[str, Any] = {"columns": {}, "sets": {}}
    for task in dict.fromkeys(row.group for row in questions):
        rows = [row for row in questions if row.group == task]
        texts = [answers[row.id].text for row in rows]
        for metric, each in _scores(rows, texts, encode).items():
            result["columns"][f"{task}: {metric}"] = {"each": each, "mean": statistics.mean(each)}
        result["sets"][task] = _style(rows, texts)
    made = [answers[row.id] for row in questions]
    if with_coherence:
        assert encode is not None, "coherence needs an encoder"
        each = (coherence(row.prompt, answers[row.id].text, encode) for row in questions)
        result["coherence"] = [cosines for cosines in each if cosines]
    result["active"] = sum(a.active * a.rounds for a in made) / max(1, sum(a.rounds for a in made))
    result["rounds"] = statistics.mean(a.rounds for a in made)
    return {**result, "cost": cost_of({row.id: answers[row.id] for row in questions}, 0)}


def _scores(rows: Sequence[Question], texts: Sequence[str], encode: Encode | None) -> dict[str, list[float]]:
    """Metric → the score of each row, for one set."""
    single = [score(row, text) for row, text in zip(rows, texts, strict=True)]
    scores = {metric: [each[metric] for each in single] for metric in single[0]}
    if rows[0].group == "open":
        assert encode is not None, "cosines need an encoder"
        scores["cosine"] = cosines([row.references for row in rows], texts, encode)
    return scores


def _style(rows: Sequence[Question], texts: Sequence[str]) -> dict[str, Any]:
    """Length and repetition of the answers of one set."""
    keyed = list(zip((row.id for row in rows), texts, strict=True))
    return {
        "words": statistics.mean(len(text.split()) for text in texts),
        "loops": 100 * statistics.mean(is_looping(text) for text in texts),
        "repeated": 100 * statistics.mean(repeated_share(text) for text in texts),
        "thrice": [key for key, text in keyed if repeats_a_line(text)],
    }


Rivals = Mapping[str, Mapping[str, str]]
"""Column → variant → the variant that it is compared with there."""


def rivals_of(whole: Mapping[str, Any], against: str) -> Rivals:
    """The rivals; `best` is the best of a variant's own members."""
    columns = next(iter(whole.values()))["columns"]
    if against != "best":
        return {column: dict.fromkeys(whole, against) for column in columns}

    def best(name: str, column: str) -> str:
        bars = [bar for bar in VARIANTS[name].bars if bar in whole]
        return max(bars, key=lambda bar: whole[bar]["columns"][column]["mean"])

    return {column: {name: best(name, column) for name in whole} for column in columns}


def smallest_differences(whole: Mapping[str, Any], rivals: Rivals) -> list[str]:
    """For each column the smallest difference that its rows can show, the median over the ensembles of the table."""
    lines = []
    for column, of in rivals.items():
        columns = [
            facts["columns"][column] for name, facts in whole.items() if name not in (*VARIANTS[name].bars, of[name])
        ]
        smallest = [each["difference"].least_seen for each in columns if each["difference"].least_seen > 0]
        if smallest:
            count, median = len(columns[0]["each"]), statistics.median(smallest)
            lines.append(f"{column}, {count} rows: differences below {median:.1f} cannot be seen ({POWER:.0%} power).")
    return lines


def show(whole: Mapping[str, Any], rivals: Rivals, title: str, plain: bool) -> None:
    """Print the table on the terminal, or as Markdown. Columns without any value are left out."""
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


def repeated_lines(whole: Mapping[str, Any]) -> list[str]:
    """For each variant and task the number of answers that contain a line three times, unless it is 0."""
    return [
        f"{name}: {len(style['thrice'])} {task} answers contain a line three times"
        for name, facts in whole.items()
        for task, style in facts["sets"].items()
        if style["thrice"]
    ]


def _cells(name: str, whole: Mapping[str, Any], rivals: Rivals) -> dict[str, str]:
    """Column → text, empty if it was not measured."""
    facts = whole[name]

    def compared(column: str) -> str:
        d = facts["columns"][column]["difference"]
        gap = "" if d.low == d.high == 0 else f" {d}"
        return f"{facts['columns'][column]['mean']:.1f}{gap}"

    def listed(key: str) -> str:
        return ", ".join(f"{style[key]:.0f}" for style in facts["sets"].values())

    cost, coherences = facts["cost"], facts.get("coherence")
    return {
        "variant": name,
        **{f"{column} (to {_rival(of)})": compared(column) for column, of in rivals.items()},
        "words": listed("words"),
        "words ÷ members'": _ratios(name, whole),
        "loops %": listed("loops"),
        "repeated %": listed("repeated"),
        "rounds": f"{facts['rounds']:.1f}",
        "active": f"{facts['active']:.2f}",
        "neighbours": _mean(coherences, "neighbours"),
        "on topic": _mean(coherences, "on_topic"),
        "first segment": f"{cost.first_seconds:.2f} s" if cost.timed else "",
        "tokens/s": f"{cost.tokens_per_second:.1f}" if cost.timed else "",
    }


def _rival(of: Mapping[str, str]) -> str:
    """The rival of a column's variants, if all have the same one."""
    return next(iter(of.values())) if len(set(of.values())) == 1 else "their best member"


def _ratios(name: str, whole: Mapping[str, Any]) -> str:
    """Words an answer ÷ the mean of the ensemble's members alone; empty if a member's answers are missing."""
    alone = VARIANTS[name].alone
    if name in alone or any(member not in whole for member in alone):
        return ""
    means = {task: statistics.mean(whole[m]["sets"][task]["words"] for m in alone) for task in whole[name]["sets"]}
    return ", ".join(f"{h['words'] / max(1.0, means[task]):.2f}" for task, h in whole[name]["sets"].items())


def _mean(answers: Sequence[Mapping[str, float]] | None, key: str) -> str:
    """The mean over the answers, and their number."""
    return f"{statistics.mean(each[key] for each in answers):.0f} ({len(answers)})" if answers else ""


_PANELS = 4
"""Panels in a row of the plot."""


def plot(whole: Mapping[str, Any], rivals: Rivals, file: Path) -> None:
    """Draw the differences to the rival with their intervals, a panel for each column."""
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
    """Similarity of each answer to the nearest of its references: the cosine of their embeddings, times 100.

    It complements ROUGE, which favours brevity. Empty answers and negative cosines score 0.
    """
    unique = list(dict.fromkeys(text for texts in references for text in texts))
    index = {text: n for n, text in enumerate(unique)}
    targets, vectors = encode(unique), encode(list(answers))
    nearest = [
        max(float(targets[index[text]] @ vector) for text in texts) if answer.strip() else 0.0
        for texts, answer, vector in zip(references, answers, vectors, strict=True)
    ]
    return [100.0 * max(0.0, cosine) for cosine in nearest]


def repeats_a_line(answer: str) -> bool:
    """Whether the answer contains any line three times; short lines count."""
    return any_thrice(line.strip() for line in answer.splitlines() if line.strip())


def repeated_share(answer: str) -> float:
    """Share of the answer's sequences of four words that are repetitions, 0 to 1."""
    words = answer.lower().split()
    stretches = [tuple(words[n : n + 4]) for n in range(len(words) - 3)]
    return 1 - len(set(stretches)) / len(stretches) if stretches else 0.0


STRETCH = 40
"""Words of a stretch, the unit of coherence."""


def coherence(question: str, answer: str, encode: Encode) -> dict[str, float]:
    """Cosines of embeddings, times 100; empty for an answer of one stretch. `neighbours` is the mean over each stretch
    and the next one, `on_topic` compares the question with the last stretch. Repetition also raises these cosines: see
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
"""(demo member, noise) of the three noisy copies."""
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
    """The answers to all rows, and their seconds."""
    with EnsembleEngine(config).load() as engine:
        began = time.monotonic()
        results = engine.generate_batch([row["prompt"] for row in rows], SamplingParams(max_tokens=tokens))
        took = time.monotonic() - began
    return [result for result in results if isinstance(result, EnsembleResult)], took


@app.command("exit")
def weak_members(
    data: Annotated[Path, typer.Option(help="file of rows")],
    prompts: Annotated[int, typer.Option(help="number of rows")] = 40,
    tokens: Annotated[int, typer.Option(help="maximum tokens of an answer")] = 64,
    policies: Annotated[list[str], typer.Option(help="exit policies, by name")] = list(POLICIES),  # noqa: B006
    out: Annotated[Path, typer.Option("--json", help="file of the report")] = RESULTS / "exit.json",
) -> None:
    """Compare exit policies, with three noisy copies of the demo's members."""
    if unknown := set(policies) - set(POLICIES):
        raise typer.BadParameter(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(POLICIES)}")
    rows = [json.loads(line) for line in data.read_text().splitlines()][:prompts]
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    printed = Table(title=f"exit, 2 demo members and 3 noisy copies, {len(rows)} prompts, {tokens} tokens, greedy")
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
