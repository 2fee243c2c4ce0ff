"""The first election of each answer, held again under other policies: no model runs for that.

    python benchmarks/elections.py collect FILE --data DIR [--task rag] [--rows N] [--half choose] [--member PATH]…
    python benchmarks/elections.py table FILE [--metric f1]

`collect` has the demo's two members and the given ones (hub ids, folders, GGUF files) draft a first segment of twenty
tokens for each row, all drafts verified by all, and keeps every log p. `table` holds the election again for each pair,
trio and for all of them: how votes are added up, and what each member's counts. Told: the mean score of the chosen
candidate as an answer, its difference to the default with its 95 % interval, and each member alone.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from quality_rows import read_rows
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, demo_members
from specfuse_shared.comparing import Question
from specfuse_shared.comparing.intervals import difference
from specfuse_shared.comparing.metrics import score
from specfuse_shared.policies import (
    AggregatePolicy,
    CandidateLogprobs,
    Electorate,
    Matrix,
    SecondedMean,
    Stretch,
    geometric_mean,
    weighted_mean,
)

SEGMENT = 20
app = typer.Typer(help=__doc__, add_completion=False)


@dataclass
class Recording:
    """The default score; it keeps what it was asked to score: for each verifier, all candidates."""

    seen: list[Sequence[CandidateLogprobs]] = field(default_factory=list)

    def __call__(self, candidates: Sequence[CandidateLogprobs]) -> list[float]:
        self.seen.append(candidates)
        return Stretch()(candidates)


@dataclass(frozen=True)
class Ballot:
    """A first round: its members and their sizes; of each candidate its authors and its metrics as an answer; and
    `table[j][i]`, candidate i in the eyes of member j (empty where all said the same)."""

    members: Sequence[str]
    sizes: Sequence[int]
    authors: Sequence[Sequence[str]]
    metrics: Sequence[Mapping[str, float]]
    table: Sequence[Sequence[CandidateLogprobs]]

    def own(self, name: str) -> int | None:
        """The number of a member's candidate; None if it said nothing."""
        return next((i for i, names in enumerate(self.authors) if name in names), None)

    def chosen(self, some: Sequence[str], aggregate: AggregatePolicy, power: float, metric: str) -> float:
        """The metric of what these members choose; a member's vote counts its parameters to this power."""
        left = [i for i, names in enumerate(self.authors) if set(names) & set(some)]
        if len(left) < 2:
            return self.metrics[left[0]][metric] if left else 0.0
        voters = [self.members.index(name) for name in some]
        shares = [self.sizes[j] ** power for j in voters]
        rows = [[self.table[j][i] for i in left] for j in voters]
        authors = [[some.index(name) for name in self.authors[i] if name in some] for i in left]
        electorate = Electorate(Stretch(), aggregate, [share / sum(shares) for share in shares])
        return self.metrics[left[electorate.elect(rows, authors, [False] * len(left)).winner]][metric]


def confidence(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """Weights by consistency and confidence within a round (after CoRE, arXiv 2510.13855)."""
    shares = [[score / (sum(row) or 1.0) for score in row] for row in scores]
    mean = [statistics.mean(column) for column in zip(*shares, strict=True)]
    least, votes = math.exp(-2), [0.0] * len(mean)
    for weight, row in zip(weights, shares, strict=True):
        near = [(math.exp(-2 * abs(p - m)) - least) / (1 - least) for p, m in zip(row, mean, strict=True)]
        entropy = -math.fsum(p * math.log(p) for p in row if p > 0)
        trust = min(10.0, math.fsum(near) / (entropy + 0.1))
        votes = [vote + weight * trust * n * p for vote, n, p in zip(votes, near, row, strict=True)]
    return votes


def shares(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """Every verifier shares one vote out among the candidates."""
    return weighted_mean([[score / (sum(row) or 1.0) for score in row] for row in scores], weights, drafters)


def own_drafts(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """A vote on keys: what a member drafted has its vote, as far as it is sure of it, and nothing else has."""
    return [math.fsum(weights[j] * scores[j][i] for j in authors) for i, authors in enumerate(drafters)]


POLICIES: Mapping[str, tuple[AggregatePolicy, float]] = {
    "seconded, size (the default but for choices)": (SecondedMean(), 1.0),
    "seconded, equal": (SecondedMean(), 0.0),
    "seconded, √size": (SecondedMean(), 0.5),
    "weighted mean, equal": (weighted_mean, 0.0),
    "weighted mean, size": (weighted_mean, 1.0),
    "geometric mean, equal": (geometric_mean, 0.0),
    "geometric mean, size": (geometric_mean, 1.0),
    "one vote to share out, size (for choices the default)": (shares, 1.0),
    "own drafts alone, size": (own_drafts, 1.0),
    "own drafts alone, equal": (own_drafts, 0.0),
    "confidence and consistency, equal": (confidence, 0.0),
    "confidence and consistency, size": (confidence, 1.0),
}


@app.command()
def collect(
    file: Path,
    data: Annotated[Path, typer.Option(help="folder of JSONL files")],
    task: Annotated[str, typer.Option(help="a task, by name")] = "rag",
    rows: Annotated[int, typer.Option(help="at most this many")] = 75,
    half: Annotated[str, typer.Option(help="choose, confirm or all")] = "choose",
    member: Annotated[list[str], typer.Option(help="a further member")] = [],  # noqa: B006
) -> None:
    """Draft and verify first segments; one line of JSON for each row."""
    recording = Recording()
    members = [*demo_members(), *(MemberConfig(name) for name in member)]
    config = EnsembleConfig(members, score=recording, first_segment_tokens=SEGMENT, early_margin=0)
    with EnsembleEngine(config) as engine, file.open("w", encoding="utf-8") as out:
        sizes = [report.parameters for report in engine.describe()]
        for question in track(read_rows(data, [task], half, rows), task):
            out.write(json.dumps(asdict(ballot(engine, recording, question, sizes))) + "\n")
            out.flush()


def ballot(engine: EnsembleEngine, recording: Recording, question: Question, sizes: Sequence[int]) -> Ballot:
    recording.seen.clear()
    first = engine.generate(question.prompt, replace(question.params(), max_tokens=SEGMENT)).rounds[0]
    return Ballot(
        members=first.active,
        sizes=sizes,
        authors=[candidate.drafters for candidate in first.candidates],
        metrics=[score(question, candidate.text) for candidate in first.candidates],
        table=recording.seen[: len(first.active)] if first.verified else [],
    )


@app.command()
def table(
    file: Path, metric: Annotated[str, typer.Option(help="a metric of the task: f1, contains, rougeL")] = "f1"
) -> None:
    """Hold the elections again."""
    ballots = [_ballot_of(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    names, console = list(ballots[0].members), Console(width=150)
    alone = {name: [_alone(each, name, metric) for each in ballots] for name in names}
    console.print(
        f"{len(ballots)} rows; alone: " + ", ".join(f"{n} {statistics.mean(v):.1f}" for n, v in alone.items())
    )
    for some in _ensembles(names):
        lines = Table(title=" + ".join(some), title_justify="left")
        for head in ("votes", metric, "to the default", "to the best member"):
            lines.add_column(head)
        best = max((alone[name] for name in some), key=statistics.mean)
        found = {name: [each.chosen(some, *policy, metric) for each in ballots] for name, policy in POLICIES.items()}
        default = next(iter(found.values()))
        for name, values in found.items():
            gap = "" if values is default else str(difference(values, default))
            lines.add_row(name, f"{statistics.mean(values):.1f}", gap, str(difference(values, best)))
        console.print(lines)


def _ensembles(names: Sequence[str]) -> Iterator[list[str]]:
    for size in range(2, len(names) + 1):
        yield from map(list, itertools.combinations(names, size))


def _alone(found: Ballot, name: str, metric: str) -> float:
    own = found.own(name)
    return 0.0 if own is None else found.metrics[own][metric]


def _ballot_of(line: dict[str, Any]) -> Ballot:
    as_seen: Callable[[dict[str, Any]], CandidateLogprobs] = lambda seen: CandidateLogprobs(  # noqa: E731
        seen["text"], seen["ends"], tuple(seen["logprobs"]), tuple(seen["token_bytes"])
    )
    return replace(Ballot(**line), table=[[as_seen(seen) for seen in row] for row in line["table"]])


if __name__ == "__main__":
    app()
