"""Does what members say alone tell what their ensemble gains? Spearman's rank correlation over runs that had both.

    specfuse-llm compare --members A --members B --questions FILE --run A-B.jsonl --json > A-B.json    # each pair
    python benchmarks/suggested.py A-B.json A-C.json …

Each file is a comparison. Told, for each column of it by the metric that counts: the gap of the members, what was
predicted, and what the ensemble gained to its best member; then how well the order of the predictions, of the gaps and
of what only others know agrees with the order of the gains. Columns of one set of questions are correlated by
themselves, too.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from specfuse_shared.comparing import ENSEMBLE

FEWEST = 4
"""Ensembles whose order says anything: three agree by chance once in six times."""
app = typer.Typer(help=__doc__, add_completion=False)


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
def main(files: Annotated[list[Path], typer.Argument(help="What `specfuse-llm compare --json` printed.")]) -> None:
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
