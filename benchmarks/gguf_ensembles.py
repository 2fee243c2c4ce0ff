"""Ensembles of GGUF files: members on llama.cpp compared with the same files on transformers.

    python benchmarks/gguf_ensembles.py FILE FILE… [--data FOLDER] [--rows 4] [--tokens 48] [--threads 1]
        [--cache-tokens N] [--json FILE]

Each member alone, then all of them, greedy, one open question (FOLDER/open.jsonl, or questions of this file) after the
other, answers of forced length. Each engine has a separate process, and tokens a second are of the processor's time, so
that other work on the machine changes little. Memory is the most that the process has grown by since its libraries were
imported, read after each answer. On llama.cpp, fused answers are compared with the time that their members need for the
tokens that they drafted, each alone and without guesses. Files that do not fit on transformers are left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from figures import RESULTS, Figure, report

from specfuse_shared import (
    EnsembleConfig,
    EnsembleEngine,
    EnsembleResult,
    MemberConfig,
    PlacementError,
    SamplingParams,
)
from specfuse_shared.events import FinishEvent, SegmentEvent

SUBJECTS = ("the tide", "honey", "a lighthouse", "iron")
QUESTIONS = tuple(f"Say a few things about {subject}." for subject in SUBJECTS)


@dataclass(frozen=True, slots=True)
class Task:
    """The results of one process."""

    files: tuple[str, ...]
    backend: str
    speculation: str
    questions: tuple[str, ...]
    tokens: int
    threads: int
    cache_tokens: int | None


@dataclass(frozen=True, slots=True)
class Measured:
    """`tokens` of the reference member; `drafted` by each; seconds of the processor and to the first words; MiB."""

    tokens: int
    drafted: tuple[int, ...]
    busy: float
    seconds: float
    first: float
    memory: float

    @property
    def rate(self) -> float:
        """Tokens a second of the processor's time."""
        return self.tokens / self.busy


def members(task: Task) -> list[MemberConfig]:
    settings: dict[str, Any] = {"backend": task.backend, "device": "cpu"}
    if task.backend == "transformers":
        settings["dtype"] = "bfloat16"
    else:
        settings["cache_tokens"] = task.cache_tokens
    return [MemberConfig(file, **settings) for file in task.files]


def measure(task: Task) -> Measured:
    """In this process, which answers one question first that does not count."""
    torch.set_num_threads(task.threads)
    process, params = psutil.Process(), SamplingParams(max_tokens=task.tokens, ignore_eos=True)
    before, held = process.memory_info().rss, 0
    config = EnsembleConfig(
        members(task), speculation=task.speculation, reuse_prefixes=False, repetition_guard=False, cache_bytes=1 << 30
    )
    with EnsembleEngine(config) as engine:
        engine.generate("What is a comet?", params)
        began, used, firsts, results = time.monotonic(), time.process_time(), list[float](), list[EnsembleResult]()
        for question in task.questions:
            asked = time.process_time()
            for event in engine.stream(question, params):
                if isinstance(event, SegmentEvent) and len(firsts) == len(results):
                    firsts.append(time.process_time() - asked)
                if isinstance(event, FinishEvent):
                    results.append(event.result)
            held = max(held, process.memory_info().rss)
        busy, seconds = time.process_time() - used, time.monotonic() - began
    drafted = [sum(r.usage.members[name].drafted for r in results) for name in config.names]
    tokens = sum(result.usage.completion_tokens for result in results)
    return Measured(tokens, tuple(drafted), busy, seconds, sum(firsts) / len(firsts), (held - before) / 2**20)


def apart(task: Task) -> Measured | None:
    """In another process; None where memory does not hold it."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            return pool.apply(measure, (task,))
        except PlacementError as error:
            print(error)
            return None


def compared(files: Sequence[str], here: Measured, there: Measured | None) -> list[Figure]:
    """Members on llama.cpp and, if memory holds them, on transformers."""
    if there is None:
        return []
    name = " + ".join(Path(file).stem[:20] for file in files)
    return [
        Figure(f"{name}: tokens a second", here.rate / there.rate, 2, True, f"{here.rate:.1f} ÷ {there.rate:.1f}"),
        Figure(
            f"{name}: seconds to the first words",
            here.first / there.first,
            1,
            False,
            f"{here.first:.2f} ÷ {there.first:.2f}",
        ),
        Figure(f"{name}: MiB", here.memory / there.memory, 0.4, False, f"{here.memory:.0f} ÷ {there.memory:.0f}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="GGUF files; ensembles are the first 2, 3, … of them")
    parser.add_argument("--data", type=Path, help="folder of open.jsonl")
    parser.add_argument("--rows", type=int, default=len(QUESTIONS))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache-tokens", type=int, help="of each member on llama.cpp")
    parser.add_argument("--json", type=Path, default=RESULTS / "gguf_ensembles.json")
    args = parser.parse_args()
    asked = QUESTIONS[: args.rows]
    if args.data is not None:
        rows = (args.data / "open.jsonl").read_text("utf-8").splitlines()[: args.rows]
        asked = tuple(json.loads(row)["prompt"] for row in rows)
    ensembles = [args.files[:count] for count in range(2, len(args.files) + 1)]
    figures: list[Figure] = []
    plain: dict[str, Measured] = {}

    def run(files: Sequence[str], backend: str, speculation: str = "auto") -> Measured | None:
        task = Task(tuple(files), backend, speculation, asked, args.tokens, args.threads, args.cache_tokens)
        found = apart(task)
        print(backend, speculation, *(Path(file).stem for file in files), found, flush=True)
        return found

    def here(files: Sequence[str], speculation: str = "auto") -> Measured:
        found = run(files, "llama.cpp", speculation)
        if found is None:
            raise SystemExit("llama.cpp has no memory for these members")
        return found

    for file in args.files:
        plain[file] = here([file], "off")
        figures += compared([file], here([file]), run([file], "transformers"))
    for files in ensembles:
        fused = here(files)
        figures += compared(files, fused, run(files, "transformers"))
        own = [drafted / plain[file].rate for file, drafted in zip(files, fused.drafted, strict=True)]
        detail = f"{fused.busy:.1f} s ÷ " + " + ".join(f"{seconds:.1f} s" for seconds in own)
        name = f"{len(files)} members: fused ÷ own decoding of the same tokens"
        figures.append(Figure(name, fused.busy / sum(own), 0.75, False, detail))
    sizes = [(Path(file).stem, f"{Path(file).stat().st_size:,} bytes") for file in args.files]
    report("ensembles of GGUF files, llama.cpp ÷ transformers in bf16", figures, args.json, sizes)


if __name__ == "__main__":
    main()
