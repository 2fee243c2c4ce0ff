"""Many answers at once on the demo members, as ratios of things timed in the same run.

    python benchmarks/serving.py [--requests 8] [--tokens 64] [--repeats 3] [--json FILE]

1. throughput  tokens a second of concurrent requests of mixed length ÷ the same requests one after another
2. first       last of the concurrent requests' first segments ÷ a lone request's
3. prefix      first segment of a second turn behind a 1,000-token first turn, with ÷ without prefix reuse

bf16, greedy, the default segments of 5 tokens, no exit, so that every member works in every round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

from figures import RESULTS, Figure, report

from specfuse_shared import EnsembleConfig, EnsembleEngine, Message, SamplingParams, SegmentEvent, demo_members

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


def engine(**settings: object) -> EnsembleEngine:
    config = EnsembleConfig(demo_members(dtype="bfloat16"), exit="never", reuse_prefixes=False)
    return EnsembleEngine(replace(config, **settings)).load()  # type: ignore[arg-type]


def conversations(count: int) -> list[list[Message]]:
    """Bare questions, and questions behind a system message with 15, 30 and 45 words of a document."""
    found = []
    for n in range(count):
        words = DOCUMENTS[n % len(DOCUMENTS)].read_text("utf-8").split()[: n % 4 * 15]
        system = [Message("system", f"You answer visitors' questions in detail. {' '.join(words)}")] if words else []
        found.append([*system, Message("user", QUESTIONS[n % len(QUESTIONS)])])
    return found


def first_segment(engine: EnsembleEngine, messages: list[Message], params: SamplingParams) -> float:
    """Seconds from the call to the first text."""
    start = time.perf_counter()
    for event in engine.stream(messages, params):
        if isinstance(event, SegmentEvent) and event.text:
            return time.perf_counter() - start
    raise AssertionError("the answer was empty")


def serving(requests: int, tokens: int, repeats: int) -> list[Figure]:
    speedups, waits, notes = [], [], ""
    with engine() as shared:
        asked, params = conversations(requests), SamplingParams(max_tokens=tokens)
        shared.generate(asked[0], SamplingParams(max_tokens=20))
        for _ in range(repeats):
            alone = [shared.generate(messages, params) for messages in asked]
            slow = sum(result.total_seconds for result in alone)
            start = time.perf_counter()
            together = shared.generate_batch(asked, params)
            fast = time.perf_counter() - start
            counts = [sum(r.usage.completion_tokens for r in results) for results in (alone, together)]  # type: ignore[union-attr]
            speedups.append((counts[1] / fast) / (counts[0] / slow))
            last = max(r.first_segment_seconds or 0.0 for r in together)  # type: ignore[union-attr]
            lone = statistics.median(r.first_segment_seconds or 0.0 for r in alone)
            waits.append(last / lone)
            notes = f"{counts[1] / fast:.1f} ÷ {counts[0] / slow:.1f} tokens/s"
            wait_notes = f"{last:.2f} s ÷ {lone:.2f} s"
    return [
        Figure(f"throughput of {requests} at once ÷ one by one", statistics.median(speedups), 4.5, True, notes),
        Figure(f"last first segment of {requests} ÷ a lone one", statistics.median(waits), 3, False, wait_notes),
    ]


def prefix(repeats: int) -> Figure:
    ratios, note = [], ""
    with engine(reuse_prefixes=True) as reusing, engine() as plain:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS / "serving.json")
    options = parser.parse_args()
    figures = [*serving(options.requests, options.tokens, options.repeats), prefix(options.repeats)]
    report("serving, demo members, bf16", figures, options.json)


if __name__ == "__main__":
    main()
