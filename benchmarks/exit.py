"""Exit with weak members: the two demo models and noisy copies of them, the default settings with and without exit.

    python benchmarks/exit.py --data FILE.jsonl [--prompts 40] [--tokens 64] [--json FILE]

Each row of FILE has `prompt` and `references`. Degraded copies get Gaussian noise on every weight matrix, in
standard deviations of that matrix. All prompts at once, greedy. Prints ROUGE-L, active members a round and seconds for
each exit policy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_members import noisy
from rich.console import Console
from rich.table import Table
from rouge_score.rouge_scorer import RougeScorer

from specfuse_shared import EnsembleConfig, EnsembleEngine, EnsembleResult, MemberConfig, SamplingParams, demo_members
from specfuse_shared.config import PRESETS

COPIES = ((0, 0.3), (1, 0.3), (0, 0.6))
"""(demo member, noise) of the three degraded members."""
POLICIES: dict[str, Mapping[str, Any]] = {
    "never": {"exit": "never"},
    "entropy-two": {"exit": "entropy", "exit_threshold": 0.5, "min_active": 2},
    "entropy-0.7": {"exit": "entropy", "exit_threshold": 0.7},
    "entropy-0.5": {"exit": "entropy", "exit_threshold": 0.5},
    "entropy-0.25": {"exit": "entropy", "exit_threshold": 0.25},
    "fixed-0.5": {"exit": "fixed", "exit_threshold": 0.5},
    "fast": PRESETS["fast"],
}


def members(folder: Path) -> list[MemberConfig]:
    real = demo_members()
    return [*real, *(noisy(real[i], noise, folder) for i, noise in COPIES)]


def answers(config: EnsembleConfig, rows: list[dict[str, Any]], tokens: int) -> tuple[list[EnsembleResult], float]:
    """The answers to all rows, and how many seconds they took."""
    with EnsembleEngine(config).load() as engine:
        began = time.monotonic()
        found = engine.generate_batch([row["prompt"] for row in rows], SamplingParams(max_tokens=tokens))
        took = time.monotonic() - began
    return [result for result in found if isinstance(result, EnsembleResult)], took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "exit.json")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.data.read_text().splitlines()][: options.prompts]
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    table = Table(
        title=f"exit, 2 demo members and 3 degraded copies, {len(rows)} prompts, {options.tokens} tokens, greedy"
    )
    for column in ("exit", "ROUGE-L", "active members a round", "rounds", "seconds"):
        table.add_column(column)
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = EnsembleConfig(members(Path(folder)), reuse_prefixes=False)
        for name in options.policies:
            results, took = answers(replace(config, **POLICIES[name]), rows, options.tokens)
            rouge = [
                max(scorer.score(ref, r.text)["rougeL"].fmeasure for ref in row["references"])
                for row, r in zip(rows, results, strict=True)
            ]
            report[name] = {
                "rougeL": 100 * statistics.mean(rouge),
                "active": statistics.mean(len(r.active) for x in results for r in x.rounds),
                "rounds": statistics.mean(len(x.rounds) for x in results),
                "seconds": took,
                "answers": [x.to_dict() for x in results],
            }
            table.add_row(name, *(f"{report[name][key]:.2f}" for key in ("rougeL", "active", "rounds", "seconds")))
    Console(width=110).print(table)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
