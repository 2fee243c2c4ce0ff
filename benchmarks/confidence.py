"""Does low agreement of members tell wrong answers from right ones? AUROC of what the rounds say, beside the members'
own mean log p.

    python benchmarks/confidence.py FILE.jsonl… [--rows N] [--member MODEL]… [--only-agreement] [--out FILE]

Files have the names of the quality benchmark (`quality_rows.TASKS`: squad, nq_open, gsm8k, arc_challenge, rag_en);
others hold questions on passages (`id, task "rag", prompt, references, context`), a row a line. An answer is right
if it holds a reference, ends with the right number or is the right letter. Greedy, as many tokens as there.

From the rounds, without another forward: the agreement over all characters; its lowest place; that of the number or
name on which members agree least; for numbers, that of the last one. A member's mean log p of the ensemble's answer is
that of the answer given again, dictated, to this member alone. AUROC is the chance that a right answer has the higher
number than a wrong one (one half: it tells nothing), with its bootstrap interval over the rows (95 %).
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from quality_rows import BUDGET, TASKS, question
from rich.console import Console
from rich.table import Table

from specfuse_shared import EnsembleConfig, EnsembleEngine, EnsembleResult, Grammar, SamplingParams, demo_members
from specfuse_shared.comparing import Question
from specfuse_shared.comparing.metrics import score

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
    result = engine.generate(asked.prompt, asked.params())
    told, text = agreements(asked, result), result.text
    if not only_agreement:
        own = {name: mean_logprob(engine, asked, text, name) if text else None for name in engine.config.names}
        known = [value for value in own.values() if value is not None]
        told |= {f"mean log p of {name}": value for name, value in own.items()}
        told["mean of the members"] = statistics.mean(known) if known else None
    return score(asked, text)[RIGHT[str(asked.kind)]] > 0, told


def agreements(asked: Question, result: EnsembleResult) -> Told:
    """What the rounds say, each in [0, 1]."""
    agreement = result.agreement
    facts = [each.share for each in result.differences if each.kind != "word"]
    told: Told = {
        "agreement": agreement.share if agreement else None,
        "agreement, lowest place": min((place.share for place in agreement.places), default=1.0) if agreement else None,
        "agreement, numbers and names": min(facts, default=1.0) if agreement else None,
    }
    if asked.kind == "number":
        told["agreement, last number"] = last_number(result)
    return told


def last_number(result: EnsembleResult) -> float | None:
    """The share of the votes for the last number; None where there is none, or nothing is known."""
    numbers = list(re.finditer(r"\d[\d.,]*", result.text))
    if not numbers or result.agreement is None:
        return None
    start, end = numbers[-1].span()
    return min((each.share for each in result.differences if each.start < end and each.end > start), default=1.0)


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


def main(
    files: Annotated[list[Path], typer.Argument(help="rows")],
    rows: Annotated[int, typer.Option(help="the first so many of each file")] = 200,
    member: Annotated[list[str] | None, typer.Option(help="a model; the demo's members without any")] = None,
    only_agreement: Annotated[bool, typer.Option(help="no log p, which reads each answer again")] = False,
    tokens: Annotated[int | None, typer.Option(help="at most so many tokens an answer")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file")] = None,
    together: Annotated[int, typer.Option(help="rows at a time")] = 8,
) -> None:
    told = {}
    with EnsembleEngine(EnsembleConfig(member or demo_members())).load() as engine:
        for title, lines in measured(engine, files, rows, tokens, together, only_agreement):
            Console().print(shown(title, lines))
            told[title.partition(":")[0]] = lines
            if out is not None:
                out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
