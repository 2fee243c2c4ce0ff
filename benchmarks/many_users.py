"""Concurrent users: a short answer during a long prompt, a prompt that many ask at once, and one that was stopped.

    python benchmarks/many_users.py [--words N] [--member PATH]…

The demo's pair, or the given members. Each prompt is new, so nothing is cached from the one before. Printed: seconds,
and ratios to the same work alone, in one run.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, SamplingParams, SegmentEvent, demo_members

_WORDS = ["sea", "tide", "moon", "wind", "sand", "gull", "rock", "boat", "salt", "wave", "foam", "reef"]
_SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
_numbers = itertools.count()


def main(
    words: Annotated[int, typer.Option(help="of a long prompt")] = 3000,
    member: Annotated[list[str], typer.Option(help="a member; several for several")] = [],  # noqa: B006
) -> None:
    members = [MemberConfig(name) for name in member] or demo_members()
    table = Table("work", "alone", "concurrent or again", "ratio")
    with EnsembleEngine(EnsembleConfig(members, max_concurrent=16)) as engine, ThreadPoolExecutor(16) as pool:
        engine.generate("Hello", _SHORT)
        for rows in (_concurrent(engine, pool, words), _alike(engine, pool, words // 3), _stopped(engine, words // 3)):
            for name, alone, other in rows:
                table.add_row(name, f"{alone:.2f} s", f"{other:.2f} s", f"{other / alone:.2f}")
    Console(width=110).print(table)


def _concurrent(engine: EnsembleEngine, pool: ThreadPoolExecutor, words: int) -> Sequence[tuple[str, float, float]]:
    """Short answers, one after another, while a long prompt is read and answered."""
    alone = statistics.median(_seconds(engine, _question()) for _ in range(3))
    long_alone = _seconds(engine, _prompt(words))
    long = pool.submit(_seconds, engine, _prompt(words))
    time.sleep(0.5)
    short = []
    while not long.done():
        short.append(_seconds(engine, _question()))
    return [
        (f"4 tokens during {words} words, median", alone, statistics.median(short)),
        (f"4 tokens during {words} words, slowest of {len(short)}", alone, max(short)),
        (f"{words} words during such answers", long_alone, long.result()),
    ]


def _alike(engine: EnsembleEngine, pool: ThreadPoolExecutor, words: int) -> Sequence[tuple[str, float, float]]:
    """To the first segment: one, four answers of one prompt, eight users with one system prompt; each slowest one."""
    one, four, system = (_prompt(words) for _ in range(3))
    alone = _first_segment(engine, one)
    of_four = max(pool.map(lambda _: _first_segment(engine, four), range(4)))
    of_eight = max(pool.map(lambda n: _first_segment(engine, f"{system} What of {n}?"), range(8)))
    return [
        (f"first segment, four times {words} words", alone, of_four),
        (f"first segment, eight users after the same {words} words", alone, of_eight),
    ]


def _stopped(engine: EnsembleEngine, words: int) -> Sequence[tuple[str, float, float]]:
    """To the first segment of a prompt again: after its answer was finished, and after it was stopped."""
    finished, stopped = _prompt(words), _prompt(words)
    engine.generate(finished, _SHORT)
    again = statistics.median(_first_segment(engine, f"{finished} {n}") for n in range(3))
    _first_segment(engine, stopped, stop=True)
    while engine.metrics().running:
        time.sleep(0.01)
    after_stop = statistics.median(_first_segment(engine, f"{stopped} {n}") for n in range(3))
    return [("first segment again, after an end; after a stop", again, after_stop)]


def _seconds(engine: EnsembleEngine, prompt: str) -> float:
    began = time.perf_counter()
    engine.generate(prompt, _SHORT)
    return time.perf_counter() - began


def _first_segment(engine: EnsembleEngine, prompt: str, stop: bool = False) -> float:
    """Seconds; `stop`: the answer would be long and is stopped then."""
    params = SamplingParams(max_tokens=500, ignore_eos=True) if stop else _SHORT
    began, stream = time.perf_counter(), engine.stream(prompt, params)
    next(event for event in stream if isinstance(event, SegmentEvent))
    seconds = time.perf_counter() - began
    if stop:
        stream.close()  # type: ignore[attr-defined]
    else:
        list(stream)
    return seconds


def _question() -> str:
    return f"Name {next(_numbers)} colours."


def _prompt(words: int) -> str:
    number = next(_numbers)
    chance = random.Random(number)
    return f"{number} " + " ".join(chance.choice(_WORDS) for _ in range(words))


if __name__ == "__main__":
    typer.run(main)
