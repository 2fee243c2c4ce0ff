"""Speed of the engine with the demo members: rounds, speculation, and the time to the first words.

    python benchmarks/engine.py speed [--tokens 64] [--repeats 1] [--json FILE]
    python benchmarks/engine.py speculation --data FOLDER [--rows 4] [--tokens 64] [--dtype bfloat16] [--five]
        [--json FILE]
    python benchmarks/engine.py first-words --data DIR [--rows N] [--tokens N] [--member PATH]…

`speed`: ratios of times in the same run.

1. overhead   whole answer ÷ Σ over members of `generate` for their drafted tokens (64 and 1,000 prompt tokens),
              with and without speculation (the repetitive prompt is easy to guess: see `speculation`)
2. naive      reference rounds without a cache ÷ the same rounds by the engine (1,000 prompt tokens)
3. context    a round at 4,000 tokens of context ÷ a round at 256
4. first      (time to first segment − prefill) ÷ a round

The members have the engine's default dtype, decode greedily with 10 tokens a segment, and have no exit and no
repetition guard, so that every member works in every round and every answer has its full length. 2, 3 and 4 run without
speculation. For 3 and 4, answers are sampled with a seed: greedy members would repeat the filler and agree, and a round
in which all agree needs no verification. Each part prints its start and duration on stderr. `--repeats 3` gives less
noisy figures for 1.

`speculation`: forward passes of each member per token of the answer, and seconds, with ÷ without speculation, in one
run. The tasks are open questions (FOLDER/open.jsonl), quotes and summaries of passages (FOLDER/rag_en.jsonl), and edits
of code (in this file). `--five` adds three copies of the demo members with noise on their weights. Requests run one at
a time, then all at once. Forward passes are counted by the engine (`MemberUsage.forwards`), so that other work on the
machine affects only the seconds (wall clock and processor). The number of equal answers is printed: in float32 all
answers are equal; in half precision they can differ, since rounding depends on the batch.

`first-words`: the time to the first words of a single answer, depending on when its first segment is decided. The
demo's pair and the given members answer open questions and passages, one at a time, alternately with three settings:
the defaults, an election only at the end of the first segment (`early_margin=0`), and `preset("fast")`. For each task
it prints median seconds to the first words and to the end, their ratio to "fast" over the same questions, and forward
passes of all members.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from bench_members import forwards_a_token, noisy
from figures import RESULTS, Figure, report
from quality_rows import read_rows
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from specfuse_shared import (
    EnsembleConfig,
    EnsembleEngine,
    EnsembleResult,
    MemberConfig,
    Message,
    SamplingParams,
    demo_members,
)
from specfuse_shared.config import DtypeName
from specfuse_shared.loading.gguf import cache_folder
from specfuse_shared.members.local.member import LocalMember
from tests.support.against_naive import local_members
from tests.support.naive import naive_rounds

app = typer.Typer(help=__doc__, add_completion=False, no_args_is_help=True)

SENTENCE = "The observatory keeps a log of every clear night, its moon, its wind and its visitors. "


class Bench:
    def __init__(self, tokens: int, repeats: int) -> None:
        config = EnsembleConfig(
            members=demo_members(),
            segment_tokens=10,
            first_segment_tokens=None,
            exit="never",
            repetition_guard=False,
            reuse_prefixes=False,
            speculation="off",
        )
        self.engine = EnsembleEngine(config).load()
        self.guessing = EnsembleEngine(replace(config, speculation="auto")).load()
        self.members = local_members(self.engine)
        self.tokens, self.repeats = tokens, repeats

    def prompt(self, size: int) -> list[Message]:
        """A question after filler, so that the longest member prompt has about `size` tokens."""
        text = "Describe the log of the observatory at length."
        while max(len(m.encode_prompt([Message("user", SENTENCE + text)])) for m in self.members) <= size:
            text = SENTENCE + text
        return [Message("user", text)]

    def answer(
        self, messages: list[Message], tokens: int, temperature: float = 0.0, speculates: bool = False
    ) -> EnsembleResult:
        """An answer of exactly this number of tokens."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=temperature, seed=0)
        return (self.guessing if speculates else self.engine).generate(messages, params)

    @torch.inference_mode()
    def generate(self, member: LocalMember, messages: list[Message], count: int) -> float:
        """Seconds of transformers' greedy `generate` for exactly `count` tokens."""
        ids = torch.tensor([member.encode_prompt(messages)])
        length = {"max_new_tokens": count, "min_new_tokens": count}
        model = member.runner.model
        before = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **length)
        spent = time.perf_counter() - start
        model.set_attn_implementation(before)
        return spent

    def overhead(self, size: int, target: float, speculates: bool) -> Figure:
        messages, ratios, notes = self.prompt(size), [], ""
        for _ in range(self.repeats):
            result = self.answer(messages, self.tokens, speculates=speculates)
            drafted = {name: usage.drafted for name, usage in result.usage.members.items()}
            alone = sum(self.generate(m, messages, drafted[m.name]) for m in self.members)
            ratios.append(result.total_seconds / alone)
            notes = f"{sum(drafted.values())} drafted; {result.total_seconds:.2f} s ÷ {alone:.2f} s"
        name = f"overhead, {size}-token prompt" + ", without speculation" * (not speculates)
        return Figure(name, statistics.median(ratios), target, False, notes)

    def naive(self, size: int, rounds: int) -> Figure:
        messages, params = self.prompt(size), SamplingParams(max_tokens=500, ignore_eos=True)
        start = time.perf_counter()
        next(naive_rounds(self.engine.config, self.members, messages, params))
        slow = rounds * (time.perf_counter() - start)  # each round reads only 1 % more tokens than the previous one
        events = self.engine.stream(messages, params)
        start = time.perf_counter()
        list(islice(events, rounds + 1))
        fast = time.perf_counter() - start
        return Figure(
            f"naive round, {size}-token prompt", slow / fast, 10, True, f"{rounds} rounds; {slow:.1f} s ÷ {fast:.2f} s"
        )

    def context(self, small: int, large: int) -> Figure:
        prompts = {size: self.prompt(size) for size in (small, large)}
        seconds: dict[int, list[float]] = {small: [], large: []}
        for size, messages in prompts.items():  # one run: the prefill is long, and an answer has many rounds
            seconds[size] += _round_seconds([self.answer(messages, 60, temperature=1.0)])
        a, b = statistics.median(seconds[large]), statistics.median(seconds[small])
        return Figure(f"a round at {large} ÷ {small} tokens", a / b, 1.8, False, f"{a:.3f} s ÷ {b:.3f} s")

    def first(self, size: int) -> Figure:
        results = [self.answer(self.prompt(size), 40, temperature=1.0) for _ in range(max(3, self.repeats))]
        waits = [(r.first_segment_seconds or 0.0) - r.prefill_seconds for r in results]
        a, b = statistics.median(waits), statistics.median(_round_seconds(results))
        return Figure(f"first segment after prefill ÷ a round, {size}", a / b, 1.2, False, f"{a:.3f} s ÷ {b:.3f} s")

    def run(self) -> list[Figure]:
        with part("first passes"):
            self.warm_up()
        parts: dict[str, Callable[[], Figure]] = {
            "overhead, 64-token prompt": lambda: self.overhead(64, 0.75, speculates=True),
            "overhead, 1000-token prompt": lambda: self.overhead(1000, 0.6, speculates=True),
            "overhead, 64-token prompt, without speculation": lambda: self.overhead(64, 1.05, speculates=False),
            "overhead, 1000-token prompt, without speculation": lambda: self.overhead(1000, 1.05, speculates=False),
            "rounds at 256 and 4000 tokens": lambda: self.context(256, 4000),
            "first segment": lambda: self.first(64),
            "naive rounds": lambda: self.naive(1000, 2),
        }
        figures = []
        for name, measure in parts.items():
            with part(name):
                figures.append(measure())
        return figures

    def warm_up(self) -> None:
        for speculates in (False, True):
            self.answer(self.prompt(64), 20, speculates=speculates)
        for member in self.members:
            self.generate(member, self.prompt(64), 4)


BEGAN = time.monotonic()


@contextmanager
def part(name: str) -> Iterator[None]:
    """Print the start and the duration of a part on stderr."""
    began = time.monotonic()
    print(f"{began - BEGAN:5.0f} s  {name} …", file=sys.stderr, flush=True)
    yield
    print(f"{time.monotonic() - BEGAN:5.0f} s  {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _round_seconds(results: Sequence[EnsembleResult]) -> list[float]:
    """Seconds of each verified round without the last one, which commits nothing."""
    return [r.timing.total for result in results for r in result.rounds[:-1] if r.verified]


@app.command()
def speed(
    tokens: Annotated[int, typer.Option(help="tokens of an answer")] = 64,
    repeats: Annotated[int, typer.Option(help="runs of each measurement; the median counts")] = 1,
    out: Annotated[Path, typer.Option("--json", help="file of the figures")] = RESULTS / "engine.json",
) -> None:
    """Ratios of rounds, overhead and contexts."""
    with part("loading the demo members"):
        bench = Bench(tokens, repeats)
    report("engine, demo members", bench.run(), out)


# ── speculation ───────────────────────────────────────────────────────────────────────────────────

CODE = (
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop(0)\n",
    "def read(path):\n    lines = []\n    with open(path) as file:\n        for line in file:\n"
    "            lines.append(line.strip())\n    return lines\n",
    "def largest(numbers):\n    best = numbers[0]\n    for number in numbers[1:]:\n        if number > best:\n"
    "            best = number\n    return best\n",
)
AIMS = {"open": 0.8, "quote": 0.5, "summary": 0.8, "code": 0.5}
"""Task → upper bound of forward passes with ÷ without speculation."""
COPIES = ((0, 0.05), (1, 0.05), (1, 0.1))
"""(demo member, noise in standard deviations) of the noisy copies."""


def _requests(data: Path, kind: str, rows: int) -> list[str]:
    if kind == "code":
        return [f"Add a docstring to this code and repeat all of it.\n\n```python\n{code}```" for code in CODE[:rows]]
    name = {"open": "open", "quote": "rag_en", "summary": "rag_en"}[kind]
    lines = [json.loads(line) for line in (data / f"{name}.jsonl").read_text("utf-8").splitlines()[:rows]]
    if kind == "open":
        return [row["prompt"] for row in lines]
    if kind == "summary":
        return [f"Sum this text up in two sentences.\n\n{row['context']}" for row in lines]
    return [f"Quote the sentence that answers the question.\n\n{row['context']}\n\n{row['prompt']}" for row in lines]


def _answered(
    engine: EnsembleEngine, prompts: Sequence[str], params: SamplingParams, together: bool
) -> list[EnsembleResult]:
    if not together:
        return [engine.generate(text, params) for text in prompts]
    results = engine.generate_batch(list(prompts), params)
    return [result for result in results if isinstance(result, EnsembleResult)]


def _speculated(config: EnsembleConfig, data: Path, rows: int, tokens: int) -> list[Figure]:
    params, figures = SamplingParams(max_tokens=tokens), []
    with (
        EnsembleEngine(replace(config, speculation="off")) as off,
        EnsembleEngine(replace(config, speculation="auto")) as auto,
    ):
        engines = {"off": off.load(), "auto": auto.load()}
        for kind, aim in AIMS.items():
            prompts = _requests(data, kind, rows)
            for together in (False, True):
                results, seconds, busy = {}, {}, {}
                for name, engine in engines.items():
                    began, used_before = time.monotonic(), time.process_time()
                    results[name] = _answered(engine, prompts, params, together)
                    seconds[name], busy[name] = time.monotonic() - began, time.process_time() - used_before
                how = f"{kind}, {len(prompts)} {'at once' if together else 'one by one'}"
                ratio = forwards_a_token(results["auto"]) / forwards_a_token(results["off"])
                used = [usage for result in results["auto"] for usage in result.usage.members.values()]
                same = sum(a.text == b.text for a, b in zip(results["off"], results["auto"], strict=True))
                plain, saved = results["off"], results["auto"]
                names = plain[0].usage.members
                each = ", ".join(
                    f"{m} {forwards_a_token(plain, m):.2f} → {forwards_a_token(saved, m):.2f}" for m in names
                )
                detail = (
                    f"{each}; guesses accepted "
                    f"{sum(u.accepted for u in used)} of {sum(u.guessed for u in used)}; "
                    f"{same} of {len(prompts)} answers equal"
                )
                figures.append(Figure(f"forward passes a token, {how}", ratio, aim, False, detail))
                print(f"{how}: {ratio:.2f} ({detail})", flush=True)
                for unit, spent in (("seconds", seconds), ("processor seconds", busy)):
                    reported = f"{spent['off']:.0f} s → {spent['auto']:.0f} s"
                    bound = aim if together else 1.02
                    figures.append(Figure(f"{unit}, {how}", spent["auto"] / spent["off"], bound, False, reported))
                    print(f"    {unit}: {figures[-1].ratio:.2f} ({reported})", flush=True)
    return figures


@app.command()
def speculation(
    data: Annotated[Path, typer.Option(help="folder of JSONL files")],
    rows: Annotated[int, typer.Option(help="maximum rows of each task")] = 4,
    tokens: Annotated[int, typer.Option(help="maximum tokens of an answer")] = 64,
    dtype: Annotated[DtypeName, typer.Option(help="dtype of the members")] = "bfloat16",
    five: Annotated[bool, typer.Option("--five", help="with three noisy copies of the members")] = False,
    out: Annotated[Path, typer.Option("--json", help="file of the figures")] = RESULTS / "speculation.json",
) -> None:
    """Forward passes and seconds with speculation ÷ without."""
    folder = cache_folder() / "weakened"
    folder.mkdir(parents=True, exist_ok=True)
    pair = demo_members(dtype=dtype)
    members = [*pair, *(noisy(pair[n], noise, folder) for n, noise in COPIES if five)]
    config = EnsembleConfig(members, reuse_prefixes=False)
    report("with ÷ without speculation", _speculated(config, data, rows, tokens), out)


# ── first words ───────────────────────────────────────────────────────────────────────────────────

SETTINGS: Mapping[str, Mapping[str, float]] = {"the default": {}, "early_margin = 0": {"early_margin": 0}, "fast": {}}


@app.command()
def first_words(
    data: Annotated[Path, typer.Option(help="folder of JSONL files")],
    rows: Annotated[int, typer.Option(help="maximum rows of each task")] = 12,
    tokens: Annotated[int, typer.Option(help="maximum tokens of an answer")] = 48,
    member: Annotated[list[str], typer.Option(help="a further member")] = [],  # noqa: B006
) -> None:
    """The time to the first words, depending on when the first segment is decided."""
    console = Console(width=110)
    members = [*demo_members(), *(MemberConfig(name) for name in member)]
    engines = {
        name: EnsembleEngine(EnsembleConfig.preset("fast" if name == "fast" else "default", members, **settings)).load()
        for name, settings in SETTINGS.items()
    }
    for kind in ("open", "rag"):
        prompts = [question.prompt for question in read_rows(data, [kind], "choose", rows)]
        params = SamplingParams(max_tokens=tokens)
        for engine in engines.values():
            engine.generate(prompts[-1], params)
        results: dict[str, list[EnsembleResult]] = {name: [] for name in engines}
        for prompt in prompts:
            for name, engine in engines.items():
                results[name].append(engine.generate(prompt, params))
        console.print(_words_table(kind, results))
    for engine in engines.values():
        engine.close()


def _words_table(kind: str, results: Mapping[str, Sequence[EnsembleResult]]) -> Table:
    table = Table(title=f"{kind}: {len(results['fast'])} answers, one at a time", title_justify="left")
    for head in ("setting", "first words", "÷ fast", "whole answer", "÷ fast", "forward passes"):
        table.add_column(head)
    for name, answers in results.items():
        first, whole = _word_seconds(answers)
        fast_first, fast_whole = _word_seconds(results["fast"])
        forwards = statistics.mean(sum(usage.forwards for usage in result.usage.members.values()) for result in answers)
        table.add_row(
            name,
            f"{statistics.median(first):.2f} s",
            _ratio(first, fast_first),
            f"{statistics.median(whole):.2f} s",
            _ratio(whole, fast_whole),
            f"{forwards:.1f}",
        )
    return table


def _word_seconds(results: Sequence[EnsembleResult]) -> tuple[list[float], list[float]]:
    """Seconds to the first words, and to the end, of each answer."""
    return [r.first_segment_seconds or r.total_seconds for r in results], [r.total_seconds for r in results]


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The median of the questions' ratios."""
    return f"{statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.2f}"


if __name__ == "__main__":
    app()
