"""Speed of paged or dynamic execution on one GPU. Weights are random, with the shapes of real models.

    python benchmarks/gpu.py [--repeats 5] [--minutes 6] [--only WORDS] [--without WORDS] [--execution dynamic]
                             [--compare-vllm URL] [--json FILE]
    python benchmarks/gpu.py --tiny      the same code on a CPU with small sizes, as a test

1. decode    a member's ms a token at 512 tokens of context ÷ its floor: bytes (weights, cache) / bandwidth
2. verify    five candidates of 10 tokens in one forward pass ÷ a decode step
3. round     a round of 1, 2, 3 and 5 members ÷ Σ over members of 10 forward passes at the floor
4. first     seconds to the first segment at 512 and 4,000 prompt tokens
5. answers   tokens a second of 1, 8 and 32 concurrent answers
6. guesses   seconds of 1, 8 and 32 answers with speculation ÷ without (1 to 5 run without); five members with equal
             weights ÷ one member
   users     new lengths ÷ the same lengths again; eight answers with one new prompt ÷ one answer; the longest pause of
             eight streams during a long prompt
7. contexts  ms a token of each member, and tokens a second of 1, 8 and 32 answers with and without speculation, after
             512 to 32,768 tokens, within the limits of members and memory
8. int8      all products of the first member for 1, 8 and 32 tokens, with int8 weights ÷ reading them in bf16
9. memory    transformers' `generate` for comparison, and the forward passes of each part: replayed, as packed steps
             without a graph, and dynamic

Bandwidth is measured on the same device. Members run in bf16, greedily, with 10 tokens a segment, without exit, and
answers do not end before their length, so that every member works in every round. The first run compiles layers; a
second one loads them. Random weights do not show whether results are correct: their logits are so small that a wrong
mask has little effect. The tests check that. Members are loaded in order while memory lasts, at least the first one.
Results are written after every part, at the time limit, after an interruption (Ctrl-C, SIGTERM), and with the error
after a failed part. The last output is a table for docs/performance.md.

With --compare-vllm, the first member's decode is compared with a vLLM server on the same kind of GPU. The server must
serve a model of the same shape (`vllm serve FOLDER --load-format dummy` also uses random weights).
"""

from __future__ import annotations

import argparse
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench_members import SEGMENT, engine_over, forwards_a_token, forwards_of, forwards_text, members, prompt
from figures import RESULTS, Figure, markdown, peak_bytes, report, write
from vllm_peer import Peer

from specfuse_shared import EnsembleEngine, MemberConfig, Message, SamplingParams, SegmentEvent
from specfuse_shared.members.local.batching import run_stage
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.members.local.session import LocalSession
from specfuse_shared.members.stages import ScoringQuery
from specfuse_shared.placement.sizing import host_memory
from specfuse_shared.runtime.int8_products import int8_linear
from specfuse_shared.runtime.packed_layout import PAGE

CANDIDATES = 5
_SHARE_FOR_WEIGHTS = 0.8
_WARMING = 2
"""Runs of concurrent answers before the timed one, which capture most of their steps."""

_UNTIMED = 2
"""First runs of a measurement, which can capture steps and are not counted."""


@dataclass(frozen=True)
class Sizes:
    """Tokens of the short and the long prompt, tokens of an answer, numbers of concurrent answers, bytes of the copy,
    and prompt tokens of the measurement of contexts."""

    short: int = 512
    long: int = 4000
    tokens: int = 64
    at_once: tuple[int, ...] = (1, 8, 32)
    copied: int = 1 << 31
    contexts: tuple[int, ...] = (512, 2048, 8192, 32768)


TINY = Sizes(48, 160, 24, (1, 2, 4), 1 << 24, (48, 320))


class Bench:
    def __init__(self, sizes: Sizes, repeats: int, device: torch.device, execution: str, tiny: bool) -> None:
        self.figures: list[Figure] = []
        self.steps: dict[str, float] = {}
        self.sizes, self.repeats, self.device, self.execution = sizes, repeats, device, execution
        self.facts: list[tuple[str, str]] = []
        self.bandwidth = self._bandwidth()
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory()[1]
        dtype = torch.float32 if tiny else torch.bfloat16
        self.members = list(members(tiny, device, dtype, execution, _SHARE_FOR_WEIGHTS * free))
        for runner in (member.runner for member in self.members if member.runner.is_paged):
            runner.open_arena(2 * sizes.contexts[-1] // PAGE)  # used until an engine opens another one
            runner.warm_up()
        self.facts += [(member.name, _described(member)) for member in self.members]

    def parts(self, peer: Peer | None) -> Iterator[tuple[str, Callable[[], Sequence[Figure]]]]:
        """The measurements by name, in order. Each returns figures, and can add facts."""
        for member in self.members:
            yield f"decode of {member.name}", lambda m=member: [self._of_floor(m, self.decode(m))]  # type: ignore[misc]
            yield f"verification of {member.name}", lambda m=member: [self._of_step(m, self.verify(m))]  # type: ignore[misc]
        if peer is not None:
            yield "the decode of vLLM", lambda: [self._of_peer(self.members[0], peer)]
        for count in (1, 2, 3, 5):
            if count <= len(self.members):
                yield f"a round of {count}", lambda n=count: [self.round(self.members[:n])]  # type: ignore[misc]
        yield "the first segment", lambda: self.first(self.members)
        yield "answers at once", lambda: self.answers(self.members)
        yield "speculation", lambda: self.speculation(self.members)
        yield "speculation of the same weights", lambda: same_weights(self, self.members[0])
        yield "new lengths", lambda: new_lengths(self, self.members)
        yield "one new prompt of eight answers", lambda: one_prompt(self, self.members)
        yield "a pause", lambda: longest_pause(self, self.members)
        yield "products with int8 weights", lambda: self.int8_products(self.members[0])
        yield from context_parts(self)

    def run(self, minutes: float, names: tuple[str, str], peer: Peer | None, save: Callable[[], None]) -> None:
        """Run all parts that begin within `minutes`, with the first of `names` in their name and without the second;
        call `save` after each."""
        only, without = names
        end, name = time.monotonic() + 60 * minutes, ""
        try:
            for name, part in self.parts(peer):
                if only not in name or (without and without in name):
                    continue
                before = forwards_of(self.members)
                if time.monotonic() > end:
                    self.facts.append((name, f"left out: {minutes:g} minutes were over"))
                    continue
                try:
                    self.figures += part()
                except Exception as error:  # perhaps an unsupported GPU: the other parts can still succeed
                    self.facts.append((name, f"failed: {type(error).__name__}: {error}".splitlines()[0][:300]))
                self.facts.append((f"forward passes, {name}", forwards_text(forwards_of(self.members) - before)))
                save()
        except KeyboardInterrupt:
            self.facts.append((name, "interrupted; earlier parts are complete"))
            save()
            return
        self.facts.append(("graphs", "; ".join(f"{m.name}: {m.report.graphs}" for m in self.members)))
        self.facts.append(("memory", self._memory()))
        save()

    # ── one member ───────────────────────────────────────────────────────────────────────────────

    def decode(self, member: LocalMember) -> float:
        """Seconds a token of plain decoding after the short prompt; the time of `generate` is a fact."""
        step = self.step_seconds(member, self.sizes.short, self.repeats)
        times = [self.timed(lambda: self.generate(member)) for _ in range(self.repeats + 1)]
        library = statistics.median(times[1:]) / self.sizes.tokens
        comparison = f"{1e3 * library:.2f} ms a token; decode takes {step / library:.2f} of it"
        self.facts.append((f"generate, {member.name}", comparison))
        self.steps[member.name] = step
        return step

    def step_seconds(self, member: LocalMember, size: int, repeats: int) -> float:
        """Seconds a token of plain decoding after a prompt of `size` tokens."""
        session, seconds = self.opened(member, size), []
        for _ in range(_UNTIMED):
            run_stage(session.draft_alone(SEGMENT, 0))
        for number in range(repeats):
            seconds.append(self.timed(lambda n=number: run_stage(session.draft_alone(self.sizes.tokens, n + 1))))  # type: ignore[misc]
        session.release()
        return statistics.median(seconds) / self.sizes.tokens

    @torch.inference_mode()
    def generate(self, member: LocalMember) -> None:
        """Decode as many tokens after the same prompt with transformers' greedy `generate`."""
        model = member.runner.model
        ids = torch.tensor([member.encode_prompt(prompt([member], self.sizes.short))], device=self.device)
        before = model.config._attn_implementation
        model.set_attn_implementation("eager" if before.endswith("eager") else "sdpa")
        length = {"max_new_tokens": self.sizes.tokens, "min_new_tokens": self.sizes.tokens}
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **length)
        model.set_attn_implementation(before)

    def verify(self, member: LocalMember) -> float:
        """Seconds of a member to verify five candidates after the short prompt."""
        session, seconds = self.opened(member, self.sizes.short), []
        for number in range(_UNTIMED + self.repeats):
            texts = [self.text(member, number * CANDIDATES + n) for n in range(CANDIDATES)]
            queries = [ScoringQuery(text, False) for text in texts]
            seconds.append(self.timed(lambda queries=queries: run_stage(session.verify(queries))))  # type: ignore[misc]
            run_stage(session.commit(texts[0]))
        session.release()
        return statistics.median(seconds[_UNTIMED:])

    def opened(self, member: LocalMember, size: int) -> LocalSession:
        ids = member.encode_prompt(prompt([member], size))
        session = member.open(ids, self.params(), 0)
        run_stage(session.prefill())
        return session

    def text(self, member: LocalMember, seed: int) -> str:
        """Ten random tokens of a member."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(len(member.prompts.tokenizer), (SEGMENT,), generator=generator)
        return " " + member.codec.decode(ids.tolist())

    def floor(self, member: LocalMember) -> float:
        """Seconds of the device to read the weights and the cache for a decoded token."""
        model = member.runner.model
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        embeddings = 0 if tied else model.get_input_embeddings().weight.nbytes
        cache = (self.sizes.short + self.sizes.tokens // 2) * member.bytes_per_token
        return (member.report.memory_bytes - embeddings + cache) / self.bandwidth

    def int8_products(self, member: LocalMember) -> list[Figure]:
        """All products of a member for 1, 8 and 32 tokens, with int8 weights of the same shapes."""
        layers = [m for m in member.runner.model.modules() if isinstance(m, torch.nn.Linear)]
        weights = [
            (
                torch.randint(-127, 128, m.weight.shape, dtype=torch.int8, device=self.device),
                m.weight.float().amax(1) / 127,
            )
            for m in layers
        ]
        floor = sum(2 * numbers.numel() for numbers, _ in weights) / self.bandwidth
        figures = []
        for tokens in (1, 8, 32):
            inputs = {m.in_features: torch.randn(tokens, m.in_features, device=self.device) for m in layers}
            inputs = {size: x.to(layers[0].weight.dtype) for size, x in inputs.items()}

            def multiply(inputs: dict[int, torch.Tensor] = inputs) -> None:
                for numbers, scales in weights:
                    int8_linear(inputs[numbers.shape[1]], numbers, scales)

            replay = self._replayed(multiply)
            seconds = min(self.timed(replay) for _ in range(self.repeats + 1))
            detail = f"{1e3 * seconds:.2f} ms ÷ {1e3 * floor:.2f} ms"
            name = f"int8 products ÷ reading bf16, tokens: {tokens}"
            figures.append(Figure(name, seconds / floor, 0.9, False, detail))
        return figures

    def _replayed(self, work: Callable[[], None]) -> Callable[[], object]:
        """The work as a CUDA graph, which excludes launch times; on a CPU the work itself."""
        if self.device.type != "cuda":
            return work
        work()
        self._wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def _of_floor(self, member: LocalMember, step: float) -> Figure:
        floor = self.floor(member)
        detail = f"{1e3 * step:.2f} ms ÷ {1e3 * floor:.2f} ms"
        return Figure(f"decode ÷ bytes/bandwidth, {member.name}", step / floor, 1.45, False, detail)

    def _of_peer(self, member: LocalMember, peer: Peer) -> Figure:
        """Our decode compared with the server's, after prompts of equal length."""
        ids = [5] * self.sizes.short
        speeds = [peer.speed([ids], self.sizes.tokens) for _ in range(self.repeats + 1)]
        theirs, ours = statistics.median(speeds[1:]), 1 / self.steps[member.name]
        for count in self.sizes.at_once[1:]:
            rate = peer.speed([ids] * count, self.sizes.tokens)
            self.facts.append((f"vLLM, {count} at once", f"{rate:.1f} tokens/s"))
        detail = f"{ours:.1f} ÷ {theirs:.1f} tokens/s, vLLM {peer.version} with {peer.model}"
        return Figure(f"decode of {member.name} ÷ vLLM's", ours / theirs, 0.8, True, detail)

    def _of_step(self, member: LocalMember, verify: float) -> Figure:
        step = self.steps[member.name]
        detail = f"{1e3 * verify:.2f} ms ÷ {1e3 * step:.2f} ms"
        return Figure(f"verify {CANDIDATES} ÷ a decode step, {member.name}", verify / step, 1.35, False, detail)

    # ── the ensemble ─────────────────────────────────────────────────────────────────────────────

    def engine(
        self, ensemble: Sequence[LocalMember], speculation: str = "off"
    ) -> AbstractContextManager[EnsembleEngine]:
        """An engine over loaded members; the memory of earlier engines is freed."""
        return engine_over(ensemble, self.members, speculation=speculation)

    def round(self, ensemble: Sequence[LocalMember]) -> Figure:
        messages, seconds = prompt(ensemble, self.sizes.short), []
        with self.engine(ensemble) as engine:
            for _ in range(self.repeats + 1):
                result = engine.generate(messages, self.params())
                full = [r for r in result.rounds[:-1] if r.verified or len(ensemble) == 1]
                seconds.append(statistics.median(r.timing.total for r in full))
        spent, floor = statistics.median(seconds[1:]), SEGMENT * sum(map(self.floor, ensemble))
        name = f"a round of {len(ensemble)} ÷ {SEGMENT} forward passes each at the floor"
        return Figure(name, spent / floor, 1.15, False, f"{1e3 * spent:.1f} ms ÷ {1e3 * floor:.1f} ms")

    def first(self, ensemble: Sequence[LocalMember]) -> list[Figure]:
        medians = {}
        with self.engine(ensemble) as engine:
            for size in (self.sizes.short, self.sizes.long):
                messages = prompt(ensemble, size)
                runs = _UNTIMED + self.repeats
                waits = [self.timed(lambda m=messages: _first_segment(engine, m)) for _ in range(runs)]  # type: ignore[misc]
                medians[size] = statistics.median(waits[_UNTIMED:])
        name = "seconds to the first segment, {}-token prompt, {} members"
        aims = ((self.sizes.short, 0.35), (self.sizes.long, 0.8))
        detail = "the aim is for five members"
        return [Figure(name.format(size, len(ensemble)), medians[size], aim, False, detail) for size, aim in aims]

    def answers(self, ensemble: Sequence[LocalMember]) -> list[Figure]:
        """Throughput of one and of concurrent answers."""
        rates = {}
        with self.engine(ensemble) as engine:
            for count in self.sizes.at_once:
                rates[count], _ = self.rate(engine, ensemble, self.sizes.short // 4, count)
                shared = f"{engine.metrics().batch_size.mean:.1f} a forward pass"
                self.facts.append((f"{count} answers at once", f"{rates[count]:.1f} tokens/s; {shared}"))
        name, aims = "tokens/s of {} at once, {} members", zip(rates.items(), (42, 240, 480), strict=False)
        detail = "the aim is for five members and 1, 8 and 32 answers"
        return [Figure(name.format(count, len(ensemble)), rate, aim, True, detail) for (count, rate), aim in aims]

    def speculation(self, ensemble: Sequence[LocalMember]) -> list[Figure]:
        """Seconds of answers with ÷ without speculation."""
        rates: dict[tuple[str, int], tuple[float, float]] = {}
        for way in ("off", "auto"):
            with self.engine(ensemble, way) as engine:
                for count in self.sizes.at_once:
                    rates[way, count] = self.rate(engine, ensemble, self.sizes.short // 4, count)
        return [
            Figure(
                f"seconds with ÷ without speculation, {count} at once, {len(ensemble)} members",
                rates["off", count][0] / rates["auto", count][0],
                1.05,
                False,
                f"forward passes a token {rates['off', count][1]:.2f} → {rates['auto', count][1]:.2f}",
            )
            for count in self.sizes.at_once
        ]

    def rate(
        self, engine: EnsembleEngine, ensemble: Sequence[LocalMember], size: int, count: int, warm: bool = True
    ) -> tuple[float, float]:
        """Tokens a second of `count` concurrent answers after prompts of `size` tokens, and forward passes a token."""
        prompts = [prompt(ensemble, size, f"Entry {n}. ") for n in range(count)]
        for _ in range(_WARMING if warm else 0):
            engine.generate_batch(prompts, self.params())
        results: list[Any] = []
        spent = self.timed(lambda: results.extend(engine.generate_batch(prompts, self.params())))
        return sum(r.usage.completion_tokens for r in results) / spent, forwards_a_token(results)

    # ── tools ────────────────────────────────────────────────────────────────────────────────────

    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.sizes.tokens, ignore_eos=True)

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds until the device has done the work."""
        self._wait()
        start = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _bandwidth(self) -> float:
        """Bytes a second of a large copy, read and written, and of a large read; the better of the two."""
        source = torch.ones(self.sizes.copied // 4, device=self.device)
        target = torch.empty_like(source)
        kinds: dict[str, tuple[int, Callable[[], object]]] = {
            "copy": (2 * source.nbytes, lambda: target.copy_(source)),
            "read": (source.nbytes, source.sum),
        }
        rates = {}
        for name, (size, work) in kinds.items():
            work()
            rates[name] = size / min(self.timed(work) for _ in range(10))
        self.facts.append(("bandwidth", ", ".join(f"{name} {rate / 1e9:.0f} GB/s" for name, rate in rates.items())))
        return max(rates.values())

    def _memory(self) -> str:
        if self.device.type == "cuda":
            return f"{torch.cuda.max_memory_allocated(self.device) / 1e9:.1f} GB at most"
        return f"{peak_bytes() / 1e9:.1f} GB of the process at most"


def _described(member: LocalMember) -> str:
    report = member.report
    size = f"{report.memory_bytes / 1e9:.3f} GB of weights, {member.bytes_per_token / 1e3:.1f} kB a cached token"
    load = f"loaded and checked in {report.load_seconds:.1f} s"
    return f"{size}; {report.attention}; graphs: {report.graphs}; layers: {report.layers or 'not compiled'}; {load}"


def _first_segment(engine: EnsembleEngine, messages: list[Message]) -> None:
    events = engine.stream(messages, SamplingParams(max_tokens=4 * SEGMENT, ignore_eos=True))
    next(event for event in events if isinstance(event, SegmentEvent) and event.text)
    events.close()  # type: ignore[attr-defined]


# ── many users ────────────────────────────────────────────────────────────────────────────────────


def same_weights(bench: Bench, member: LocalMember) -> list[Figure]:
    """Five members with equal weights, which always agree, compared with one, with speculation."""
    loaded = (member.runner.model, member.prompts.tokenizer)
    names = [f"same{n}" for n in range(5)]
    twins = [
        LocalMember(MemberConfig(name, name=name, compile="off"), execution=bench.execution, loaded=loaded)
        for name in names
    ]
    rates = {}
    for ensemble in ([member], twins):
        with bench.engine(ensemble, "auto") as engine:
            rates[len(ensemble)], _ = bench.rate(engine, ensemble, bench.sizes.short // 4, 1)
    detail = f"{rates[1]:.1f} ÷ {rates[5]:.1f} tokens/s"
    return [Figure("seconds a token of five of the same weights ÷ one alone", rates[1] / rates[5], 1.5, False, detail)]


def new_lengths(bench: Bench, ensemble: Sequence[LocalMember]) -> list[Figure]:
    """Speed of eight answers whose prompts have new lengths, compared with the same prompts again."""
    sizes = [bench.sizes.short // 8 * n + n for n in range(1, 9)]
    prompts = [prompt(ensemble, size, f"Entry {n}. ") for n, size in enumerate(sizes)]
    seconds = []
    with bench.engine(ensemble) as engine:
        for _ in range(2):
            seconds.append(bench.timed(lambda: engine.generate_batch(prompts, bench.params())))
    detail = f"{seconds[1]:.2f} ÷ {seconds[0]:.2f} s"
    return [Figure("speed with new lengths ÷ with the same ones again", seconds[1] / seconds[0], 0.8, True, detail)]


def one_prompt(bench: Bench, ensemble: Sequence[LocalMember]) -> list[Figure]:
    """Seconds until eight answers with one new prompt have a first segment, compared with one answer."""
    waits = []
    with bench.engine(ensemble) as engine, ThreadPoolExecutor(8) as pool:
        for count, start in ((1, "Once. "), (8, "Again. ")):
            messages = prompt(ensemble, bench.sizes.long // 2, start)
            waits.append(
                bench.timed(lambda n=count, m=messages: list(pool.map(partial(_first_segment, engine), [m] * n)))  # type: ignore[misc]
            )
    detail = f"{waits[1]:.3f} ÷ {waits[0]:.3f} s"
    return [Figure("first segment of eight with one new prompt ÷ of one", waits[1] / waits[0], 1.5, False, detail)]


def longest_pause(bench: Bench, ensemble: Sequence[LocalMember]) -> list[Figure]:
    """The longest pause of eight streams during a long prompt, in rounds of these streams."""
    times: list[list[float]] = [[] for _ in range(8)]
    params = SamplingParams(max_tokens=4 * bench.sizes.tokens, ignore_eos=True)

    def consume(number: int) -> None:
        for event in engine.stream(prompt(ensemble, bench.sizes.short // 4, f"Entry {number}. "), params):
            if isinstance(event, SegmentEvent):
                times[number].append(time.monotonic())

    with bench.engine(ensemble) as engine, ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(consume, number) for number in range(8)]
        while not all(len(each) > 3 for each in times):
            time.sleep(0.005)
        submitted = time.monotonic()
        _first_segment(engine, prompt(ensemble, bench.sizes.long, "Late. "))
        started = time.monotonic()
        for stream in streams:
            stream.result()
    gaps = [(end, end - start) for each in times for start, end in pairwise(each[1:])]
    before = [gap for end, gap in gaps if end < submitted]
    usual = (statistics.median(before) if before else 0.0) or statistics.median(gap for _, gap in gaps)
    longest = max((gap for end, gap in gaps if submitted <= end <= started + 1), default=usual)
    detail = f"{longest:.3f} ÷ {usual:.3f} s"
    return [Figure("longest pause of 8 streams, in rounds", longest / usual, 3, False, detail)]


# ── longer contexts ───────────────────────────────────────────────────────────────────────────────

WARMED_TOKENS = 8192
"""Maximum prompt tokens of a run with a warm-up; the steps of longer ones were captured before."""


def context_parts(bench: Bench) -> Iterator[tuple[str, Callable[[], Sequence[Figure]]]]:
    """For each context that fits at least one member: decoding first, then few answers before many."""
    for size in bench.sizes.contexts:
        if ensemble := _within(bench, size):
            yield f"context {size}: decode", lambda n=size, m=ensemble: _context_decode(bench, m, n)  # type: ignore[misc]
    for count in bench.sizes.at_once:
        for size in bench.sizes.contexts:
            if ensemble := _within(bench, size):
                name = f"context {size}: {count} at once"
                yield name, lambda n=size, c=count, m=ensemble: _context_answers(bench, m, n, c)  # type: ignore[misc]


def _within(bench: Bench, size: int) -> list[LocalMember]:
    """Members whose context limit allows a prompt of `size` tokens and an answer."""
    needed = size + 2 * bench.sizes.tokens
    return [member for member in bench.members if member.context_limit is None or member.context_limit >= needed]


def _context_decode(bench: Bench, ensemble: Sequence[LocalMember], size: int) -> list[Figure]:
    """Milliseconds a token of plain decoding, for each member after a prompt of `size` tokens."""
    for member in ensemble:
        step = bench.step_seconds(member, size, repeats=2)
        bench.facts.append((f"context {size}: decode, {member.name}", f"{1e3 * step:.2f} ms a token"))
    return []


def _context_answers(bench: Bench, ensemble: Sequence[LocalMember], size: int, count: int) -> list[Figure]:
    """Tokens a second of `count` answers, including the prefill."""
    rates = []
    for way in ("off", "auto"):
        with bench.engine(ensemble, way) as engine:
            rate, needed = bench.rate(engine, ensemble, size, count, warm=size * count <= WARMED_TOKENS)
            rates.append(f"{rate:.1f} tokens/s and {needed:.2f} forward passes a token with speculation {way}")
    bench.facts.append((f"context {size}: {count} at once, {len(ensemble)} members", "; ".join(rates)))
    return []


# ── the command line ──────────────────────────────────────────────────────────────────────────────


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--execution", choices=["paged", "dynamic"], default="paged")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--minutes", type=float, default=6, help="no part begins after this time")
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="only parts with these words in their names, as in the facts"
    )
    parser.add_argument("--without", default="", metavar="WORDS", help="no parts with these words in their names")
    parser.add_argument("--compare-vllm", metavar="URL", help="a vLLM server with a model of the first shape")
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU, to test that all parts run")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu.json")
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny else options.device)
    if not options.tiny and not (device.type == "cuda" and torch.cuda.is_available()):
        parser.error("this needs a CUDA device, and there is none here; --tiny runs the same code on a CPU")
    peer = Peer(options.compare_vllm) if options.compare_vllm else None
    bench = Bench(TINY if options.tiny else Sizes(), options.repeats, device, options.execution, options.tiny)
    if not bench.members:
        parser.error("the weights of the first member do not fit into memory; --tiny has small ones")
    name = "tiny sizes on a CPU" if options.tiny else torch.cuda.get_device_name(device)
    title = f"GPU path, {options.execution}, {name}"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = options.only, options.without
    bench.run(options.minutes, names, peer, lambda: write(bench.figures, options.json, bench.facts))
    report(title, bench.figures, options.json, bench.facts)
    print(markdown(bench.figures))


if __name__ == "__main__":
    main()
