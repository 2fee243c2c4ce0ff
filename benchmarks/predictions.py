"""Does agreement tell right answers from wrong ones, and do members alone tell what their ensemble gains?

    python benchmarks/predictions.py confidence FILE.jsonl… [--rows N] [--member MODEL]… [--only-agreement] [--out FILE]
    python benchmarks/predictions.py confidence FILE.jsonl… --run compare.jsonl [--member MODEL]… [--config FILE]

    specfuse-llm compare --members A --members B --questions FILE --run A-B.jsonl --json > A-B.json    # each pair
    python benchmarks/predictions.py suggested A-B.json A-C.json …

`confidence`: AUROC of what the rounds say, beside the members' own mean log p. Files have the names of the quality
benchmark (`quality_rows.TASKS`: squad, nq_open, gsm8k, arc_challenge, rag_en); others hold questions on passages
(`id, task "rag", prompt, references, context`), a row a line. An answer is right if it holds a reference, ends with the
right number or is the right letter. Greedy, as many tokens as there.

From the rounds, without another forward: the agreement over all characters; its lowest place; that of the number or
name on which members agree least; for numbers, that of the last one. A member's mean log p of the ensemble's answer is
that of the answer given again, dictated, to this member alone. AUROC is the chance that a right answer has the higher
number than a wrong one (one half: it tells nothing), with its bootstrap interval over the rows (95 %).

With `--run`, nobody is asked: the answers are those that `specfuse-llm compare --questions FILE --run compare.jsonl`
kept. Instead of log p there are two rivals: how many words the members' answers alone have in common, and, with
`--equal-compute`, the share of a member's samples that say what the ensemble says.

`suggested`: Spearman's rank correlation over runs of `compare`, each in a file. Told, for each column of it by the
metric that counts: the gap of the members, what was predicted, and what the ensemble gained to its best member; then
how well the order of the predictions, of the gaps and of what only others know agrees with the order of the gains.
Columns of one set of questions are correlated by themselves, too.
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
"""Tokens that a dictated answer may take beyond its own in another member's encoding."""
SAMPLES = 2000
RIGHT = {"short": "contains", "number": "exact", "choice": "right"}
"""Kind of a question → the metric that says whether an answer is right."""
Told = dict[str, float | None]


def auroc(right: Sequence[float], wrong: Sequence[float]) -> float:
    """The chance that one of the first numbers is higher than one of the second; equal ones count half."""
    first, second = np.asarray(right)[:, None], np.asarray(wrong)[None, :]
    return float(np.mean((first > second) + 0.5 * (first == second)))


def interval(numbers: Sequence[float], right: Sequence[bool], seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval (95 %) of the AUROC over the rows; all of it where all answers are right, or all wrong."""
    chance, found = np.random.default_rng(seed), []
    values, flags = np.asarray(numbers), np.asarray(right)
    for _ in range(SAMPLES):
        drawn = chance.integers(0, len(values), len(values))
        if 0 < flags[drawn].sum() < len(drawn):
            found.append(auroc(values[drawn][flags[drawn]], values[drawn][~flags[drawn]]))
    if not found:
        return 0.0, 1.0
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def read(file: Path, rows: int, tokens: int | None) -> list[Question]:
    """The first rows of a file, as the quality benchmark asks them."""
    task = next((task for task, name in TASKS.items() if name == file.stem), "rag")
    lines = file.read_text(encoding="utf-8").splitlines()[:rows]
    return [question(json.loads(line), task, min(BUDGET[task], tokens or BUDGET[task])) for line in lines]


def told_of(engine: EnsembleEngine, asked: Question, only_agreement: bool) -> tuple[bool, Told]:
    """Whether the answer to a question is right, and what might have told so."""
    answer = Answer.of(engine.generate(asked.prompt, asked.params()))
    told, text = agreements(asked, answer), answer.text
    if not only_agreement:
        own = {name: mean_logprob(engine, asked, text, name) if text else None for name in engine.config.names}
        known = [value for value in own.values() if value is not None]
        told |= {f"mean log p of {name}": value for name, value in own.items()}
        told["mean of the members"] = statistics.mean(known) if known else None
    return is_right(asked, text), told


def is_right(asked: Question, text: str) -> bool:
    return score(asked, text)[RIGHT[str(asked.kind)]] > 0


def kept(run: RunFile, config: EnsembleConfig, asked: Question) -> tuple[bool, Told] | None:
    """The same of an answer that a comparison has kept; None where it has none."""
    answer = run.answer(answer_key(config, asked, None))
    if answer is None:
        return None
    told = agreements(asked, answer)
    members = {name: config.only([name]) for name in config.names}
    alone = {name: run.answer(answer_key(member, asked, None)) for name, member in members.items()}
    same = agreement_of({name: {asked.id: own} for name, own in alone.items() if own is not None}, config.names)
    told["members alone, words in common"] = same[asked.id] / 100
    for name, member in members.items():
        keys = (sample_key(member, asked, None, TEMPERATURE, seed) for seed in range(1, MOST_SAMPLES + 1))
        said = [final_answer(asked, sample.text) for key in keys if (sample := run.answer(key)) is not None]
        share = said.count(final_answer(asked, answer.text)) / len(said) if said else None
        told[f"samples of {name} that say so"] = share
    return is_right(asked, answer.text), told


def agreements(asked: Question, answer: Answer) -> Told:
    """What the rounds say, each in [0, 1]."""
    share, lowest = answer.agreement or (None, None)
    facts = [share for _, _, kind, share in answer.differences if kind != "word"]
    told: Told = {
        "agreement": share,
        "agreement, lowest place": lowest,
        "agreement, numbers and names": None if share is None else min(facts, default=1.0),
    }
    if asked.kind == "number":
        told["agreement, last number"] = last_number(answer)
    return told


def last_number(answer: Answer) -> float | None:
    """The share of the votes for the last number; None where there is none, or nothing is known."""
    numbers = list(re.finditer(r"\d[\d.,]*", answer.text))
    if not numbers or answer.agreement is None:
        return None
    first, last = numbers[-1].span()
    return min((share for start, end, _, share in answer.differences if start < last and end > first), default=1.0)


def mean_logprob(engine: EnsembleEngine, asked: Question, text: str, member: str) -> float | None:
    """Of an answer's tokens in the eyes of one member."""
    longest = len(engine.tokenize(text, members=[member])) + MORE
    params = SamplingParams(max_tokens=longest, grammar=Grammar.choice([text]), logprobs=True)
    scored = engine.generate(asked.prompt, params, members=[member]).logprobs
    return statistics.mean(token.logprob for token in scored) if scored else None


def table_of(found: Sequence[tuple[bool, Told]]) -> list[dict[str, Any]]:
    """A line for each number: over how many rows, their AUROC and its interval; None where one side has no row."""
    lines = []
    for name in found[0][1]:
        known = [(right, told[name]) for right, told in found if told.get(name) is not None]
        right = [flag for flag, _ in known]
        numbers = [float(value) for _, value in known if value is not None]
        both = [[n for n, flag in zip(numbers, right, strict=True) if flag is wanted] for wanted in (True, False)]
        at = auroc(*both) if all(both) else None
        low, high = interval(numbers, right) if all(both) else (None, None)
        lines.append({"number": name, "rows": len(known), "right": sum(right), "auroc": at, "low": low, "high": high})
    return lines


def shown(title: str, lines: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title)
    for column in ("number", "rows", "AUROC", "95 %"):
        table.add_column(column)
    for line in lines:
        known = line["auroc"] is not None
        cells = (f"{line['auroc']:.3f}", f"[{line['low']:.2f}, {line['high']:.2f}]") if known else ("–", "–")
        table.add_row(line["number"], str(line["rows"]), *cells)
    return table


def measured(
    engine: EnsembleEngine, files: Sequence[Path], rows: int, tokens: int | None, together: int, only_agreement: bool
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Of each file a title and its lines."""
    for file in files:
        picked, began = read(file, rows, tokens), time.monotonic()
        with ThreadPoolExecutor(together) as pool:
            found = list(pool.map(lambda asked: told_of(engine, asked, only_agreement), picked))
        each = (time.monotonic() - began) / len(picked)
        right = sum(right for right, _ in found)
        yield f"{file.stem}: {len(found)} rows, {right} answered right, {each:.1f} s a row", table_of(found)


def measured_before(run: RunFile, config: EnsembleConfig, files: Sequence[Path]) -> Iterator[tuple[str, list[Any]]]:
    """The same of answers that a comparison has kept."""
    for file in files:
        picked = read_questions(file).questions
        found = [each for asked in picked if asked.kind in RIGHT and (each := kept(run, config, asked)) is not None]
        right = sum(right for right, _ in found)
        lines = table_of(found) if found else []
        yield f"{file.stem}: {len(found)} rows, {right} answered right", [each for each in lines if each["rows"]]


@app.command()
def confidence(
    files: Annotated[list[Path], typer.Argument(help="rows")],
    rows: Annotated[int, typer.Option(help="the first so many of each file")] = 200,
    member: Annotated[list[str] | None, typer.Option(help="a model; the demo's members without any")] = None,
    config: Annotated[str | None, typer.Option(help="TOML file of an ensemble")] = None,
    run: Annotated[Path | None, typer.Option(help="file of a comparison; without, members are asked")] = None,
    only_agreement: Annotated[bool, typer.Option(help="no log p, which reads each answer again")] = False,
    tokens: Annotated[int | None, typer.Option(help="at most so many tokens an answer")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file")] = None,
    together: Annotated[int, typer.Option(help="rows at a time")] = 8,
) -> None:
    """AUROC of the agreement of members, and of their log p."""
    told, ensemble = {}, chosen_ensemble(member, config)
    with ExitStack() as stack:
        if run is not None:
            found = measured_before(stack.enter_context(RunFile(run)), ensemble, files)
        else:
            engine = stack.enter_context(EnsembleEngine(ensemble)).load()
            found = measured(engine, files, rows, tokens, together, only_agreement)
        for title, lines in found:
            Console().print(shown(title, lines))
            told[title.partition(":")[0]] = lines
            if out is not None:
                out.write_text(json.dumps(told, indent=1) + "\n")


# ── suggested ensembles ───────────────────────────────────────────────────────────────────────────

FEWEST = 4
"""Ensembles whose order says anything: three agree by chance once in six times."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was predicted of an ensemble on a group of questions, and what it gained, in points."""

    group: str
    members: str
    rows: int
    gap: float
    added: float
    predicted: float
    gained: float


def outcomes_of(comparison: dict[str, Any]) -> list[Outcome]:
    """Of what `compare --json` printed: its groups of questions by the metric that counts, and all together."""
    mains: dict[str, dict[str, Any]] = {}
    for title, column in comparison["columns"].items():
        mains.setdefault(title.partition(":")[0], column)
    if len(mains) == 2:  # "all" is the one group
        del mains["all"]
    found = []
    for name, column in mains.items():
        if (told := column["suggested"]) is not None:
            parts = {part: told[part]["mean"] for part in ("gap", "added", "predicted")}
            gained = column["differences"][ENSEMBLE]["mean"]
            found.append(Outcome(name, " + ".join(told["members"]), column["rows"], gained=gained, **parts))
    return found


def rank_correlation(predicted: Sequence[float], gained: Sequence[float]) -> float | None:
    """Spearman's, from -1 to 1; None where there are too few or one of the two does not vary."""
    if len(gained) < FEWEST or len(set(predicted)) == 1 or len(set(gained)) == 1:
        return None
    found = float(spearmanr(predicted, gained).statistic)
    return None if isnan(found) else found


def correlations(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """What was told before → its rank correlation with the gain; a small gap should go with a large gain."""
    gained = [each.gained for each in outcomes]
    return {
        "predicted": rank_correlation([each.predicted for each in outcomes], gained),
        "gap": rank_correlation([-each.gap for each in outcomes], gained),
        "only others right": rank_correlation([each.added for each in outcomes], gained),
    }


@app.command()
def suggested(files: Annotated[list[Path], typer.Argument(help="What `specfuse-llm compare --json` printed.")]) -> None:
    """Print what was predicted beside what was gained, and the correlations."""
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
    apart = [each for each in outcomes if each.group != "all"]  # that one is made of the others
    for name, own in {"every group": apart, **(groups if len(groups) > 1 else {})}.items():
        rho = {what: "–" if value is None else f"{value:+.2f}" for what, value in correlations(own).items()}
        told = ", ".join(f"{what} {value}" for what, value in rho.items())
        console.print(f"{name}, {len(own)} ensembles: rank correlation with the gain: {told}")


if __name__ == "__main__":
    app()
