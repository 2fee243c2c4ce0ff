"""Many clients of a `specfuse-llm serve` process with the demo members: ordinary load, and hostile clients.

    python benchmarks/clients.py load [--clients 200] [--waves 3] [--tokens 16] [--dtype float32]
    python benchmarks/clients.py hostile [--good 10] [--bad 5] [--limit 1] [--seconds 60] [--tokens 16]

`load`: waves of concurrent clients, of which a third disconnect during their answers. After a wave to warm up, each
wave has `--clients` clients with a question each. A third of them (at random, seeded) disconnect after a random number
of segments, and two read their answers slowly. For each wave it prints the seconds to the first segment of the clients
that stayed (p50, p95), the number of answers that differ from the answer to a single request (in float32, batches do
not change answers), and the server's memory, threads and sockets after it is idle again.

`hostile`: the latency of good clients, without and with hostile ones, and the memory at the end. Every client has a
key. Good clients ask short questions one after another; then hostile clients join, whose keys have `max_answers`
(`--limit`; 0 is no limit). A hostile client loops over four requests: 200,000 stop strings, a million invalid messages,
eight answers under a grammar that takes 900 steps to close, and 25,000 turns. It prints the seconds of a good answer
(p50, p95) without and with the hostile clients, their ratio, the statuses of the hostile requests, and the server's
memory before and after.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import random
import statistics
import string
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import psutil
import typer

from specfuse_shared import EnsembleConfig, demo_members
from specfuse_shared.api_server.run import serve
from specfuse_shared.api_server.settings import ClientSettings, ServeConfig, ServerSettings
from specfuse_shared.config import DtypeName

app = typer.Typer(help=__doc__, add_completion=False, no_args_is_help=True)

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
"""Seconds that a slow client waits between lines."""


@dataclass(frozen=True, slots=True)
class Client:
    question: str
    leaves_after: int | None
    slow: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a client; `text` is None if it disconnected."""

    client: Client
    first: float
    text: str | None


@contextmanager
def served(
    config: EnsembleConfig, named: Mapping[str, ClientSettings] | None = None
) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server for the ensemble "demo" in another process, and wait until it is ready: its address and process.

    `named`: clients by name; a client's key is its name.
    """
    context = multiprocessing.get_context("spawn")
    addresses = context.Queue()
    server = context.Process(target=_serve, args=(config, dict(named or {}), addresses))
    server.start()
    try:
        address = addresses.get()
        while httpx.get(f"{address}/health", timeout=60).status_code != 200:
            time.sleep(0.5)
        yield address, psutil.Process(server.pid)
    finally:
        server.terminate()
        server.join(60)
    print(json.dumps({"exit code": server.exitcode}))


def _serve(config: EnsembleConfig, named: dict[str, ClientSettings], addresses: Any) -> None:
    os.environ |= {name: name for name in named}
    serve(ServeConfig({"demo": config}, ServerSettings(port=0), clients=named), addresses.put)


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


def drawn(count: int, chance: random.Random) -> list[Client]:
    clients = []
    for n in range(count):
        leaves = chance.randrange(3) if chance.random() < 1 / 3 else None
        clients.append(Client(QUESTIONS[n % len(QUESTIONS)], leaves if n >= SLOW else None, n < SLOW))
    return clients


async def wave(address: str, asking: list[Client], tokens: int) -> list[Outcome]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as http:
        return await asyncio.gather(*(ask(http, client, tokens) for client in asking))


def idle(address: str, headers: Mapping[str, str] | None = None) -> None:
    """Wait until no request runs or waits, and the caches are empty."""
    quiet = ("running", "waiting", "cache_bytes")
    while True:
        metrics = httpx.get(f"{address}/metrics", headers=headers, timeout=60).text.splitlines()
        if all(
            float(next(v for v in metrics if v.startswith(f"specfuse_{name}{{")).split()[-1]) == 0 for name in quiet
        ):
            return
        time.sleep(0.1)


def usage_of(process: psutil.Process) -> dict[str, float]:
    sockets = [c for c in process.net_connections("tcp") if c.status != psutil.CONN_LISTEN]
    memory = process.memory_info().rss / 2**20
    return {"MiB": round(memory), "threads": process.num_threads(), "sockets": len(sockets), "files": process.num_fds()}


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100)[round(100 * share) - 1]


@app.command()
def load(
    clients: Annotated[int, typer.Option(help="clients of a wave")] = 200,
    waves: Annotated[int, typer.Option(help="waves after the one to warm up")] = 3,
    tokens: Annotated[int, typer.Option(help="maximum tokens of an answer")] = 16,
    dtype: Annotated[DtypeName, typer.Option(help="of the members")] = "float32",
) -> None:
    """Waves of clients, of which a third disconnect."""
    chance = random.Random(0)
    with served(EnsembleConfig(demo_members(dtype=dtype))) as (address, process):
        alone = {q: asyncio.run(wave(address, [Client(q, None, False)], tokens))[0].text for q in QUESTIONS}
        print(json.dumps({"before": usage_of(process)}))
        for number in range(waves + 1):
            asking, began = drawn(clients, chance), time.monotonic()
            outcomes = asyncio.run(wave(address, asking, tokens))
            stayed = [outcome for outcome in outcomes if outcome.text is not None]
            seconds = time.monotonic() - began
            idle(address)
            time.sleep(1)
            firsts = [outcome.first for outcome in stayed if not outcome.client.slow]
            row = {
                "wave": number or "warm-up",
                "seconds": round(seconds, 1),
                "disconnected": len(outcomes) - len(stayed),
                "first p50 s": round(percentile(firsts, 0.5), 2),
                "first p95 s": round(percentile(firsts, 0.95), 2),
                "different answers": sum(outcome.text != alone[outcome.client.question] for outcome in stayed),
                **usage_of(process),
            }
            print(json.dumps(row), flush=True)


# ── hostile clients ───────────────────────────────────────────────────────────────────────────────

PATH = "/v1/chat/completions"


def headers(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}", "Content-Type": "application/json"}


def bad_bodies() -> list[bytes]:
    """The body of each hostile request."""
    ask: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Tell a story of the sea."}]}
    letters = itertools.islice(itertools.product(string.ascii_letters, repeat=4), 200_000)
    stops = ["~~" + "".join(letter) for letter in letters]
    grammar = {"kind": "regex", "source": "[b-wy-z]{900}"}
    bodies = [
        {**ask, "stop": stops, "max_tokens": 60},
        {**ask, "messages": [1] * 1_000_000},
        {**ask, "grammar": grammar, "max_tokens": 1000, "n": 8, "timeout": 10},
        {**ask, "messages": [{"role": "user", "content": "a"}] * 25_000},
    ]
    return [json.dumps(body, separators=(",", ":")).encode() for body in bodies]


async def good(http: httpx.AsyncClient, number: int, end: float, tokens: int) -> list[float]:
    """Send requests until `end`; the seconds of each answer."""
    seconds: list[float] = []
    for question in itertools.islice(itertools.cycle(QUESTIONS), number, None):
        if time.monotonic() > end:
            return seconds
        began = time.monotonic()
        turns = [{"role": "user", "content": question}]
        body = {"model": "demo", "messages": turns, "max_tokens": tokens}
        response = await http.post(PATH, json=body, headers=headers(f"good{number}"))
        response.raise_for_status()
        seconds.append(time.monotonic() - began)
    return seconds


async def bad(http: httpx.AsyncClient, number: int, end: float, bodies: list[bytes], statuses: Counter[str]) -> None:
    """Send the bodies in a loop until `end`, and count the statuses."""
    for body in itertools.islice(itertools.cycle(bodies), number, None):
        if time.monotonic() > end:
            return
        try:
            answer = await http.post(PATH, content=body, headers=headers(f"bad{number}"))
            statuses[str(answer.status_code)] += 1
        except httpx.TransportError as error:
            statuses[type(error).__name__] += 1


@dataclass(frozen=True, slots=True)
class Crowd:
    """Numbers of good and hostile clients, the duration, and the maximum tokens of a good client's answer."""

    good: int
    bad: int
    seconds: float
    tokens: int


async def phase(address: str, crowd: Crowd, bodies: list[bytes]) -> dict[str, Any]:
    """Run good clients and, unless `bodies` is empty, hostile ones until the end."""
    end, statuses = time.monotonic() + crowd.seconds, Counter[str]()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as http:
        asking = [good(http, number, end, crowd.tokens) for number in range(crowd.good)]
        hostile = [bad(http, number, end, bodies, statuses) for number in range(crowd.bad if bodies else 0)]
        results = await asyncio.gather(*asking, *hostile)
    seconds = [each for answers in results[: crowd.good] for each in answers or ()]
    report = {"answers": len(seconds), "p50 s": percentile(seconds, 0.5), "p95 s": percentile(seconds, 0.95)}
    return {**report, "statuses of hostile requests": dict(statuses)}


@app.command()
def hostile(
    good_ones: Annotated[int, typer.Option("--good", help="good clients")] = 10,
    bad_ones: Annotated[int, typer.Option("--bad", help="hostile clients")] = 5,
    limit: Annotated[int, typer.Option(help="`max_answers` of a hostile client; 0: no limit")] = 1,
    seconds: Annotated[float, typer.Option(help="duration of each phase")] = 60,
    tokens: Annotated[int, typer.Option(help="maximum tokens of a good client's answer")] = 16,
) -> None:
    """Latency of good clients without and with hostile ones."""
    crowd = Crowd(good_ones, bad_ones, seconds, tokens)
    limits = {"good": (good_ones, None), "bad": (bad_ones, limit or None)}
    clients = {
        f"{kind}{number}": ClientSettings(api_key_env=f"{kind}{number}", max_answers=max_answers)
        for kind, (count, max_answers) in limits.items()
        for number in range(count)
    }
    with served(EnsembleConfig(demo_members()), clients) as (address, process):
        asyncio.run(phase(address, crowd, []))  # warm up
        idle(address, headers("good0"))
        before = usage_of(process)
        without = asyncio.run(phase(address, crowd, []))
        print(json.dumps({"without": without}), flush=True)
        with_bad = asyncio.run(phase(address, crowd, bad_bodies()))
        print(json.dumps({"with": with_bad}), flush=True)
        idle(address, headers("good0"))
        time.sleep(10)
        ratio = with_bad["p95 s"] / without["p95 s"]
        print(json.dumps({"p95 with ÷ without": round(ratio, 2), "before": before, "after": usage_of(process)}))


if __name__ == "__main__":
    app()
