"""Speed of the engine on the demo members: rounds, what speculation saves, and the time to the first words.

    python benchmarks/engine.py speed [--tokens 64] [--repeats 1] [--json FILE]
    python benchmarks/engine.py speculation --data FOLDER [--rows 4] [--tokens 64] [--dtype bfloat16] [--five]
        [--json FILE]
    python benchmarks/engine.py first-words --data DIR [--rows N] [--tokens N] [--member PATH]…

`speed`: ratios of things timed in the same run.

1. overhead   whole answer ÷ Σ members' own `generate` of the tokens that they drafted (64 and 1,000 prompt tokens),
              with and without speculation (the prompt repeats itself, which flatters guesses: see `speculation`)
2. naive      cache-less reference rounds ÷ the same rounds by the engine (1,000 prompt tokens)
3. context    a round at 4,000 tokens of context ÷ a round at 256
4. first      (time to first segment − prefill) ÷ a round

The engine's own number format, greedy, 10 tokens a segment, no exit and no guard against repetition, so that every
member works in every round and every answer has its length. 2, 3 and 4 go without speculation. For 3 and 4 answers are
sampled with a seed: members that repeat the filler would agree, and rounds in which all agree verify nothing. On
stderr, each part says when it begins and how long it took. `--repeats 3` gives steadier figures for 1.

`speculation`: forward passes of each member a token of the answer, and seconds, on ÷ off, in one run. Kinds of work:
open questions (FOLDER/open.jsonl), passages to be quoted and to be summed up (FOLDER/rag_en.jsonl), and code to be
edited (rows of this file). `--five`: the demo members and three copies of them with noise on their weights. Every
request is asked of an engine without and of one with speculation, one at a time and then all at once; forward passes
are the answers' (`MemberUsage.forwards`), so other work on the machine changes only seconds (by the clock, and of the
processor). How many answers are the same is printed: in float32 all are; in half precision they may part, as batches
round differently.

`first-words`: how soon the first words of a lone answer come, by when its first segment is decided. The demo's pair and
the given members answer open questions and passages, one at a time, in turns: with the defaults, with first segments
that are compared at their end only (`early_margin=0`), and with `preset("fast")`. Printed for each kind: median seconds
to the first words and to the end, their ratio to "fast" over the same questions, and forward passes of all members.
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
        """Seconds of the library's own greedy `generate` of exactly `count` tokens."""
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
            own = sum(self.generate(m, messages, drafted[m.name]) for m in self.members)
            ratios.append(result.total_seconds / own)
            notes = f"{sum(drafted.values())} drafted; {result.total_seconds:.2f} s ÷ {own:.2f} s"
        name = f"overhead, {size}-token prompt" + ", without speculation" * (not speculates)
        return Figure(name, statistics.median(ratios), target, False, notes)

    def naive(self, size: int, rounds: int) -> Figure:
        messages, params = self.prompt(size), SamplingParams(max_tokens=500, ignore_eos=True)
        start = time.perf_counter()
        next(naive_rounds(self.engine.config, self.members, messages, params))
        slow = rounds * (time.perf_counter() - start)  # a round reads 1 % more tokens than the last
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
        for size, messages in prompts.items():  # once: reading a long prompt takes long, and answers have many rounds
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
    """Says on stderr which part begins, and how long it took."""
    began = time.monotonic()
    print(f"{began - BEGAN:5.0f} s  {name} …", file=sys.stderr, flush=True)
    yield
    print(f"{time.monotonic() - BEGAN:5.0f} s  {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _round_seconds(results: Sequence[EnsembleResult]) -> list[float]:
    """Time of each full round in which every candidate was verified; the last one commits nothing and is left out."""
    return [r.timing.total for result in results for r in result.rounds[:-1] if r.verified]


@app.command()
def speed(
    tokens: Annotated[int, typer.Option(help="of an answer")] = 64,
    repeats: Annotated[int, typer.Option(help="of each measurement, of which the median counts")] = 1,
    out: Annotated[Path, typer.Option("--json", help="file of the figures")] = RESULTS / "engine.json",
) -> None:
    """Rounds, overhead and contexts, as ratios."""
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
"""Kinds of work, and the target for the share of forward passes that remain."""
COPIES = ((0, 0.05), (1, 0.05), (1, 0.1))
"""Member of the demo, and standard deviations of the noise."""


def _requests(data: Path, kind: str, rows: int) -> list[str]:
    if kind == "code":
        return [f"Add a docstring to this code and repeat all of it.\n\n```python\n{code}```" for code in CODE[:rows]]
    name = {"open": "open", "quote": "rag_en", "summary": "rag_en"}[kind]
    found = [json.loads(line) for line in (data / f"{name}.jsonl").read_text("utf-8").splitlines()[:rows]]
    if kind == "open":
        return [row["prompt"] for row in found]
    if kind == "summary":
        return [f"Sum this text up in two sentences.\n\n{row['context']}" for row in found]
    return [f"Quote the sentence that answers the question.\n\n{row['context']}\n\n{row['prompt']}" for row in found]


def _answered(
    engine: EnsembleEngine, asked: Sequence[str], params: SamplingParams, together: bool
) -> list[EnsembleResult]:
    if not together:
        return [engine.generate(text, params) for text in asked]
    found = engine.generate_batch(list(asked), params)
    return [result for result in found if isinstance(result, EnsembleResult)]


def _speculated(config: EnsembleConfig, data: Path, rows: int, tokens: int) -> list[Figure]:
    params, figures = SamplingParams(max_tokens=tokens), []
    with (
        EnsembleEngine(replace(config, speculation="off")) as off,
        EnsembleEngine(replace(config, speculation="auto")) as auto,
    ):
        engines = {"off": off.load(), "auto": auto.load()}
        for kind, aim in AIMS.items():
            asked = _requests(data, kind, rows)
            for together in (False, True):
                found, seconds, busy = {}, {}, {}
                for name, engine in engines.items():
                    began, used_before = time.monotonic(), time.process_time()
                    found[name] = _answered(engine, asked, params, together)
                    seconds[name], busy[name] = time.monotonic() - began, time.process_time() - used_before
                how = f"{kind}, {len(asked)} {'at once' if together else 'one by one'}"
                ratio = forwards_a_token(found["auto"]) / forwards_a_token(found["off"])
                used = [usage for result in found["auto"] for usage in result.usage.members.values()]
                same = sum(a.text == b.text for a, b in zip(found["off"], found["auto"], strict=True))
                plain, saved = found["off"], found["auto"]
                names = plain[0].usage.members
                each = ", ".join(
                    f"{m} {forwards_a_token(plain, m):.2f} → {forwards_a_token(saved, m):.2f}" for m in names
                )
                detail = (
                    f"{each}; guesses accepted "
                    f"{sum(u.accepted for u in used)} of {sum(u.guessed for u in used)}; "
                    f"{same} of {len(asked)} answers equal"
                )
                figures.append(Figure(f"forward passes a token, {how}", ratio, aim, False, detail))
                print(f"{how}: {ratio:.2f} ({detail})", flush=True)
                for what, spent in (("seconds", seconds), ("processor seconds", busy)):
                    reported = f"{spent['off']:.0f} s → {spent['auto']:.0f} s"
                    most = aim if together else 1.02
                    figures.append(Figure(f"{what}, {how}", spent["auto"] / spent["off"], most, False, reported))
                    print(f"    {what}: {figures[-1].ratio:.2f} ({reported})", flush=True)
    return figures


@app.command()
def speculation(
    data: Annotated[Path, typer.Option(help="folder of JSONL files")],
    rows: Annotated[int, typer.Option(help="at most this many of each kind")] = 4,
    tokens: Annotated[int, typer.Option(help="most tokens of an answer")] = 64,
    dtype: Annotated[DtypeName, typer.Option(help="of the members")] = "bfloat16",
    five: Annotated[bool, typer.Option("--five", help="with three noisy copies of the members")] = False,
    out: Annotated[Path, typer.Option("--json", help="file of the figures")] = RESULTS / "speculation.json",
) -> None:
    """Forward passes and seconds with speculation ÷ without."""
    folder = cache_folder() / "weakened"
    folder.mkdir(parents=True, exist_ok=True)
    pair = demo_members(dtype=dtype)
    members = [*pair, *(noisy(pair[n], noise, folder) for n, noise in COPIES if five)]
    config = EnsembleConfig(members, reuse_prefixes=False)
    report("Speculation on ÷ off", _speculated(config, data, rows, tokens), out)


# ── first words ───────────────────────────────────────────────────────────────────────────────────

SETTINGS: Mapping[str, Mapping[str, float]] = {"the default": {}, "early_margin = 0": {"early_margin": 0}, "fast": {}}


@app.command()
def first_words(
    data: Annotated[Path, typer.Option(help="folder of JSONL files")],
    rows: Annotated[int, typer.Option(help="at most this many of each kind")] = 12,
    tokens: Annotated[int, typer.Option(help="most tokens of an answer")] = 48,
    member: Annotated[list[str], typer.Option(help="a further member")] = [],  # noqa: B006
) -> None:
    """The time to the first words, by when the first segment is decided."""
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
        found: dict[str, list[EnsembleResult]] = {name: [] for name in engines}
        for prompt in prompts:
            for name, engine in engines.items():
                found[name].append(engine.generate(prompt, params))
        console.print(_words_table(kind, found))
    for engine in engines.values():
        engine.close()


def _words_table(kind: str, found: Mapping[str, Sequence[EnsembleResult]]) -> Table:
    table = Table(title=f"{kind}: {len(found['fast'])} answers, one at a time", title_justify="left")
    for head in ("setting", "first words", "÷ fast", "whole answer", "÷ fast", "forwards"):
        table.add_column(head)
    for name, results in found.items():
        first, whole = _word_seconds(results)
        fast_first, fast_whole = _word_seconds(found["fast"])
        forwards = statistics.mean(sum(usage.forwards for usage in result.usage.members.values()) for result in results)
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
    """To the first words, and to the end."""
    return [r.first_segment_seconds or r.total_seconds for r in results], [r.total_seconds for r in results]


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The median of each question's ratio."""
    return f"{statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.2f}"


if __name__ == "__main__":
    app()
