"""Does agreement predict right answers, and do members alone predict the gain of their ensemble?

    python benchmarks/predictions.py confidence FILE.jsonl… [--rows N] [--member MODEL]… [--only-agreement] [--out FILE]
    python benchmarks/predictions.py confidence FILE.jsonl… --run compare.jsonl [--member MODEL]… [--config FILE]

    specfuse-llm compare --members A --members B --questions FILE --run A-B.jsonl --json > A-B.json    # each pair
    python benchmarks/predictions.py suggested A-B.json A-C.json …

`confidence`: AUROC of the agreement of the rounds, compared with the members' mean log p. Files are named as in the
quality benchmark (`quality_rows.TASKS`: squad, nq_open, gsm8k, arc_challenge, rag_en). Files with other names contain
questions on passages, one JSON row a line (`id, task "rag", prompt, references, context`). An answer is right if it
contains a reference, ends with the right number or is the right letter. Answers are greedy, with the quality
benchmark's limits of tokens.

The rounds give four measures without another forward pass: the agreement over all characters, its lowest value, the
lowest agreement on a number or name, and, for questions about numbers, the agreement on the last number. For a member's
mean log p, this member alone verifies the ensemble's answer. AUROC is the probability that a right answer has a higher
value than a wrong one (0.5: the measure predicts nothing), with its bootstrap interval over the rows (95 %).

With `--run`, no model runs: the answers are read from the file of `specfuse-llm compare --questions FILE --run
compare.jsonl`. Two other measures replace log p: the share of words that the members' separate answers have in common,
and, after `compare --equal-compute`, the share of a member's samples with the ensemble's answer.

`suggested`: Spearman's rank correlation over runs of `compare`, one file a run. For each group of questions, it prints
the gap between the members, the predicted gain and the ensemble's gain over its best member, all by its main metric.
Then it prints three rank correlations with the gains: for the predictions, the gaps, and the share that only other
members answer right. Each group of questions also has its own correlations.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from quality_rows import BUDGET, TASKS, question
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from specfuse_shared import EnsembleConfig, EnsembleEngine, Grammar, SamplingParams
from specfuse_shared.cli.setup import chosen_ensemble
from specfuse_shared.comparing import ENSEMBLE, Answer, Question, read_questions
from specfuse_shared.comparing.metrics import final_answer, score
from specfuse_shared.comparing.run.run_file import RunFile, answer_key, sample_key
from specfuse_shared.comparing.run.sampling import MOST_SAMPLES, TEMPERATURE
from specfuse_shared.comparing.scores import agreement_of

app = typer.Typer(help=__doc__, add_completion=False, no_args_is_help=True)

MORE = 16
"""Tokens that an answer may need beyond its encoding by the verifying member."""
SAMPLES = 2000
RIGHT = {"short": "contains", "number": "exact", "choice": "right"}
"""Kind of a question → the metric that is above 0 for a right answer."""
Measures = dict[str, float | None]
"""Name → value; None if the answer has no such value."""


def auroc(right: Sequence[float], wrong: Sequence[float]) -> float:
    """The probability that a value of a right answer is higher than one of a wrong answer; equal values count half."""
    first, second = np.asarray(right)[:, None], np.asarray(wrong)[None, :]
    return float(np.mean((first > second) + 0.5 * (first == second)))


def interval(numbers: Sequence[float], right: Sequence[bool], seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval (95 %) of the AUROC over the rows; [0, 1] if all answers are right, or all are wrong."""
    generator, resampled = np.random.default_rng(seed), []
    values, flags = np.asarray(numbers), np.asarray(right)
    for _ in range(SAMPLES):
        drawn = generator.integers(0, len(values), len(values))
        if 0 < flags[drawn].sum() < len(drawn):
            resampled.append(auroc(values[drawn][flags[drawn]], values[drawn][~flags[drawn]]))
    if not resampled:
        return 0.0, 1.0
    low, high = np.percentile(resampled, [2.5, 97.5])
    return float(low), float(high)


def read(file: Path, rows: int, tokens: int | None) -> list[Question]:
    """The questions of a file's first rows, with the quality benchmark's prompts."""
    task = next((task for task, name in TASKS.items() if name == file.stem), "rag")
    lines = file.read_text(encoding="utf-8").splitlines()[:rows]
    return [question(json.loads(line), task, min(BUDGET[task], tokens or BUDGET[task])) for line in lines]


def measures_of(engine: EnsembleEngine, row: Question, only_agreement: bool) -> tuple[bool, Measures]:
    """Answer a question: whether the answer is right, and its measures of confidence."""
    answer = Answer.of(engine.generate(row.prompt, row.params()))
    measures, text = agreements(row, answer), answer.text
    if not only_agreement:
        logprobs = {name: mean_logprob(engine, row, text, name) if text else None for name in engine.config.names}
        values = [value for value in logprobs.values() if value is not None]
        measures |= {f"mean log p of {name}": value for name, value in logprobs.items()}
        measures["mean of the members"] = statistics.mean(values) if values else None
    return is_right(row, text), measures


def is_right(row: Question, text: str) -> bool:
    return score(row, text)[RIGHT[str(row.kind)]] > 0


def stored_measures(run: RunFile, config: EnsembleConfig, row: Question) -> tuple[bool, Measures] | None:
    """The same for an answer in a comparison's file; None if the file has no answer to this question."""
    answer = run.answer(answer_key(config, row, None))
    if answer is None:
        return None
    measures = agreements(row, answer)
    members = {name: config.only([name]) for name in config.names}
    alone = {name: run.answer(answer_key(member, row, None)) for name, member in members.items()}
    same = agreement_of({name: {row.id: reply} for name, reply in alone.items() if reply is not None}, config.names)
    measures["members alone, words in common"] = same[row.id] / 100
    for name, member in members.items():
        keys = (sample_key(member, row, None, TEMPERATURE, seed) for seed in range(1, MOST_SAMPLES + 1))
        finals = [final_answer(row, sample.text) for key in keys if (sample := run.answer(key)) is not None]
        share = finals.count(final_answer(row, answer.text)) / len(finals) if finals else None
        measures[f"samples of {name} with this answer"] = share
    return is_right(row, answer.text), measures


def agreements(row: Question, answer: Answer) -> Measures:
    """The members' agreement on the answer, each value in [0, 1]."""
    share, lowest = answer.agreement or (None, None)
    facts = [share for _, _, kind, share in answer.differences if kind != "word"]
    measures: Measures = {
        "agreement": share,
        "agreement, lowest": lowest,
        "agreement, numbers and names": None if share is None else min(facts, default=1.0),
    }
    if row.kind == "number":
        measures["agreement, last number"] = last_number(answer)
    return measures


def last_number(answer: Answer) -> float | None:
    """The share of the votes for the last number; None if the answer has no number or no votes."""
    numbers = list(re.finditer(r"\d[\d.,]*", answer.text))
    if not numbers or answer.agreement is None:
        return None
    first, last = numbers[-1].span()
    return min((share for start, end, _, share in answer.differences if start < last and end > first), default=1.0)


def mean_logprob(engine: EnsembleEngine, row: Question, text: str, member: str) -> float | None:
    """The mean log p of an answer's tokens, verified by one member."""
    longest = len(engine.tokenize(text, members=[member])) + MORE
    params = SamplingParams(max_tokens=longest, grammar=Grammar.choice([text]), logprobs=True)
    scored = engine.generate(row.prompt, params, members=[member]).logprobs
    return statistics.mean(token.logprob for token in scored) if scored else None


def table_of(results: Sequence[tuple[bool, Measures]]) -> list[dict[str, Any]]:
    """A line for each measure: its rows, its AUROC and the interval; None if no answer is right, or none is wrong."""
    lines = []
    for name in results[0][1]:
        pairs = [(right, measures[name]) for right, measures in results if measures.get(name) is not None]
        right = [flag for flag, _ in pairs]
        numbers = [float(value) for _, value in pairs if value is not None]
        both = [[n for n, flag in zip(numbers, right, strict=True) if flag is group] for group in (True, False)]
        at = auroc(*both) if all(both) else None
        low, high = interval(numbers, right) if all(both) else (None, None)
        lines.append({"number": name, "rows": len(pairs), "right": sum(right), "auroc": at, "low": low, "high": high})
    return lines


def as_table(title: str, lines: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title)
    for column in ("measure", "rows", "AUROC", "95 %"):
        table.add_column(column)
    for line in lines:
        has_auroc = line["auroc"] is not None
        cells = (f"{line['auroc']:.3f}", f"[{line['low']:.2f}, {line['high']:.2f}]") if has_auroc else ("–", "–")
        table.add_row(line["number"], str(line["rows"]), *cells)
    return table


def measured(
    engine: EnsembleEngine, files: Sequence[Path], rows: int, tokens: int | None, together: int, only_agreement: bool
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Answer the rows of each file, and return a title and its lines."""
    for file in files:
        picked, began = read(file, rows, tokens), time.monotonic()
        with ThreadPoolExecutor(together) as pool:
            results = list(pool.map(lambda row: measures_of(engine, row, only_agreement), picked))
        each = (time.monotonic() - began) / len(picked)
        right = sum(right for right, _ in results)
        yield f"{file.stem}: {len(results)} rows, {right} answered right, {each:.1f} s a row", table_of(results)


def measured_before(run: RunFile, config: EnsembleConfig, files: Sequence[Path]) -> Iterator[tuple[str, list[Any]]]:
    """The same for the answers in a comparison's file."""
    for file in files:
        picked = [row for row in read_questions(file).questions if row.kind in RIGHT]
        results = [each for row in picked if (each := stored_measures(run, config, row)) is not None]
        right = sum(right for right, _ in results)
        lines = table_of(results) if results else []
        yield f"{file.stem}: {len(results)} rows, {right} answered right", [each for each in lines if each["rows"]]


@app.command()
def confidence(
    files: Annotated[list[Path], typer.Argument(help="files of rows")],
    rows: Annotated[int, typer.Option(help="number of rows of each file")] = 200,
    member: Annotated[list[str] | None, typer.Option(help="a model; default: the demo's members")] = None,
    config: Annotated[str | None, typer.Option(help="TOML file of an ensemble")] = None,
    run: Annotated[Path | None, typer.Option(help="read the answers from this file of `compare`")] = None,
    only_agreement: Annotated[bool, typer.Option(help="leave out log p, which needs another forward pass")] = False,
    tokens: Annotated[int | None, typer.Option(help="maximum tokens of an answer")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file")] = None,
    together: Annotated[int, typer.Option(help="concurrent rows")] = 8,
) -> None:
    """AUROC of the members' agreement, and of their log p."""
    report, ensemble = {}, chosen_ensemble(member, config)
    with ExitStack() as stack:
        if run is not None:
            tables = measured_before(stack.enter_context(RunFile(run)), ensemble, files)
        else:
            engine = stack.enter_context(EnsembleEngine(ensemble)).load()
            tables = measured(engine, files, rows, tokens, together, only_agreement)
        for title, lines in tables:
            Console().print(as_table(title, lines))
            report[title.partition(":")[0]] = lines
            if out is not None:
                out.write_text(json.dumps(report, indent=1) + "\n")


# ── suggested ensembles ───────────────────────────────────────────────────────────────────────────

FEWEST = 4
"""Minimum number of ensembles for a correlation: the order of three agrees by chance in one of six cases."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The predicted and the actual gain of an ensemble on a group of questions, in points."""

    group: str
    members: str
    rows: int
    gap: float
    added: float
    predicted: float
    gained: float


def outcomes_of(comparison: dict[str, Any]) -> list[Outcome]:
    """The outcomes in the output of `compare --json`: each group of questions by its main metric, and all together."""
    mains: dict[str, dict[str, Any]] = {}
    for title, column in comparison["columns"].items():
        mains.setdefault(title.partition(":")[0], column)
    if len(mains) == 2:  # "all" equals the only group
        del mains["all"]
    outcomes = []
    for name, column in mains.items():
        if (suggestion := column["suggested"]) is not None:
            parts = {part: suggestion[part]["mean"] for part in ("gap", "added", "predicted")}
            gained = column["differences"][ENSEMBLE]["mean"]
            outcomes.append(Outcome(name, " + ".join(suggestion["members"]), column["rows"], gained=gained, **parts))
    return outcomes


def rank_correlation(predicted: Sequence[float], gained: Sequence[float]) -> float | None:
    """Spearman's rank correlation, from -1 to 1; None for too few values, or if one of the two does not vary."""
    if len(gained) < FEWEST or len(set(predicted)) == 1 or len(set(gained)) == 1:
        return None
    rho = float(spearmanr(predicted, gained).statistic)
    return None if isnan(rho) else rho


def correlations(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """Predictor → its rank correlation with the gain. The gap counts negatively: a small gap predicts a large gain."""
    gained = [each.gained for each in outcomes]
    return {
        "predicted": rank_correlation([each.predicted for each in outcomes], gained),
        "gap": rank_correlation([-each.gap for each in outcomes], gained),
        "only others right": rank_correlation([each.added for each in outcomes], gained),
    }


@app.command()
def suggested(files: Annotated[list[Path], typer.Argument(help="output of `specfuse-llm compare --json`")]) -> None:
    """Print predicted and actual gains, and their correlations."""
    outcomes = [each for file in files for each in outcomes_of(json.loads(file.read_text("utf-8")))]
    table = Table("questions", "members", "rows", "gap", "only others right", "predicted", "gained")
    for each in outcomes:
        parts = (each.gap, each.added, each.predicted, each.gained)
        table.add_row(each.group, each.members, str(each.rows), *(f"{part:+.1f}" for part in parts))
    console = Console(width=140)
    console.print(table)
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for each in outcomes:
        groups[each.group].append(each)
    separate = [each for each in outcomes if each.group != "all"]  # "all" consists of the other groups
    for name, group in {"every group": separate, **(groups if len(groups) > 1 else {})}.items():
        rhos = correlations(group)
        texts = ", ".join(f"{key} {'–' if rho is None else f'{rho:+.2f}'}" for key, rho in rhos.items())
        console.print(f"{name}, {len(group)} ensembles: rank correlation with the gain: {texts}")


if __name__ == "__main__":
    app()
