"""The host's share: what a round of many answers takes besides the models' own calls, from tiny models on one core.

    python benchmarks/host.py [--answers 32] [--tokens 60] [--execution static] [--speculation auto]
                              [--repeats 3] [--profile] [--json FILE]

Five tiny members on one lane, greedy, segments of ten tokens, no exit, asked as a card would be. While one computes,
the host prepares what comes next: trees, masks, choices, verdicts, text. Here nothing runs beside it, so what is not
spent in a model's own call or in a step of fixed shape, which a card replays, is the host's: milliseconds of processor
a round. `--profile` tells where they go.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from figures import RESULTS, Figure, report
from loaded import LoadedEngine, prompt
from shapes import members

from specfuse_shared import EnsembleEngine, SamplingParams
from specfuse_shared.members.local import lane as cores
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.runtime import sampler
from specfuse_shared.runtime import sampler as logprobs


class Calls:
    """Seconds of processor inside of what a card does by itself: models, steps, sums over vocabularies."""

    def __init__(self, some: Sequence[LocalMember]) -> None:
        self.seconds, self._depth = 0.0, 0
        for member in some:
            self._time(member.runner.model, "forward")
            if member.runner.static is not None:
                self._time(member.runner.static, "_feed")
        for holder, names in ((logprobs, ("_log_masses", "_picked")), (sampler, ("_largest",))):
            for name in names:
                self._time(holder, name)
        if (found := find_spec("specfuse_shared.runtime.sampler")) is not None:
            self._time(import_module(found.name), "_largest")

    def _time(self, holder: Any, name: str) -> None:
        own = getattr(holder, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            began, self._depth = time.thread_time(), self._depth + 1
            try:
                return own(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - began

        setattr(holder, name, call)


@contextmanager
def loaded(execution: str, speculation: str) -> Iterator[tuple[EnsembleEngine, Sequence[LocalMember]]]:
    vars(cores)["cores"] = lambda: 1  # one lane, as on one card
    vars(logprobs)["_ROW_BY_ROW"] = set()  # what a card is asked for, it is asked for at once
    some = list(members(True, torch.device("cpu"), torch.float32, execution, 1e9))
    for member in some:
        member.runner.reports_argmax = True
    with LoadedEngine(some, speculation=speculation) as engine:
        yield engine.load(), some


def share(options: argparse.Namespace) -> tuple[float, float]:
    """Milliseconds of processor a round outside of the models' calls and inside of them."""
    with loaded(options.execution, options.speculation) as (engine, some):
        calls, params = Calls(some), SamplingParams(max_tokens=options.tokens)
        engine.generate_batch(_asked(some, 2, 0), params)
        found = []
        for repeat in range(options.repeats):
            calls.seconds, asked = 0.0, _asked(some, options.answers, repeat + 1)
            began = time.process_time()
            results: list[Any] = engine.generate_batch(asked, params)
            spent, rounds = time.process_time() - began, max(len(result.rounds) for result in results)
            found.append((1e3 * (spent - calls.seconds) / rounds, 1e3 * calls.seconds / rounds))
        if options.profile:
            _profile(engine, _asked(some, options.answers, options.repeats + 1), params)
    return statistics.median(own for own, _ in found), statistics.median(inside for _, inside in found)


def _asked(some: Sequence[LocalMember], answers: int, repeat: int) -> list[Any]:
    """Prompts that nobody asked before: nothing of their answers is known from an earlier repeat."""
    return [prompt(some, 60, f"Entry {repeat}-{n}. ") for n in range(answers)]


def _profile(engine: EnsembleEngine, asked: Sequence[Any], params: SamplingParams) -> None:
    scheduler: Any = engine._scheduler
    step, seen = scheduler._own.step, cProfile.Profile()
    passed = scheduler._pass_on

    def stepped() -> None:
        seen.runcall(step)

    scheduler._own.step, scheduler._pass_on = stepped, lambda: seen.runcall(passed)
    engine.generate_batch(list(asked), params)
    pstats.Stats(seen).sort_stats("tottime").print_stats(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--execution", choices=["static", "dynamic"], default="static")
    parser.add_argument("--speculation", choices=["auto", "off"], default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS / "host.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    own, inside = share(options)
    name = (
        f"host ÷ models of a round, {options.answers} answers, {options.execution}, speculation {options.speculation}"
    )
    figure = Figure(name, own / inside, 1.0, False, f"{own:.1f} ms ÷ {inside:.1f} ms of processor")
    report("The host's share, five tiny members", [figure], options.json)


if __name__ == "__main__":
    main()
