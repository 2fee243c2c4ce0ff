"""The savings of speculation: forward passes of each member a token of the answer, and seconds, on ÷ off, in one run.

    python benchmarks/speculation.py --data FOLDER [--rows 4] [--tokens 64] [--dtype bfloat16] [--five] [--json FILE]

Kinds of work: open questions (FOLDER/open.jsonl), passages to be quoted and to be summed up (FOLDER/rag_en.jsonl), and
code to be edited (rows of this file). `--five`: the demo members and three copies of them with noise on their weights.
Every request is asked of an engine without and of one with speculation, one at a time and then all at once; forward
passes are the answers' (`MemberUsage.forwards`), so other work on the machine changes only seconds (by the clock, and
of the processor). How many answers are the same is printed: in float32 all are; in half precision they may part, as
batches round differently.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench_members import noisy
from figures import RESULTS, Figure, report

from specfuse_shared import EnsembleConfig, EnsembleEngine, EnsembleResult, SamplingParams, demo_members
from specfuse_shared.loading.gguf import cache_folder

CODE = (
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop(0)\n",
    "def read(path):\n    lines = []\n    with open(path) as file:\n        for line in file:\n"
    "            lines.append(line.strip())\n    return lines\n",
    "def largest(numbers):\n    best = numbers[0]\n    for number in numbers[1:]:\n        if number > best:\n"
    "            best = number\n    return best\n",
)
AIMS = {"open": 0.8, "quote": 0.5, "summary": 0.8, "code": 0.5}
"""Kinds of work, and the target for the share of forward passes that remain."""
COPIES = ((0, 0.05), (1, 0.05), (1, 0.1))
"""Member of the demo, and standard deviations of the noise."""


def requests(data: Path, kind: str, rows: int) -> list[str]:
    if kind == "code":
        return [f"Add a docstring to this code and repeat all of it.\n\n```python\n{code}```" for code in CODE[:rows]]
    name = {"open": "open", "quote": "rag_en", "summary": "rag_en"}[kind]
    found = [json.loads(line) for line in (data / f"{name}.jsonl").read_text("utf-8").splitlines()[:rows]]
    if kind == "open":
        return [row["prompt"] for row in found]
    if kind == "summary":
        return [f"Sum this text up in two sentences.\n\n{row['context']}" for row in found]
    return [f"Quote the sentence that answers the question.\n\n{row['context']}\n\n{row['prompt']}" for row in found]


def forwards(results: Sequence[EnsembleResult], member: str | None = None) -> float:
    """Forward passes of one or all members for a token of their encoding of the answer."""
    used = [u for result in results for name, u in result.usage.members.items() if member in (None, name)]
    return sum(usage.forwards for usage in used) / max(1, sum(usage.answer for usage in used))


def answered(
    engine: EnsembleEngine, asked: Sequence[str], params: SamplingParams, together: bool
) -> list[EnsembleResult]:
    if not together:
        return [engine.generate(text, params) for text in asked]
    found = engine.generate_batch(list(asked), params)
    return [result for result in found if isinstance(result, EnsembleResult)]


def measure(config: EnsembleConfig, data: Path, rows: int, tokens: int) -> list[Figure]:
    params, figures = SamplingParams(max_tokens=tokens), []
    with (
        EnsembleEngine(replace(config, speculation="off")) as off,
        EnsembleEngine(replace(config, speculation="auto")) as auto,
    ):
        engines = {"off": off.load(), "auto": auto.load()}
        for kind, aim in AIMS.items():
            asked = requests(data, kind, rows)
            for together in (False, True):
                found, seconds, busy = {}, {}, {}
                for name, engine in engines.items():
                    began, used_before = time.monotonic(), time.process_time()
                    found[name] = answered(engine, asked, params, together)
                    seconds[name], busy[name] = time.monotonic() - began, time.process_time() - used_before
                how = f"{kind}, {len(asked)} {'at once' if together else 'one by one'}"
                ratio = forwards(found["auto"]) / forwards(found["off"])
                used = [usage for result in found["auto"] for usage in result.usage.members.values()]
                same = sum(a.text == b.text for a, b in zip(found["off"], found["auto"], strict=True))
                plain, saved = found["off"], found["auto"]
                names = plain[0].usage.members
                each = ", ".join(f"{m} {forwards(plain, m):.2f} → {forwards(saved, m):.2f}" for m in names)
                detail = (
                    f"{each}; guesses accepted "
                    f"{sum(u.accepted for u in used)} of {sum(u.guessed for u in used)}; "
                    f"{same} of {len(asked)} answers equal"
                )
                figures.append(Figure(f"forward passes a token, {how}", ratio, aim, False, detail))
                print(f"{how}: {ratio:.2f} ({detail})", flush=True)
                for what, spent in (("seconds", seconds), ("processor seconds", busy)):
                    reported = f"{spent['off']:.0f} s → {spent['auto']:.0f} s"
                    most = aim if together else 1.02
                    figures.append(Figure(f"{what}, {how}", spent["auto"] / spent["off"], most, False, reported))
                    print(f"    {what}: {figures[-1].ratio:.2f} ({reported})", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--five", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS / "speculation.json")
    args = parser.parse_args()
    folder = cache_folder() / "weakened"
    folder.mkdir(parents=True, exist_ok=True)
    pair = demo_members(dtype=args.dtype)
    members = [*pair, *(noisy(pair[n], noise, folder) for n, noise in COPIES if args.five)]
    config = EnsembleConfig(members, reuse_prefixes=False)
    report("Speculation on ÷ off", measure(config, args.data, args.rows, args.tokens), args.json)


if __name__ == "__main__":
    main()
