"""Many answers at once on the demo members, as ratios of things timed in the same run.

    python benchmarks/serving.py [--concurrent 8] [--waves 8] [--tokens 64] [--repeats 1] [--json FILE]

1. throughput  tokens a second with 8 requests of mixed length in flight ÷ the same requests one after another; as
               many waves of them are asked at once, so that the next one joins when one ends
2. burst       the same for one wave: its last answers run alone
3. first       last of a wave's first segments ÷ a lone request's
4. prefix      first segment of a second turn after a 1,000-token first turn, with ÷ without prefix reuse

The engine's own number format, greedy, the default segments, no exit, so that every member works in every round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

from figures import RESULTS, Figure, report

from specfuse_shared import (
    EnsembleConfig,
    EnsembleEngine,
    EnsembleResult,
    Message,
    SamplingParams,
    SegmentEvent,
    demo_members,
)

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
    config = EnsembleConfig(demo_members(), exit="never", reuse_prefixes=False)
    return EnsembleEngine(replace(config, **settings)).load()  # type: ignore[arg-type]


def conversations(count: int) -> list[list[Message]]:
    """Bare questions, and questions after a system message with 15, 30 and 45 words of a document."""
    found = []
    for n in range(count):
        words = DOCUMENTS[n % len(DOCUMENTS)].read_text("utf-8").split()[: (n + n // len(QUESTIONS)) % 4 * 15]
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


def serving(concurrent: int, waves: int, tokens: int, repeats: int) -> list[Figure]:
    steady, bursts, waits = [], [], []
    with engine(max_concurrent=concurrent) as shared:
        asked, params = conversations(concurrent * waves), SamplingParams(max_tokens=tokens)
        shared.generate(asked[0], SamplingParams(max_tokens=20))
        for _ in range(repeats):
            alone = [shared.generate(messages, params) for messages in asked]
            burst, burst_seconds = together(shared, asked[:concurrent], params)
            flow, flow_seconds = together(shared, asked, params)
            slow = _speed(alone, sum(r.total_seconds for r in alone))
            slow_burst = _speed(alone[:concurrent], sum(r.total_seconds for r in alone[:concurrent]))
            steady.append(_speed(flow, flow_seconds) / slow)
            bursts.append(_speed(burst, burst_seconds) / slow_burst)
            last = max(r.first_segment_seconds or 0.0 for r in burst)
            lone = statistics.median(r.first_segment_seconds or 0.0 for r in alone)
            waits.append(last / lone)
            notes = f"{_speed(flow, flow_seconds):.1f} ÷ {slow:.1f} tokens/s, {len(asked)} requests"
            burst_notes = f"{_speed(burst, burst_seconds):.1f} ÷ {slow_burst:.1f} tokens/s"
            wait_notes = f"{last:.2f} s ÷ {lone:.2f} s"
    return [
        Figure(f"throughput with {concurrent} in flight ÷ one by one", statistics.median(steady), 4.5, True, notes),
        Figure(f"throughput of {concurrent} alone ÷ one by one", statistics.median(bursts), 4.5, True, burst_notes),
        Figure(f"last first segment of {concurrent} ÷ a lone one", statistics.median(waits), 3, False, wait_notes),
    ]


def together(
    engine: EnsembleEngine, asked: list[list[Message]], params: SamplingParams
) -> tuple[list[EnsembleResult], float]:
    """Answers of requests that are asked at once, and the seconds until the last one."""
    start = time.perf_counter()
    results = engine.generate_batch(asked, params)
    seconds = time.perf_counter() - start
    return [result for result in results if isinstance(result, EnsembleResult)], seconds


def _speed(results: list[EnsembleResult], seconds: float) -> float:
    """Tokens a second."""
    return sum(result.usage.completion_tokens for result in results) / seconds


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
    parser.add_argument("--concurrent", type=int, default=8)
    parser.add_argument("--waves", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS / "serving.json")
    options = parser.parse_args()
    figures = [*serving(options.concurrent, options.waves, options.tokens, options.repeats), prefix(options.repeats)]
    report("serving, demo members", figures, options.json)


if __name__ == "__main__":
    main()
