"""Speed of one source tree against another, in turns: answers of forced lengths, by the demo members in bf16.

    python benchmarks/compare_trees.py BEFORE AFTER [--turns 5] [--models FOLDER] [--json FILE]

Every turn runs each tree once in a process of its own (A B, then B A, …), so that what else the machine does meets
both alike. A turn times a lone answer, eight at once, 64 requests and a chat of ten turns: seconds, seconds of the
processor, which other work on the machine disturbs less, and seconds to the first segment. Printed are AFTER ÷ BEFORE
of the turns' pairs: their median, smallest and largest. Below 1 AFTER is faster.

An answer has exactly `--tokens` tokens. A tree without `SamplingParams(ignore_eos=…)` is made to know no end of turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

WORKER = """
import json, sys, time
from dataclasses import fields, replace
from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, SamplingParams, demo_members

tokens, requests, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
members = demo_members(dtype="bfloat16")
if folder:
    members = [MemberConfig(f"{folder}/{name}", name=name, dtype="float32") for name in ("chat", "base")]
config = EnsembleConfig(members, exit="never", reuse_prefixes=False, repetition_guard=False, max_concurrent=32)
known = {field.name for field in fields(SamplingParams)}
forced = {"ignore_eos": True} if "ignore_eos" in known else {}
params = SamplingParams(max_tokens=tokens, temperature=0.8, seed=1, **forced)
with EnsembleEngine(config) as engine:
    engine.load()
    if not forced:
        lanes = getattr(engine, "_members", ())
        for member in lanes:
            member.banned_token_ids = member.banned_token_ids.new_tensor(
                sorted({*member.banned_token_ids.tolist(), *member.stop_ids})
            )
    engine.generate("Warm up.", replace(params, max_tokens=8))
    seconds, work, first, count = {}, {}, {}, {}
    for name, size in (("a lone answer", 1), ("eight at once", 8), (f"{requests} requests", requests)):
        asked = [f"Tell me about number {n}." for n in range(size)]
        began, worked = time.perf_counter(), time.process_time()
        results = engine.generate_batch(asked, params)
        seconds[name], work[name] = time.perf_counter() - began, time.process_time() - worked
        first[name] = sum(result.first_segment_seconds for result in results)
        count[name] = sum(result.usage.completion_tokens for result in results)
with EnsembleEngine(replace(config, reuse_prefixes=True)) as engine:
    engine.generate("Warm up.", replace(params, max_tokens=8))
    name, turns = "a chat of ten turns", []
    seconds[name], work[name], first[name], count[name] = 0.0, 0.0, 0.0, 0
    for n in range(10):
        turns.append({"role": "user", "content": f"Tell me about number {n}."})
        began, worked = time.perf_counter(), time.process_time()
        result = engine.generate(turns, params)
        seconds[name] += time.perf_counter() - began
        work[name] += time.process_time() - worked
        first[name] += result.first_segment_seconds
        count[name] += result.usage.completion_tokens
        turns.append({"role": "assistant", "content": result.text})
print(json.dumps({"seconds": seconds, "processor seconds": work, "first words": first, "tokens": count}))
"""


KINDS = ("seconds", "processor seconds", "first words")


def run(tree: Path, tokens: int, requests: int, folder: str) -> dict[str, dict[str, float]]:
    """The times of one tree, by a process that imports it and nothing else."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-c", WORKER, str(tokens), str(requests), folder]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tree)
    if done.returncode:
        raise SystemExit(f"{tree} failed:\n{done.stderr[-3000:]}")
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(before: Path, after: Path, turns: int, tokens: int, requests: int, folder: str) -> dict[str, list[float]]:
    """AFTER ÷ BEFORE of every turn, in seconds a token, by what was timed."""
    ratios: dict[str, list[float]] = {}
    for turn in range(turns):
        order = (before, after) if turn % 2 == 0 else (after, before)
        found = {tree: run(tree, tokens, requests, folder) for tree in order}
        for name, kind in [(name, kind) for name in found[after]["tokens"] for kind in KINDS]:
            old, new = (found[tree][kind][name] / found[tree]["tokens"][name] for tree in (before, after))
            ratios.setdefault(f"{name}, {kind}", []).append(new / old)
        print(f"turn {turn + 1}: " + ", ".join(f"{name} {each[-1]:.3f}" for name, each in ratios.items()), flush=True)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--models", default="", help="folder with small models `chat` and `base`, for a quick look")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trees = options.before.resolve(), options.after.resolve()
    ratios = compare(*trees, options.turns, options.tokens, options.requests, options.models)
    for name, each in ratios.items():
        print(f"{name:<34} {statistics.median(each):.3f}  ({min(each):.3f} to {max(each):.3f}, {len(each)} turns)")
    if options.json is not None:
        options.json.write_text(json.dumps(ratios, indent=1) + "\n")


if __name__ == "__main__":
    main()
