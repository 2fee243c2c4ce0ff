"""Does the agreement of an answer tell right answers from wrong ones? Its AUROC beside the members' own mean log p.

    python benchmarks/confidence.py FILE.jsonl [--rows N] [--out FILE]

FILE holds questions on passages (`id, task "rag", prompt, references, context`), every row one line; an answer is right
if it holds a reference. The demo members, greedy, answers of at most 32 tokens. A member's mean log p of the ensemble's
answer is that of the answer given again, dictated, to this member alone. AUROC is the chance that a right answer has
the higher number than a wrong one (one half: it tells nothing), with its bootstrap interval over the rows (95 %).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from quality_rows import question
from rich.console import Console
from rich.table import Table

from specfuse_shared import EnsembleConfig, EnsembleEngine, Grammar, SamplingParams, demo_members
from specfuse_shared.comparing.metrics import score

BUDGET, ROOM = 32, 16
"""Most tokens of an answer, and how many more it may take where it is dictated to a member with other tokens."""
SAMPLES = 2000
Told = dict[str, float | None]


def auroc(right: Sequence[float], wrong: Sequence[float]) -> float:
    """The chance that one of the first numbers is higher than one of the second; equal ones count half."""
    first, second = np.asarray(right)[:, None], np.asarray(wrong)[None, :]
    return float(np.mean((first > second) + 0.5 * (first == second)))


def interval(numbers: Sequence[float], right: Sequence[bool], seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval (95 %) of the AUROC over the rows."""
    chance, found = np.random.default_rng(seed), []
    values, flags = np.asarray(numbers), np.asarray(right)
    for _ in range(SAMPLES):
        drawn = chance.integers(0, len(values), len(values))
        if 0 < flags[drawn].sum() < len(drawn):
            found.append(auroc(values[drawn][flags[drawn]], values[drawn][~flags[drawn]]))
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def asked(row: Mapping[str, Any]) -> str:
    return question(row, "rag", BUDGET).text


def told_of(engine: EnsembleEngine, row: Mapping[str, Any]) -> tuple[bool, Told]:
    """Whether the answer to a row is right, and what might have told so."""
    result = engine.generate(asked(row), SamplingParams(max_tokens=BUDGET))
    text, told = result.text, {"agreement": result.agreement.share if result.agreement else None}
    for name in engine.config.names:
        told[f"mean log p of {name}"] = mean_logprob(engine, row, text, name) if text else None
    own = [value for name, value in told.items() if name != "agreement" and value is not None]
    is_right = score(question(row, "rag", BUDGET), text)["contains"] > 0
    return is_right, {**told, "mean of both": statistics.mean(own) if own else None}


def mean_logprob(engine: EnsembleEngine, row: Mapping[str, Any], text: str, member: str) -> float | None:
    """Of an answer's tokens in the eyes of one member."""
    room = len(engine.tokenize(text, members=[member])) + ROOM
    params = SamplingParams(max_tokens=room, grammar=Grammar.choice([text]), logprobs=True)
    scored = engine.generate(asked(row), params, members=[member]).logprobs
    return statistics.mean(token.logprob for token in scored) if scored else None


def table_of(found: Sequence[tuple[bool, Told]]) -> list[dict[str, Any]]:
    """A line for each number: over how many rows, their AUROC and its interval."""
    lines = []
    for name in found[0][1]:
        known = [(right, told[name]) for right, told in found if told[name] is not None]
        right = [flag for flag, _ in known]
        numbers = [float(value) for _, value in known if value is not None]
        both = [[n for n, flag in zip(numbers, right, strict=True) if flag is wanted] for wanted in (True, False)]
        at = auroc(*both)
        low, high = interval(numbers, right)
        lines.append({"number": name, "rows": len(known), "right": sum(right), "auroc": at, "low": low, "high": high})
    return lines


def main(
    file: Annotated[Path, typer.Argument(help="rows")],
    rows: Annotated[int, typer.Option(help="the first so many")] = 200,
    out: Annotated[Path | None, typer.Option(help="JSON file")] = None,
    together: Annotated[int, typer.Option(help="rows at a time")] = 8,
) -> None:
    picked = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:rows]]
    with EnsembleEngine(EnsembleConfig(demo_members())).load() as engine, ThreadPoolExecutor(together) as pool:
        found = list(pool.map(lambda row: told_of(engine, row), picked))
    lines = table_of(found)
    table = Table(title=f"AUROC over {len(found)} rows, {sum(right for right, _ in found)} answered right")
    for column in ("number", "rows", "AUROC", "95 %"):
        table.add_column(column)
    for line in lines:
        bounds = f"[{line['low']:.2f}, {line['high']:.2f}]"
        table.add_row(line["number"], str(line["rows"]), f"{line['auroc']:.3f}", bounds)
    Console().print(table)
    if out is not None:
        out.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
