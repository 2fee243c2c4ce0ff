"""Concurrent answers of the demo members: throughput, latency under load, deadlines, hours of requests.

    python benchmarks/serving.py throughput [--concurrent 8] [--waves 8] [--tokens 64] [--repeats 1] [--json FILE]
    python benchmarks/serving.py users [--words N] [--member PATH]…
    python benchmarks/serving.py deadline [--rows N] [--tokens N] [--seconds S]
    python benchmarks/serving.py deadline --member MODEL --member FILE.gguf --member MODEL@http://HOST:PORT/v1 …
    python benchmarks/serving.py soak [--minutes 60] [--users 8] [--cache-mib 2048] [--member MODEL]… [--json FILE]

`throughput`: ratios of times in the same run.

1. throughput  tokens a second with 8 requests of mixed length in flight ÷ the same requests one after another; all
               waves are submitted at once, so a request starts when another one ends
2. burst       the same for one wave, whose last answers run alone
3. first       the latest first segment of a wave ÷ a single request's
4. prefix      first segment of a second turn after a 1,000-token first turn, with ÷ without prefix reuse

The members have the engine's default dtype, decode greedily with the default segments, and never exit, so every member
works in every round.

`users`: a short answer during a long prompt, one prompt of many concurrent requests, and a prompt whose answer was
stopped. Members are the demo's pair, or the given ones. Each prompt is new, so the prefix cache has no match. It prints
seconds, and ratios to the same work alone in the same run.

`deadline`: how long an ensemble waits for its slowest member, with and without a round's deadline. By default SmolLM2
runs in this process, and Gemma in another process with three delays: none, three seconds at each stage, or ten seconds
at every tenth stage. Members that you name have no added delay: a GGUF file runs on llama.cpp, a model with an address
on that server. It prints, with the defaults and `preset("fast")`, without and with `round_seconds`: median seconds to
the first words, tokens a second over all answers, and the share of rounds with a late member. The questions are those
of `specfuse-llm compare`.

`soak`: requests of all kinds for the given time, to see whether memory or latency grows. Each of the `--users` sends
all kinds of requests (`KINDS`) in a loop, without a pause. For each tenth of the time it prints the memory of the
process, bytes of the caches and of the prefix cache, the number of requests, and the p50 and p99 of their seconds.
Members are the demo's, or the named models.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import multiprocessing
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import psutil
import typer
from figures import RESULTS, Figure, report
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from specfuse_shared import (
    EnsembleConfig,
    EnsembleEngine,
    EnsembleResult,
    Grammar,
    MemberConfig,
    Message,
    SamplingParams,
    SegmentEvent,
    SpecFuseError,
    Tool,
    demo_members,
)
from specfuse_shared.cli.setup import member_of
from specfuse_shared.errors import RequestTimeoutError
from specfuse_shared.loading.progress import OnLoadProgress
from specfuse_shared.members.assembly import Assembly, assemble, distant_member
from specfuse_shared.members.loading import load_in_process
from specfuse_shared.members.pipe import PipedLane, serve_members
from specfuse_shared.members.stages import Close, StageRequest
from tests.support.slow_lane import SlowLane

app = typer.Typer(help=__doc__, add_completion=False, no_args_is_help=True)

SENTENCE = "The observatory keeps a log of every clear night, its moon, its wind and its visitors. "
QUESTIONS = (
    "Why is the sky blue?",
    "Describe how a telescope gathers light and why a larger mirror shows fainter stars.",
    "Write a short story about a lighthouse keeper.",
    "Explain in detail how the moon causes the tides on both sides of the earth at the same time.",
    "Explain how a bicycle stays upright.",
    "What should a visitor to an observatory bring on a cold night, and why? Explain each thing.",
    "Give me advice on learning to play the piano as an adult.",
    "Describe a day in the life of a fisherman.",
)
DOCUMENTS = sorted((Path(__file__).parents[1] / "examples" / "documents").glob("*.md"))


def engine_with(**settings: object) -> EnsembleEngine:
    config = EnsembleConfig(demo_members(), exit="never", reuse_prefixes=False)
    return EnsembleEngine(replace(config, **settings)).load()  # type: ignore[arg-type]


def conversations(count: int) -> list[list[Message]]:
    """Questions without a system message, or with one that has 15, 30 or 45 words of a document."""
    chats = []
    for n in range(count):
        words = DOCUMENTS[n % len(DOCUMENTS)].read_text("utf-8").split()[: (n + n // len(QUESTIONS)) % 4 * 15]
        system = [Message("system", f"You answer visitors' questions in detail. {' '.join(words)}")] if words else []
        chats.append([*system, Message("user", QUESTIONS[n % len(QUESTIONS)])])
    return chats


def first_segment(engine: EnsembleEngine, messages: list[Message], params: SamplingParams) -> float:
    """Seconds from the call to the first text."""
    start = time.perf_counter()
    for event in engine.stream(messages, params):
        if isinstance(event, SegmentEvent) and event.text:
            return time.perf_counter() - start
    raise AssertionError("the answer was empty")


def waves_of(concurrent: int, waves: int, tokens: int, repeats: int) -> list[Figure]:
    steady, bursts, waits = [], [], []
    with engine_with(max_concurrent=concurrent) as shared:
        requests, params = conversations(concurrent * waves), SamplingParams(max_tokens=tokens)
        shared.generate(requests[0], SamplingParams(max_tokens=20))
        for _ in range(repeats):
            alone = [shared.generate(messages, params) for messages in requests]
            burst, burst_seconds = together(shared, requests[:concurrent], params)
            flow, flow_seconds = together(shared, requests, params)
            slow = _speed(alone, sum(r.total_seconds for r in alone))
            slow_burst = _speed(alone[:concurrent], sum(r.total_seconds for r in alone[:concurrent]))
            steady.append(_speed(flow, flow_seconds) / slow)
            bursts.append(_speed(burst, burst_seconds) / slow_burst)
            last = max(r.first_segment_seconds or 0.0 for r in burst)
            lone = statistics.median(r.first_segment_seconds or 0.0 for r in alone)
            waits.append(last / lone)
            notes = f"{_speed(flow, flow_seconds):.1f} ÷ {slow:.1f} tokens/s, {len(requests)} requests"
            burst_notes = f"{_speed(burst, burst_seconds):.1f} ÷ {slow_burst:.1f} tokens/s"
            wait_notes = f"{last:.2f} s ÷ {lone:.2f} s"
    return [
        Figure(f"throughput with {concurrent} in flight ÷ one by one", statistics.median(steady), 4.5, True, notes),
        Figure(f"throughput of {concurrent} alone ÷ one by one", statistics.median(bursts), 4.5, True, burst_notes),
        Figure(f"last first segment of {concurrent} ÷ a lone one", statistics.median(waits), 3, False, wait_notes),
    ]


def together(
    engine: EnsembleEngine, requests: list[list[Message]], params: SamplingParams
) -> tuple[list[EnsembleResult], float]:
    """The answers to concurrent requests, and the seconds until the last one."""
    start = time.perf_counter()
    results = engine.generate_batch(requests, params)
    seconds = time.perf_counter() - start
    return [result for result in results if isinstance(result, EnsembleResult)], seconds


def _speed(results: list[EnsembleResult], seconds: float) -> float:
    """Tokens a second."""
    return sum(result.usage.completion_tokens for result in results) / seconds


def prefix(repeats: int) -> Figure:
    ratios, note = [], ""
    with engine_with(reuse_prefixes=True) as reusing, engine_with() as plain:
        for n in range(repeats):
            text = "Describe the log."
            while min(len(m.encode_prompt([Message("user", text)])) for m in reusing._members) < 1000:
                text = SENTENCE + text
            talk = [Message("user", f"Log {n}. {text}")]
            answer = reusing.generate(talk, SamplingParams(max_tokens=40)).text
            talk += [Message("assistant", answer), Message("user", "And who visits?")]
            params = SamplingParams(max_tokens=20)
            with_reuse, without = first_segment(reusing, talk, params), first_segment(plain, talk, params)
            ratios.append(with_reuse / without)
            note = f"{with_reuse:.2f} s ÷ {without:.2f} s"
    return Figure("first segment of a second turn, reuse ÷ none", statistics.median(ratios), 0.35, False, note)


@app.command()
def throughput(
    concurrent: Annotated[int, typer.Option(help="requests in flight")] = 8,
    waves: Annotated[int, typer.Option(help="number of waves of requests")] = 8,
    tokens: Annotated[int, typer.Option(help="maximum tokens of an answer")] = 64,
    repeats: Annotated[int, typer.Option(help="runs of each measurement; the median counts")] = 1,
    out: Annotated[Path, typer.Option("--json", help="file of the figures")] = RESULTS / "serving.json",
) -> None:
    """Throughput of concurrent answers ÷ of answers one after another."""
    figures = [*waves_of(concurrent, waves, tokens, repeats), prefix(repeats)]
    report("serving, demo members", figures, out)


# ── users ─────────────────────────────────────────────────────────────────────────────────────────

_SEA = ["sea", "tide", "moon", "wind", "sand", "gull", "rock", "boat", "salt", "wave", "foam", "reef"]
_SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
_numbers = itertools.count()


@app.command()
def users(
    words: Annotated[int, typer.Option(help="words of a long prompt")] = 3000,
    member: Annotated[list[str], typer.Option(help="a member; repeat the option for several")] = [],  # noqa: B006
) -> None:
    """Short answers during long prompts, shared prompts, and prompts of stopped answers."""
    members = [MemberConfig(name) for name in member] or demo_members()
    table = Table("work", "alone", "concurrent or again", "ratio")
    with EnsembleEngine(EnsembleConfig(members, max_concurrent=16)) as engine, ThreadPoolExecutor(16) as pool:
        engine.generate("Hello", _SHORT)
        for rows in (_concurrent(engine, pool, words), _alike(engine, pool, words // 3), _stopped(engine, words // 3)):
            for name, alone, shared in rows:
                table.add_row(name, f"{alone:.2f} s", f"{shared:.2f} s", f"{shared / alone:.2f}")
    Console(width=110).print(table)


def _concurrent(engine: EnsembleEngine, pool: ThreadPoolExecutor, words: int) -> Sequence[tuple[str, float, float]]:
    """Short answers one after another, during the prefill and answer of a long prompt."""
    alone = statistics.median(_short_seconds(engine, _question()) for _ in range(3))
    long_alone = _short_seconds(engine, _prompt(words))
    long = pool.submit(_short_seconds, engine, _prompt(words))
    time.sleep(0.5)
    short = []
    while not long.done():
        short.append(_short_seconds(engine, _question()))
    return [
        (f"4 tokens during {words} words, median", alone, statistics.median(short)),
        (f"4 tokens during {words} words, slowest of {len(short)}", alone, max(short)),
        (f"{words} words during such answers", long_alone, long.result()),
    ]


def _alike(engine: EnsembleEngine, pool: ThreadPoolExecutor, words: int) -> Sequence[tuple[str, float, float]]:
    """Seconds to the slowest first segment: one request, four with one prompt, eight with one system prompt."""
    one, four, system = (_prompt(words) for _ in range(3))
    alone = _first_segment(engine, one)
    of_four = max(pool.map(lambda _: _first_segment(engine, four), range(4)))
    of_eight = max(pool.map(lambda n: _first_segment(engine, f"{system} What of {n}?"), range(8)))
    return [
        (f"first segment, four times {words} words", alone, of_four),
        (f"first segment, eight users after the same {words} words", alone, of_eight),
    ]


def _stopped(engine: EnsembleEngine, words: int) -> Sequence[tuple[str, float, float]]:
    """Seconds to the first segment of a repeated prompt, after a finished and after a stopped answer."""
    finished, stopped = _prompt(words), _prompt(words)
    engine.generate(finished, _SHORT)
    again = statistics.median(_first_segment(engine, f"{finished} {n}") for n in range(3))
    _first_segment(engine, stopped, stop=True)
    while engine.metrics().running:
        time.sleep(0.01)
    after_stop = statistics.median(_first_segment(engine, f"{stopped} {n}") for n in range(3))
    return [("first segment again, after an end and after a stop", again, after_stop)]


def _short_seconds(engine: EnsembleEngine, prompt: str) -> float:
    began = time.perf_counter()
    engine.generate(prompt, _SHORT)
    return time.perf_counter() - began


def _first_segment(engine: EnsembleEngine, prompt: str, stop: bool = False) -> float:
    """Seconds to the first segment; with `stop`, a long answer is stopped after it."""
    params = SamplingParams(max_tokens=500, ignore_eos=True) if stop else _SHORT
    began, stream = time.perf_counter(), engine.stream(prompt, params)
    next(event for event in stream if isinstance(event, SegmentEvent))
    seconds = time.perf_counter() - began
    if stop:
        stream.close()  # type: ignore[attr-defined]
    else:
        list(stream)
    return seconds


def _question() -> str:
    return f"Name {next(_numbers)} colours."


def _prompt(words: int) -> str:
    number = next(_numbers)
    chance = random.Random(number)
    return f"{number} " + " ".join(chance.choice(_SEA) for _ in range(words))


# ── deadline ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Slowness:
    """A delay of `seconds` before every `nth` stage."""

    title: str
    seconds: float = 0.0
    nth: int = 1
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def delay(self, request: StageRequest) -> float:
        return 0.0 if isinstance(request.op, Close) or next(self.numbers) % self.nth else self.seconds


DELAYS = (Slowness("no delay"), Slowness("3 s late", 3.0), Slowness("every tenth 10 s late", 10.0, 10))


class Mixed(EnsembleEngine):
    """The first member runs in this process, the second one in another process with the delay `slowness`."""

    slowness = DELAYS[0]

    def _assemble(self, on_progress: OnLoadProgress | None) -> Assembly:
        here, there = self.config.member_configs
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        context.Process(target=serve_members, args=(theirs, [there], "dynamic", 1), daemon=True).start()
        local = assemble([load_in_process(here)], self._metrics.forward)
        pipe = PipedLane(there.label, ours, self._metrics.forward)
        members = (*local.members, distant_member(there, pipe.members[0]))
        return Assembly(members, local.own, (SlowLane(pipe, lambda request: self.slowness.delay(request)),))


@app.command()
def deadline(
    member: Annotated[list[str] | None, typer.Option(help="a model, a GGUF file, or MODEL@http://…/v1")] = None,
    rows: Annotated[int, typer.Option(help="questions")] = 6,
    tokens: Annotated[int, typer.Option(help="maximum tokens of an answer")] = 40,
    seconds: Annotated[float, typer.Option(help="the deadline, in seconds")] = 1.0,
) -> None:
    """Latency with a slow member, with and without `round_seconds`."""
    console = Console(width=110)
    lines = files("specfuse_shared.comparing").joinpath("own_questions.jsonl").read_text("utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines[:: max(1, len(lines) // rows)]][:rows]
    params = SamplingParams(max_tokens=tokens)
    members = [member_of(model, _here(model)) for model in member] if member else demo_members()
    table = Table(title=f"{rows} answers of up to {tokens} tokens, one at a time", title_justify="left")
    for head in ("members", "preset", "round_seconds", "first words", "tokens a second", "late rounds", "exits"):
        table.add_column(head)
    with (EnsembleEngine if member else Mixed)(EnsembleConfig(members)) as engine:
        engine.generate(questions[-1], params)
        delays = (Slowness("as they are"),) if member else DELAYS
        for slowness, preset, limit in itertools.product(delays, ("default", "fast"), (None, seconds)):
            if isinstance(engine, Mixed):
                engine.slowness = slowness
            engine.config = EnsembleConfig.preset(preset, members, round_seconds=limit)  # the same members
            reported = _reported([engine.generate(question, params) for question in questions])
            table.add_row(slowness.title, preset, str(limit), *reported.values())
            console.print(slowness.title, preset, limit, dict(reported))
    console.print(table)


def _here(model: str) -> Mapping[str, str]:
    """Settings of a member that runs on this machine: on llama.cpp, or in float32."""
    return {"backend": "llama.cpp"} if model.endswith(".gguf") else {"dtype": "float32"}


def _reported(results: Sequence[EnsembleResult]) -> Mapping[str, str]:
    first = statistics.median(result.first_segment_seconds or result.total_seconds for result in results)
    speed = sum(r.usage.completion_tokens for r in results) / sum(r.total_seconds for r in results)
    rounds = [record for result in results for record in result.rounds]
    late = sum(bool(record.absent) for record in rounds)
    exits = sum(leaving.reason == "late" for record in rounds for leaving in record.exits)
    return {
        "first words": f"{first:.2f} s",
        "tokens a second": f"{speed:.1f}",
        "late rounds": f"{late / len(rounds):.0%}",
        "exits": f"{exits} of {len(results)}",
    }


# ── soak ──────────────────────────────────────────────────────────────────────────────────────────

WORDS = ("why", "how", "the", "sea", "moon", "tide", "star", "ship", "wind", "night", "glass", "map", "door", "write")
SYSTEM = "You know the sea, its tides, its ships and its harbours, and you answer in short sentences. " * 6
TOOL = Tool("ring", "Ring a bell.", {"type": "object", "properties": {"times": {"type": "integer"}}})
TENTHS = 10
_PARAMS = SamplingParams(max_tokens=32)
_ENDLESS = SamplingParams(max_tokens=200, ignore_eos=True)


@dataclass
class User:
    """A client of the engine, with a random generator; long prompts have `long_words` words."""

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
    """A tenth of the time: MiB of the process at its end, maximum bytes of the caches, seconds of its requests, and
    processor seconds."""

    minute: float
    process_mib: float = 0.0
    cpu_seconds: float = 0.0
    cache_bytes: int = 0
    prefix_bytes: int = 0
    caches_bytes: int = 0
    """The maximum of their sum."""
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
    """Send requests until the end. Each user loops over all kinds from a different start, so tenths are alike."""
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
    """The end of each tenth of the time."""
    began = time.monotonic()
    return (began + 60 * minutes * number / TENTHS for number in range(1, TENTHS + 1))


def _watch(engine: EnsembleEngine, tenth: Tenth, ended: float) -> None:
    """Record the maximum of the caches until the tenth ends, then the memory of the process."""
    before = time.process_time()
    while (remaining := ended - time.monotonic()) > 0:
        now = engine.metrics()
        tenth.cache_bytes = max(tenth.cache_bytes, now.cache_bytes)
        tenth.prefix_bytes = max(tenth.prefix_bytes, now.prefix_bytes)
        tenth.caches_bytes = max(tenth.caches_bytes, now.cache_bytes + now.prefix_bytes)
        time.sleep(min(0.25, remaining))
    tenth.cpu_seconds = time.process_time() - before
    tenth.process_mib = psutil.Process().memory_info().rss / 2**20


@app.command("soak")
def soak_members(
    minutes: Annotated[float, typer.Option(help="duration in minutes")] = 60,
    users: Annotated[int, typer.Option(help="concurrent users")] = 8,
    cache_mib: Annotated[int, typer.Option(help="MiB for caches")] = 2048,
    long_words: Annotated[int, typer.Option(help="words of a long prompt")] = 1500,
    member: Annotated[list[str], typer.Option(help="a hub id, folder or GGUF file")] = [],  # noqa: B006
    out: Annotated[Path, typer.Option("--json", help="file of the report")] = RESULTS / "soak.json",
) -> None:
    """Requests of all kinds for the given time."""
    console = Console(width=120)
    members = member or demo_members()
    with EnsembleEngine(EnsembleConfig(members, cache_bytes=cache_mib << 20)).load() as engine:
        loaded = psutil.Process().memory_info().rss / 2**20
        console.print(f"loaded: {loaded:.0f} MiB; caches may use {cache_mib} MiB, an eighth of it for prefixes")
        result = soak(engine, minutes, users, long_words, lambda tenth: _show(console, tenth))
        gc.collect()
        after = engine.metrics()
        table = Table("kind", "requests", title=f"soak, {minutes:g} minutes, {users} users")
        for name, count in result.kinds.items():
            table.add_row(name, str(count))
        console.print(table)
    console.print(f"ended: {after.requests}; in caches: {after.cache_bytes} bytes; errors: {result.errors or 'none'}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"loaded_mib": loaded, **asdict(result)}, indent=1) + "\n")


def _show(console: Console, tenth: Tenth) -> None:
    console.print(
        f"from minute {tenth.minute:4.1f}: {tenth.process_mib:6.0f} MiB; caches {tenth.cache_bytes / 2**20:5.0f} MiB, "
        f"prefixes {tenth.prefix_bytes / 2**20:5.0f} MiB; {len(tenth.seconds)} requests, p50 {tenth.p50:.2f} s, "
        f"p99 {tenth.p99:.2f} s"
    )


if __name__ == "__main__":
    app()
