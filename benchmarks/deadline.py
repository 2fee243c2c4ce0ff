"""How long a mixed ensemble waits for its slowest member, with and without a round's deadline.

    python benchmarks/deadline.py FOLDER [--rows N] [--tokens N] [--seconds S]

The demo pair answers here, beside a third member: the model of FOLDER (Hugging Face) behind the small server of the
tests, which is steady, takes a second more for each request, or hangs at every tenth. Told for each, with the defaults
and `preset("fast")`, without and with `round_seconds`: median seconds to the first words, tokens a second over all
answers, and in which share of the rounds the third member was late. Questions are those of `specfuse-llm compare`.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from specfuse_shared import EnsembleConfig, EnsembleEngine, EnsembleResult, MemberConfig, SamplingParams, demo_members

SERVED = "behind a server"


@dataclass(frozen=True)
class Slowness:
    """Every `nth` request of the server takes so many `seconds` more."""

    title: str
    seconds: float = 0.0
    nth: int = 1


STEADY, *_ = WAYS = (
    Slowness("steady"),
    Slowness("1 s more a request", 1.0),
    Slowness("hangs at every tenth", 30.0, 10),
)


def serve(folder: str, connection: Connection) -> None:
    """Serve the model; each `Slowness` that is sent holds from then on."""
    from tests.servers.model_server import Ways, model_server

    class Slow(Ways):
        numbers = itertools.count(1)
        slowness = STEADY

        def __getattribute__(self, name: str) -> object:
            if name != "delay":
                return super().__getattribute__(name)
            return 0.0 if next(self.numbers) % self.slowness.nth else self.slowness.seconds

    ways = Slow(context=2048)
    with model_server(folder, ways) as (url, _):
        connection.send(url)
        while True:
            ways.slowness = connection.recv()


@contextmanager
def server(folder: str) -> Iterator[tuple[str, Connection]]:
    """The address of the server in a process of its own, and the way to tell it how slow to be."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(folder, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv(), ours
    finally:
        process.kill()
        process.join()


def main(
    folder: Annotated[str, typer.Argument(help="a model of Hugging Face's form")],
    rows: Annotated[int, typer.Option(help="questions")] = 6,
    tokens: Annotated[int, typer.Option(help="most tokens of an answer")] = 40,
    seconds: Annotated[float, typer.Option(help="the deadline")] = 1.0,
) -> None:
    console = Console(width=110)
    lines = files("specfuse_shared.comparing").joinpath("own_questions.jsonl").read_text("utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines[:: max(1, len(lines) // rows)]][:rows]
    params = SamplingParams(max_tokens=tokens)
    table = Table(title=f"{rows} answers of up to {tokens} tokens, one at a time", title_justify="left")
    for head in ("server", "preset", "round_seconds", "first words", "tokens a second", "late rounds", "left"):
        table.add_column(head)
    with server(folder) as (url, connection):
        members = [*demo_members(), MemberConfig(folder, name=SERVED, server=url)]
        with EnsembleEngine(EnsembleConfig(members)) as engine:
            engine.generate(questions[-1], SamplingParams(max_tokens=8))
            for slowness, preset, limit in itertools.product(WAYS, ("default", "fast"), (None, seconds)):
                connection.send(slowness)
                engine.config = EnsembleConfig.preset(preset, members, round_seconds=limit)  # for the same members
                told = figures([engine.generate(question, params) for question in questions])
                table.add_row(slowness.title, preset, str(limit), *told.values())
                console.print(slowness.title, preset, limit, dict(told))
    console.print(table)


def figures(results: list[EnsembleResult]) -> Mapping[str, str]:
    first = statistics.median(result.first_segment_seconds or result.total_seconds for result in results)
    speed = sum(r.usage.completion_tokens for r in results) / sum(r.total_seconds for r in results)
    rounds = [record for result in results for record in result.rounds]
    late = sum(any(absence.member == SERVED for absence in record.absent) for record in rounds)
    left = sum(exit.member == SERVED and exit.reason != "retention" for record in rounds for exit in record.exits)
    return {
        "first words": f"{first:.2f} s",
        "tokens a second": f"{speed:.1f}",
        "late rounds": f"{late / len(rounds):.0%}",
        "left": f"{left} of {len(results)}",
    }


if __name__ == "__main__":
    typer.run(main)
