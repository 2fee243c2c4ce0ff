"""Exit with weak members: the two demo models and noisy copies of them, with and without exit.

    python benchmarks/exit.py --data FILE.jsonl [--prompts 20] [--tokens 64] [--json FILE]

Each row of FILE has `prompt` and `references`. Degraded copies get Gaussian noise on every weight matrix, in
standard deviations of that matrix. Prints ROUGE-L, active members a round and seconds for each exit policy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from rouge_score.rouge_scorer import RougeScorer
from weakened import noisy

sys.path.insert(0, str(Path(__file__).parents[1]))

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, SamplingParams, demo_members
from specfuse_shared.messages import Message
from specfuse_shared.results import EnsembleResult
from tests.engine.comparing import local_members, open_session

COPIES = ((0, 0.3), (1, 0.3), (0, 0.6))
"""(demo member, noise) of the three degraded members."""
PLAIN = {"segment_tokens": 10, "per": "token", "aggregate": "weighted_mean", "feedback": "uniform"}
POLICIES: dict[str, dict[str, Any]] = {
    "never": {**PLAIN, "exit": "never"},
    "entropy-0.7": {**PLAIN, "exit": "entropy", "exit_threshold": 0.7},
    "entropy-0.5": {**PLAIN, "exit": "entropy", "exit_threshold": 0.5},
    "fixed-0.5": {**PLAIN, "exit": "fixed", "exit_threshold": 0.5},
}


def members(folder: Path) -> list[MemberConfig]:
    real = demo_members(dtype="bfloat16")
    return [*real, *(noisy(real[i], noise, folder) for i, noise in COPIES)]


def answers(
    engine: EnsembleEngine, settings: dict[str, Any], rows: list[dict[str, Any]], tokens: int
) -> Iterator[EnsembleResult]:
    """Greedy answers under an exit policy, on members that stay loaded."""
    config, members = replace(engine.config, **settings), local_members(engine)
    for row in track(rows, description=str(settings)):
        question = [Message("user", row["prompt"])]
        *_, last = open_session(config, members, question, SamplingParams(max_tokens=tokens)).events()
        yield last.result  # type: ignore[union-attr]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=20)
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
        engine = EnsembleEngine(EnsembleConfig(members=members(Path(folder)))).load()
        for name in options.policies:
            results = list(answers(engine, POLICIES[name], rows, options.tokens))
            rouge = [
                max(scorer.score(ref, r.text)["rougeL"].fmeasure for ref in row["references"])
                for row, r in zip(rows, results, strict=True)
            ]
            report[name] = {
                "rougeL": 100 * statistics.mean(rouge),
                "active": statistics.mean(len(r.active) for x in results for r in x.rounds),
                "rounds": statistics.mean(len(x.rounds) for x in results),
                "seconds": statistics.mean(x.total_seconds for x in results),
                "answers": [x.to_dict() for x in results],
            }
            table.add_row(name, *(f"{report[name][key]:.2f}" for key in ("rougeL", "active", "rounds", "seconds")))
    Console(width=110).print(table)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
