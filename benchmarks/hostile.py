"""Good and hostile clients at `specfuse-llm serve`: the waits of the good ones, and the memory at the end.

    python benchmarks/hostile.py [--good 10] [--bad 5] [--limit 1] [--seconds 60] [--tokens 16]

The server is another process over the demo members, and every client has a key. Good clients ask short questions one
after another; then concurrently with bad ones, whose keys have `max_answers` (`--limit`; 0 is none). Those send
alternately requests that once stalled the server: 200,000 stop strings, a million wrong messages, eight answers under a
grammar that takes 900 steps to close, 25,000 turns. Printed: seconds of a good answer (p50, p95) without and with the
bad ones, their ratio, the statuses for the bad ones, and the server's memory before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import string
import time
from collections import Counter
from typing import Any

import httpx
from clients import QUESTIONS, idle, kept, percentile, served

from specfuse_shared import EnsembleConfig, demo_members
from specfuse_shared.api_server.settings import ClientSettings

PATH = "/v1/chat/completions"


def headers(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}", "Content-Type": "application/json"}


def bad_bodies() -> list[bytes]:
    """One of each kind."""
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
    """Seconds of each answer until the end."""
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
    """Sends every kind cyclically until the end."""
    for body in itertools.islice(itertools.cycle(bodies), number, None):
        if time.monotonic() > end:
            return
        try:
            answer = await http.post(PATH, content=body, headers=headers(f"bad{number}"))
            statuses[str(answer.status_code)] += 1
        except httpx.TransportError as error:
            statuses[type(error).__name__] += 1


async def phase(address: str, options: argparse.Namespace, bodies: list[bytes]) -> dict[str, Any]:
    """Good clients, and a bad one for each of so many as there are bodies."""
    end, statuses = time.monotonic() + options.seconds, Counter[str]()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as http:
        asking = [good(http, number, end, options.tokens) for number in range(options.good)]
        spoiling = [bad(http, number, end, bodies, statuses) for number in range(options.bad if bodies else 0)]
        found = await asyncio.gather(*asking, *spoiling)
    seconds = [each for own in found[: options.good] for each in own or ()]
    reported = {"answers": len(seconds), "p50 s": percentile(seconds, 0.5), "p95 s": percentile(seconds, 0.95)}
    return {**reported, "bad ones were answered": dict(statuses)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--good", type=int, default=10)
    parser.add_argument("--bad", type=int, default=5)
    parser.add_argument("--limit", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()

    limits = {"good": (options.good, None), "bad": (options.bad, options.limit or None)}
    clients = {
        f"{kind}{number}": ClientSettings(api_key_env=f"{kind}{number}", max_answers=most)
        for kind, (count, most) in limits.items()
        for number in range(count)
    }
    with served(EnsembleConfig(demo_members()), clients) as (address, process):
        asyncio.run(phase(address, options, []))  # warm up
        idle(address, headers("good0"))
        before = kept(process)
        without = asyncio.run(phase(address, options, []))
        print(json.dumps({"without": without}), flush=True)
        with_bad = asyncio.run(phase(address, options, bad_bodies()))
        print(json.dumps({"with": with_bad}), flush=True)
        idle(address, headers("good0"))
        time.sleep(10)
        ratio = with_bad["p95 s"] / without["p95 s"]
        print(json.dumps({"p95 with ÷ without": round(ratio, 2), "before": before, "after": kept(process)}))


if __name__ == "__main__":
    main()
