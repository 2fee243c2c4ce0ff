"""How early is the first segment clear? The vote on the beginnings of its candidates beside the vote on all of them.

    python benchmarks/early.py --data DIR [--rows N] [--tasks NAME]…

The demo's pair drafts a first segment of twenty tokens. Each election is held again over the first five and ten tokens
of each draft. For margins between the two votes: how many first rounds with two candidates are that clear, how many of
them go to the winner of the whole, and what score the answer's first segment would have if it were decided there.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from quality_rows import read_rows
from rich.console import Console
from rich.table import Table

from specfuse_shared import EnsembleConfig, EnsembleEngine, SamplingParams, demo_members
from specfuse_shared.comparing import Question
from specfuse_shared.comparing.metrics import score
from specfuse_shared.policies import CandidateLogprobs, Electorate, ScorePolicy

SEGMENT, LOOKS, MARGINS = 20, (5, 10), (1.0, 2.0, 4.0, 8.0)
METRICS = {"open": "rougeL", "instruct": "rougeL", "rag": "f1", "rag-sentence": "f1"}


@dataclass
class Recording:
    """A score policy that keeps what it was asked to score: for each verifier, all candidates."""

    policy: ScorePolicy
    seen: list[Sequence[CandidateLogprobs]] = field(default_factory=list)

    def __call__(self, candidates: Sequence[CandidateLogprobs]) -> list[float]:
        self.seen.append(candidates)
        return list(self.policy(candidates))


@dataclass(frozen=True)
class Contest:
    """A first round with two candidates: their scores as answers, who won, and at each look who led by what factor
    (none where the drafts were the same so far)."""

    scores: tuple[float, float]
    winner: int
    looks: dict[int, tuple[int, float] | None]


def beginning(candidate: CandidateLogprobs, size: int) -> CandidateLogprobs:
    """The first `size` bytes of a candidate; a token across the border counts by its share."""
    whole = candidate.text.encode()
    if size >= len(whole):
        return candidate
    count = len(candidate.logprobs) - candidate.ends
    at, logprobs, sizes = min(0, len(whole) - sum(candidate.token_bytes[:count])), list[float](), list[int]()
    for logprob, own in zip(candidate.logprobs[:count], candidate.token_bytes, strict=False):
        if at >= size:
            break
        taken = min(own, size - at)
        logprobs.append(logprob * taken / own)
        sizes.append(taken)
        at += taken
    return CandidateLogprobs(whole[:size].decode(errors="ignore"), False, tuple(logprobs), tuple(sizes))


def look(table: Sequence[Sequence[CandidateLogprobs]], electorate: Electorate, tokens: int) -> tuple[int, float] | None:
    """Who leads after so many of each drafter's own tokens, and by what factor. Verifier i drafted candidate i."""
    sizes = [sum(table[i][i].token_bytes[:tokens]) for i in range(2)]
    rows = [[beginning(candidate, size) for candidate, size in zip(row, sizes, strict=True)] for row in table]
    if rows[0][0].text == rows[0][1].text:
        return None
    votes = electorate.elect(rows, [[0], [1]], [False, False]).votes
    leads = int(votes[1] > votes[0])
    return leads, votes[leads] / max(votes[1 - leads], 1e-12)


def contest(engine: EnsembleEngine, recording: Recording, question: Question, metric: str) -> Contest | None:
    """The first round of an answer; None if the members said the same."""
    recording.seen.clear()
    first = engine.generate(question.prompt, SamplingParams(max_tokens=SEGMENT)).rounds[0]
    if len(first.candidates) < 2 or len(recording.seen) < 2:
        return None
    drafters = [candidate.drafters[0] for candidate in first.candidates]
    table = [recording.seen[first.active.index(name)] for name in drafters]
    weights = [first.weights[name] for name in drafters]
    electorate = Electorate(recording.policy, engine.config.aggregate_policy(), weights)
    scores = [score(question, candidate.text)[metric] for candidate in first.candidates]
    looks = {tokens: look(table, electorate, tokens) for tokens in LOOKS}
    return Contest((scores[0], scores[1]), drafters.index(first.winner), looks)


def lines_of(contests: Sequence[Contest]) -> list[list[str]]:
    lines = []
    whole = statistics.mean(each.scores[each.winner] for each in contests)
    for tokens in LOOKS:
        for margin in MARGINS:
            early = [
                found[0] if (found := each.looks[tokens]) is not None and found[1] >= margin else None
                for each in contests
            ]
            clear = [(own, each.winner) for own, each in zip(early, contests, strict=True) if own is not None]
            picked = [
                each.scores[each.winner if own is None else own] for own, each in zip(early, contests, strict=True)
            ]
            same = sum(own == winner for own, winner in clear)
            share = f"{100 * len(clear) / len(contests):.0f} %"
            lines.append([
                str(tokens), f"{margin:g}", share, f"{same} of {len(clear)}",
                f"{statistics.mean(picked):.1f}", f"{whole:.1f}",
            ])  # fmt: skip
    return lines


def main(
    data: Annotated[Path, typer.Option(help="folder of JSONL files")],
    rows: Annotated[int, typer.Option(help="at most this many of each task")] = 60,
    tasks: Annotated[list[str], typer.Option(help="tasks, by name")] = ["open", "rag", "rag-sentence"],  # noqa: B006
) -> None:
    config = EnsembleConfig(demo_members(), first_segment_tokens=SEGMENT, early_margin=0)
    recording = Recording(config.score_policy())
    console = Console(width=120)
    with EnsembleEngine(replace(config, score=recording)) as engine:
        for task in tasks:
            asked = read_rows(data, [task], "choose", rows)
            found = [contest(engine, recording, question, METRICS[task]) for question in asked]
            contests = [each for each in found if each is not None]
            table = Table(title=f"{task}: {len(contests)} first rounds with two candidates, of {len(asked)}")
            for name in ("after tokens", "margin", "clear", "same winner", METRICS[task], "decided at the end"):
                table.add_column(name)
            for line in lines_of(contests):
                table.add_row(*line)
            console.print(table)


if __name__ == "__main__":
    typer.run(main)
