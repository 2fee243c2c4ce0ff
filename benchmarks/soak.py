"""Requests of all kinds for as long as you like: does memory stay, do answers take as long as at first?

    python benchmarks/soak.py [--minutes 60] [--users 8] [--cache-mib 2048] [--member MODEL]… [--json FILE]

`--users` ask without a pause, each a kind of request after the other (`KINDS`). Prints for each tenth of the time: the
memory of the process, bytes of caches and of remembered prompts, requests, and p50 and p99 of their seconds. Members
are the demo's, or the models named.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from specfuse_shared import (
    EnsembleConfig,
    EnsembleEngine,
    EnsembleResult,
    Grammar,
    SamplingParams,
    SegmentEvent,
    SpecFuseError,
    Tool,
    demo_members,
)
from specfuse_shared.errors import RequestTimeoutError

WORDS = ("why", "how", "the", "sea", "moon", "tide", "star", "ship", "wind", "night", "glass", "map", "door", "write")
SYSTEM = "You know the sea, its tides, its ships and its harbours, and you answer in short sentences. " * 6
TOOL = Tool("ring", "Ring a bell.", {"type": "object", "properties": {"times": {"type": "integer"}}})
TENTHS = 10
_PARAMS = SamplingParams(max_tokens=32)
_ENDLESS = SamplingParams(max_tokens=200, ignore_eos=True)


@dataclass
class User:
    """The client: an engine, chance, and words for long prompts."""

    engine: EnsembleEngine
    chance: random.Random
    long_words: int

    def words(self, count: int) -> str:
        return " ".join(self.chance.choice(WORDS) for _ in range(count))

    def chat(self) -> None:
        self.engine.generate(self.words(20), replace(_PARAMS, temperature=self.chance.choice((0.0, 0.8))))

    def stream(self) -> None:
        list(self.engine.stream(self.words(40), _PARAMS))

    def batch(self) -> None:
        self._whole([self.words(self.chance.choice((5, 50))) for _ in range(4)], _PARAMS)

    def several(self) -> None:
        self._whole([self.words(60)] * 4, replace(_PARAMS, temperature=0.8))

    def grammar(self) -> None:
        self.engine.generate(self.words(10), replace(_PARAMS, grammar=Grammar.choice(["yes", "no", self.words(2)])))

    def tools(self) -> None:
        params = replace(_PARAMS, max_tokens=96)
        self.engine.generate(self.words(10), params, tools=[TOOL], tool_choice="required")

    def logprobs(self) -> None:
        self.engine.generate(self.words(20), replace(_PARAMS, logprobs=True, top_logprobs=3))

    def stopped(self) -> None:
        events = self.engine.stream(self.words(40), _ENDLESS)
        next(event for event in events if isinstance(event, SegmentEvent))
        events.close()  # type: ignore[attr-defined]

    def timed_out(self) -> None:
        with suppress(RequestTimeoutError):
            self.engine.generate(self.words(40), _ENDLESS, timeout=0.05 + self.chance.random())

    def long(self) -> None:
        self.engine.generate(self.words(self.long_words), replace(_PARAMS, max_tokens=8))

    def shared(self) -> None:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.words(10)}]
        self.engine.generate(messages, _PARAMS)

    def _whole(self, questions: list[str], params: SamplingParams) -> None:
        for result in self.engine.generate_batch(questions, params):
            assert isinstance(result, EnsembleResult)


KINDS: tuple[Callable[[User], None], ...] = (
    *(User.chat, User.stream, User.batch, User.several, User.grammar, User.tools, User.logprobs),
    *(User.stopped, User.timed_out, User.long, User.shared),
)


@dataclass
class Tenth:
    """A tenth of the time: MiB of the process at its end, most bytes of caches at a time, seconds of its requests, and
    those that processors worked."""

    minute: float
    process_mib: float = 0.0
    cpu_seconds: float = 0.0
    cache_bytes: int = 0
    prefix_bytes: int = 0
    caches_bytes: int = 0
    """The most of both together."""
    seconds: list[float] = field(default_factory=list)

    @property
    def p50(self) -> float:
        return statistics.median(self.seconds) if self.seconds else 0.0

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[math.ceil(0.99 * len(self.seconds)) - 1] if self.seconds else 0.0


@dataclass
class Report:
    tenths: list[Tenth] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def soak(
    engine: EnsembleEngine,
    minutes: float,
    users: int,
    long_words: int = 1500,
    on_tenth: Callable[[Tenth], None] = lambda tenth: None,
) -> Report:
    """Ask until the end. Each user goes through all kinds, starting with another one, so that tenths are alike."""
    report, over = Report(), threading.Event()
    lock = threading.Lock()
    tenth = Tenth(0.0)

    def ask(number: int) -> None:
        user = User(engine, random.Random(number), long_words)
        for kind in itertools.islice(itertools.cycle(KINDS), number, None):
            if over.is_set():
                return
            began = time.monotonic()
            try:
                kind(user)
            except SpecFuseError as error:
                report.errors.append(f"{kind.__name__}: {type(error).__name__}: {error}")
            with lock:
                report.kinds[kind.__name__] = report.kinds.get(kind.__name__, 0) + 1
                tenth.seconds.append(time.monotonic() - began)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(users)]
    for thread in threads:
        thread.start()
    try:
        for ended in _tenths(minutes):
            _watch(engine, tenth, ended)
            with lock:
                done, tenth = tenth, Tenth(tenth.minute + minutes / TENTHS)
            report.tenths.append(done)
            on_tenth(done)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    return report


def _tenths(minutes: float) -> Iterator[float]:
    """When each tenth of the time ends."""
    began = time.monotonic()
    return (began + 60 * minutes * number / TENTHS for number in range(1, TENTHS + 1))


def _watch(engine: EnsembleEngine, tenth: Tenth, ended: float) -> None:
    """Look at caches until the tenth has ended, then at the process."""
    before = time.process_time()
    while (left := ended - time.monotonic()) > 0:
        now = engine.metrics()
        tenth.cache_bytes = max(tenth.cache_bytes, now.cache_bytes)
        tenth.prefix_bytes = max(tenth.prefix_bytes, now.prefix_bytes)
        tenth.caches_bytes = max(tenth.caches_bytes, now.cache_bytes + now.prefix_bytes)
        time.sleep(min(0.25, left))
    tenth.cpu_seconds = time.process_time() - before
    tenth.process_mib = psutil.Process().memory_info().rss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--cache-mib", type=int, default=2048)
    parser.add_argument("--long-words", type=int, default=1500)
    parser.add_argument("--member", action="append", help="a hub id, folder or GGUF file")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "soak.json")
    options = parser.parse_args()
    console = Console(width=120)
    members = options.member or demo_members()
    with EnsembleEngine(EnsembleConfig(members, cache_bytes=options.cache_mib << 20)).load() as engine:
        loaded = psutil.Process().memory_info().rss / 2**20
        console.print(f"loaded: {loaded:.0f} MiB; caches may take {options.cache_mib}, of which an eighth for prompts")
        report = soak(engine, options.minutes, options.users, options.long_words, lambda tenth: _show(console, tenth))
        gc.collect()
        left = engine.metrics()
        table = Table("kind", "requests", title=f"soak, {options.minutes:g} minutes, {options.users} users")
        for name, count in report.kinds.items():
            table.add_row(name, str(count))
        console.print(table)
    console.print(f"ended: {left.requests}; caches left: {left.cache_bytes} bytes; errors: {report.errors or 'none'}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"loaded_mib": loaded, **asdict(report)}, indent=1) + "\n")


def _show(console: Console, tenth: Tenth) -> None:
    console.print(
        f"from minute {tenth.minute:4.1f}: {tenth.process_mib:6.0f} MiB; caches {tenth.cache_bytes / 2**20:5.0f} MiB, "
        f"prompts {tenth.prefix_bytes / 2**20:5.0f} MiB; {len(tenth.seconds)} requests, p50 {tenth.p50:.2f} s, "
        f"p99 {tenth.p99:.2f} s"
    )


if __name__ == "__main__":
    main()
