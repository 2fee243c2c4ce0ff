"""All records of an answer, for comparisons byte for byte."""

from __future__ import annotations

from typing import Any

from specfuse_shared import EnsembleResult, Grammar, SamplingParams

ASKED: list[tuple[str, SamplingParams]] = [
    ("How do the tides follow the moon?", SamplingParams(max_tokens=30)),
    ("北京? Name 3 ships, ça va 🎉", SamplingParams(max_tokens=25, temperature=0.9, seed=4)),
    ("Letters?", SamplingParams(max_tokens=20, grammar=Grammar.regex("[a-f]{3,9}"))),
    ("Endless?", SamplingParams(max_tokens=40, stop=["e"], logprobs=True, top_logprobs=3)),
]


def everything(result: EnsembleResult | BaseException) -> dict[str, Any]:
    """A result without its times."""
    assert isinstance(result, EnsembleResult)
    data = result.to_dict()
    for record in data["rounds"]:
        del record["timing"]
    return {name: value for name, value in data.items() if not name.endswith("seconds")}
