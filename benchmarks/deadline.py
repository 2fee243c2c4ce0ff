"""How long an ensemble waits for its slowest member, with and without a round's deadline.

    python benchmarks/deadline.py [--rows N] [--tokens N] [--seconds S]
    python benchmarks/deadline.py --member MODEL --member FILE.gguf --member MODEL@http://HOST:PORT/v1 …

The demo pair: SmolLM2 here, Gemma in another process, whose stages are steady, begin three seconds late, or, at every
tenth, ten seconds. Or the named members, as slow as they are: a GGUF file runs on llama.cpp, a model with an address on
that server. Printed for each, with the defaults and `preset("fast")`, without and with `round_seconds`: median seconds
to the first words, tokens a second over all answers, and in which share of the rounds a member was late. The questions
are the questions of `specfuse-llm compare`.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from specfuse_shared import (
    EnsembleConfig,
    EnsembleEngine,
    EnsembleResult,
    SamplingParams,
    demo_members,
)
from specfuse_shared.cli.setup import member_of
from specfuse_shared.loading.progress import OnLoadProgress
from specfuse_shared.members.assembly import Assembly, assemble, distant_member
from specfuse_shared.members.loading import load_in_process
from specfuse_shared.members.pipe import PipedLane, serve_members
from specfuse_shared.members.stages import Close, StageRequest
from tests.support.slow_lane import SlowLane


@dataclass(frozen=True)
class Slowness:
    """Every `nth` stage begins `seconds` late."""

    title: str
    seconds: float = 0.0
    nth: int = 1
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def delay(self, request: StageRequest) -> float:
        return 0.0 if isinstance(request.op, Close) or next(self.numbers) % self.nth else self.seconds


WAYS = (Slowness("steady"), Slowness("3 s late", 3.0), Slowness("every tenth 10 s late", 10.0, 10))


class Mixed(EnsembleEngine):
    """The first member here, the second one in another process, with the `slowness`."""

    slowness = WAYS[0]

    def _assemble(self, on_progress: OnLoadProgress | None) -> Assembly:
        here, there = self.config.member_configs
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        context.Process(target=serve_members, args=(theirs, [there], "dynamic", 1), daemon=True).start()
        local = assemble([load_in_process(here)], self._metrics.forward)
        pipe = PipedLane(there.label, ours, self._metrics.forward)
        members = (*local.members, distant_member(there, pipe.members[0]))
        return Assembly(members, local.own, (SlowLane(pipe, lambda request: self.slowness.delay(request)),))


def main(
    member: Annotated[list[str] | None, typer.Option(help="a model, a GGUF file, or MODEL@http://…/v1")] = None,
    rows: Annotated[int, typer.Option(help="questions")] = 6,
    tokens: Annotated[int, typer.Option(help="most tokens of an answer")] = 40,
    seconds: Annotated[float, typer.Option(help="the deadline")] = 1.0,
) -> None:
    console = Console(width=110)
    lines = files("specfuse_shared.comparing").joinpath("own_questions.jsonl").read_text("utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines[:: max(1, len(lines) // rows)]][:rows]
    params = SamplingParams(max_tokens=tokens)
    members = [member_of(model, _here(model)) for model in member] if member else demo_members()
    table = Table(title=f"{rows} answers of up to {tokens} tokens, one at a time", title_justify="left")
    for head in ("members", "preset", "round_seconds", "first words", "tokens a second", "late rounds", "left"):
        table.add_column(head)
    with (EnsembleEngine if member else Mixed)(EnsembleConfig(members)) as engine:
        engine.generate(questions[-1], params)
        ways = (Slowness("as they are"),) if member else WAYS
        for slowness, preset, limit in itertools.product(ways, ("default", "fast"), (None, seconds)):
            if isinstance(engine, Mixed):
                engine.slowness = slowness
            engine.config = EnsembleConfig.preset(preset, members, round_seconds=limit)  # the same members
            reported = figures([engine.generate(question, params) for question in questions])
            table.add_row(slowness.title, preset, str(limit), *reported.values())
            console.print(slowness.title, preset, limit, dict(reported))
    console.print(table)


def _here(model: str) -> Mapping[str, str]:
    """Settings of a member that no server runs: on llama.cpp, or in float32."""
    return {"backend": "llama.cpp"} if model.endswith(".gguf") else {"dtype": "float32"}


def figures(results: Sequence[EnsembleResult]) -> Mapping[str, str]:
    first = statistics.median(result.first_segment_seconds or result.total_seconds for result in results)
    speed = sum(r.usage.completion_tokens for r in results) / sum(r.total_seconds for r in results)
    rounds = [record for result in results for record in result.rounds]
    late = sum(bool(record.absent) for record in rounds)
    left = sum(leaving.reason == "late" for record in rounds for leaving in record.exits)
    return {
        "first words": f"{first:.2f} s",
        "tokens a second": f"{speed:.1f}",
        "late rounds": f"{late / len(rounds):.0%}",
        "left": f"{left} of {len(results)}",
    }


if __name__ == "__main__":
    typer.run(main)
