"""Many clients at once at `specfuse-llm serve`, of which a third leave in the middle of their answers.

    python benchmarks/clients.py [--clients 200] [--waves 3] [--tokens 16] [--dtype float32]

The server is another process over the demo members. After a wave to warm up, each wave has `--clients` clients, each
with its question; a third of them (at random, seeded) leave after a random number of segments, and two read their
answers slowly. Printed for each wave: seconds to the first segment of the clients that stayed (p50, p95), answers that
differ from the engine's answer to their question alone (float32, where batches change nothing), and the server's
memory, threads and sockets once it is idle again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from specfuse_shared import EnsembleConfig, demo_members
from specfuse_shared.api_server.run import serve
from specfuse_shared.api_server.settings import ClientSettings, ServeConfig, ServerSettings

QUESTIONS = (
    "Why is the sky blue?",
    "What is a tide?",
    "Name three rivers of Africa.",
    "How does a bicycle stay upright?",
    "Why is the sea salty?",
    "What does a lighthouse keeper do?",
    "How do bees make honey?",
    "What is a comet?",
)
SLOW = 2
PAUSE = 0.5
"""Seconds between the lines that a slow reader takes."""


@dataclass(frozen=True, slots=True)
class Client:
    question: str
    leaves_after: int | None
    slow: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """`text` is None for a client that left."""

    client: Client
    first: float
    text: str | None


@contextmanager
def served(
    config: EnsembleConfig, named: Mapping[str, ClientSettings] | None = None
) -> Iterator[tuple[str, psutil.Process]]:
    """A server over the ensemble "demo" in another process, once it is ready: its address and its process.

    `named`: clients with keys, each of which is the client's name.
    """
    context = multiprocessing.get_context("spawn")
    reported = context.Queue()
    server = context.Process(target=_serve, args=(config, dict(named or {}), reported))
    server.start()
    try:
        address = reported.get()
        while httpx.get(f"{address}/health", timeout=60).status_code != 200:
            time.sleep(0.5)
        yield address, psutil.Process(server.pid)
    finally:
        server.terminate()
        server.join(60)
    print(json.dumps({"exit code": server.exitcode}))


def _serve(config: EnsembleConfig, named: dict[str, ClientSettings], reported: Any) -> None:
    os.environ |= {name: name for name in named}
    serve(ServeConfig({"demo": config}, ServerSettings(port=0), clients=named), reported.put)


async def ask(http: httpx.AsyncClient, client: Client, tokens: int) -> Outcome:
    body = {"model": "demo", "messages": [{"role": "user", "content": client.question}], "max_tokens": tokens}
    began, first, segments, text = time.monotonic(), 0.0, 0, ""
    async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line[6:])["choices"][0]["delta"].get("content", "")
            if piece:
                first, segments, text = first or time.monotonic() - began, segments + 1, text + piece
            if segments == client.leaves_after:
                return Outcome(client, first, None)
            if client.slow:
                await asyncio.sleep(PAUSE)
    return Outcome(client, first, text)


def clients(count: int, chance: random.Random) -> list[Client]:
    found = []
    for n in range(count):
        leaves = chance.randrange(3) if chance.random() < 1 / 3 else None
        found.append(Client(QUESTIONS[n % len(QUESTIONS)], leaves if n >= SLOW else None, n < SLOW))
    return found


async def wave(address: str, asking: list[Client], tokens: int) -> list[Outcome]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as http:
        return await asyncio.gather(*(ask(http, client, tokens) for client in asking))


def idle(address: str, headers: Mapping[str, str] | None = None) -> None:
    """Wait until nothing runs, waits or is held."""
    quiet = ("running", "waiting", "cache_bytes")
    while True:
        reported = httpx.get(f"{address}/metrics", headers=headers, timeout=60).text.splitlines()
        if all(
            float(next(v for v in reported if v.startswith(f"specfuse_{name}{{")).split()[-1]) == 0 for name in quiet
        ):
            return
        time.sleep(0.1)


def kept(process: psutil.Process) -> dict[str, float]:
    sockets = [c for c in process.net_connections("tcp") if c.status != psutil.CONN_LISTEN]
    memory = process.memory_info().rss / 2**20
    return {"MiB": round(memory), "threads": process.num_threads(), "sockets": len(sockets), "files": process.num_fds()}


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100)[round(100 * share) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()

    chance = random.Random(0)
    with served(EnsembleConfig(demo_members(dtype=options.dtype))) as (address, process):
        alone = {q: asyncio.run(wave(address, [Client(q, None, False)], options.tokens))[0].text for q in QUESTIONS}
        print(json.dumps({"before": kept(process)}))
        for number in range(options.waves + 1):
            asking, began = clients(options.clients, chance), time.monotonic()
            outcomes = asyncio.run(wave(address, asking, options.tokens))
            stayed = [outcome for outcome in outcomes if outcome.text is not None]
            seconds = time.monotonic() - began
            idle(address)
            time.sleep(1)
            firsts = [outcome.first for outcome in stayed if not outcome.client.slow]
            row = {
                "wave": number or "warm-up",
                "seconds": round(seconds, 1),
                "left": len(outcomes) - len(stayed),
                "first p50 s": round(percentile(firsts, 0.5), 2),
                "first p95 s": round(percentile(firsts, 0.95), 2),
                "not their own": sum(outcome.text != alone[outcome.client.question] for outcome in stayed),
                **kept(process),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
