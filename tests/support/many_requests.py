"""Many questions of mixed length."""

from __future__ import annotations

import random

from specfuse_shared import SamplingParams

WORDS = ["the", "sea", "moon", "tide", "star", "ship", "wind", "night", "glass", "lens", "map", "door"]


def requests(count: int) -> list[tuple[str, SamplingParams]]:
    """Questions of mixed length; half greedy, half sampled with a seed."""
    chance = random.Random(3)
    results = []
    for n in range(count):
        words = " ".join(chance.choice(WORDS) for _ in range(chance.randint(2, 80)))
        params = SamplingParams(max_tokens=chance.randint(5, 60), temperature=n % 2 * 0.9, seed=n)
        results.append((f"Tell me about {words}.", params))
    return results
