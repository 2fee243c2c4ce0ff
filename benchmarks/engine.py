"""Speed of the engine on the demo members, as ratios of things timed in the same run.

    python benchmarks/engine.py [--tokens 64] [--repeats 3] [--json FILE]

1. overhead   whole answer ÷ Σ members' own `generate` of the tokens that they drafted (64 and 1,000 prompt tokens),
              with and without speculation (the prompt repeats itself, which flatters guesses: see `speculation.py`)
2. naive      cache-less reference rounds ÷ the same rounds by the engine (1,000 prompt tokens)
3. context    a round at 4,000 tokens of context ÷ a round at 256
4. first      (time to first segment − prefill) ÷ a round

The engine's own number format, greedy, 10 tokens a segment, no exit and no guard against repetition, so that every
member works in every round and every answer has its length. 2, 3 and 4 go without speculation. For 3 and 4 answers are
sampled with a seed: members that repeat the filler would agree, and rounds in which all agree verify nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from figures import RESULTS, Figure, report

sys.path.insert(0, str(Path(__file__).parents[1]))

from specfuse_shared import EnsembleConfig, EnsembleEngine, Message, SamplingParams, demo_members
from specfuse_shared.events import EnsembleResult
from specfuse_shared.members.local.member import LocalMember
from tests.support.against_naive import local_members
from tests.support.naive import naive_rounds

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
        list(islice(naive_rounds(self.engine.config, self.members, messages, params), rounds))
        slow = time.perf_counter() - start
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
        for _ in range(self.repeats):
            for size, messages in prompts.items():
                seconds[size] += _round_seconds([self.answer(messages, 40, temperature=1.0)])
        a, b = statistics.median(seconds[large]), statistics.median(seconds[small])
        return Figure(f"a round at {large} ÷ {small} tokens", a / b, 1.8, False, f"{a:.3f} s ÷ {b:.3f} s")

    def first(self, size: int) -> Figure:
        results = [self.answer(self.prompt(size), 40, temperature=1.0) for _ in range(self.repeats)]
        waits = [(r.first_segment_seconds or 0.0) - r.prefill_seconds for r in results]
        a, b = statistics.median(waits), statistics.median(_round_seconds(results))
        return Figure(f"first segment after prefill ÷ a round, {size}", a / b, 1.2, False, f"{a:.3f} s ÷ {b:.3f} s")

    def run(self) -> list[Figure]:
        for speculates in (False, True):
            self.answer(self.prompt(64), 20, speculates=speculates)
        for member in self.members:
            self.generate(member, self.prompt(64), 4)
        return [
            self.overhead(64, 0.75, speculates=True),
            self.overhead(1000, 0.6, speculates=True),
            self.overhead(64, 1.05, speculates=False),
            self.overhead(1000, 1.05, speculates=False),
            self.context(256, 4000),
            self.first(64),
            self.naive(1000, 2),
        ]


def _round_seconds(results: Sequence[EnsembleResult]) -> list[float]:
    """Time of each full round in which every candidate was verified; the last one commits nothing and is left out."""
    return [r.timing.total for result in results for r in result.rounds[:-1] if r.verified]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS / "engine.json")
    options = parser.parse_args()
    report("engine, demo members", Bench(options.tokens, options.repeats).run(), options.json)


if __name__ == "__main__":
    main()
