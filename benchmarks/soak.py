"""Random arrivals for a while: no leak, no error.

    python benchmarks/soak.py [--minutes 10] [--rate 0.5] [--member MODEL]… [--json FILE]

Requests arrive at random (Poisson, `--rate` a second) with prompts and lengths of all sizes, through the sync and async
doors, sampled and greedy; a fifth is cancelled or abandoned. Prints memory, counters and errors every half minute.
Members are those of the demo, or the models named.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from specfuse_shared import EnsembleConfig, EnsembleEngine, SamplingParams, SpecFuseError, demo_members

WORDS = ("why", "how", "the", "sea", "moon", "tide", "star", "ship", "wind", "night", "glass", "map", "door", "write")


async def one(engine: EnsembleEngine, chance: random.Random, errors: list[str]) -> None:
    question = " ".join(chance.choice(WORDS) for _ in range(chance.choice((5, 20, 100, 400))))
    params = SamplingParams(max_tokens=chance.choice((8, 32, 96)), temperature=chance.choice((0.0, 0.8)))
    try:
        if chance.random() < 0.2:
            await asyncio.wait_for(engine.agenerate(question, params), chance.random() * 3)
        elif chance.random() < 0.5:
            await asyncio.to_thread(engine.generate, question, params)
        else:
            await engine.agenerate(question, params)
    except TimeoutError:
        return
    except SpecFuseError as error:
        errors.append(f"{type(error).__name__}: {error}")


async def soak(engine: EnsembleEngine, minutes: float, rate: float, console: Console) -> dict[str, object]:
    chance, errors, rows, process = random.Random(0), list[str](), list[tuple[float, float, int]](), psutil.Process()
    start, shown, tasks = time.monotonic(), 0.0, set[asyncio.Task[None]]()
    while (now := time.monotonic() - start) < 60 * minutes:
        tasks.add(asyncio.create_task(one(engine, chance, errors)))
        tasks = {task for task in tasks if not task.done()}
        await asyncio.sleep(chance.expovariate(rate))
        if now - shown >= 30:
            shown = now
            metrics = engine.metrics()
            rows.append((now, process.memory_info().rss / 2**20, sum(metrics.requests.values())))
            console.print(
                f"{now:5.0f} s  {rows[-1][1]:7.0f} MiB  ended {metrics.requests}  running {metrics.running}  "
                f"waiting {metrics.waiting}  errors {len(errors)}"
            )
    await asyncio.gather(*tasks)
    gc.collect()
    return {"rows": rows, "errors": errors, "metrics": engine.metrics().to_dict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--member", action="append", help="a hub id, folder or GGUF file")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "soak.json")
    options = parser.parse_args()
    console = Console(width=120)
    members = options.member or demo_members()
    with EnsembleEngine(EnsembleConfig(members, cache_bytes=2 << 30)).load() as engine:
        report = asyncio.run(soak(engine, options.minutes, options.rate, console))
        table = Table(title=f"soak, {options.minutes:g} minutes, {options.rate:g} requests a second")
        for name, value in engine.metrics().to_dict().items():
            if not isinstance(value, dict) or "bounds" not in value:
                table.add_row(name, str(value))
        console.print(table)
        left = engine.metrics()
    console.print(f"caches left: {left.cache_bytes} bytes; errors: {report['errors'] or 'none'}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
