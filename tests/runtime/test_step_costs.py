"""The costs of a step on a GPU, at the shapes of real models: bounds on kernels, bytes and masks, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

LAYERS = {"llama-3-8b": 32, "qwen2.5-7b": 28, "gemma-2-9b": 42}


@pytest.fixture(scope="module")
def costs() -> dict[tuple[str, str], dict[str, Any]]:
    script = Path(__file__).parents[2] / "benchmarks" / "step_costs.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {(line["model"], line["step"]): line for line in lines}


@pytest.mark.parametrize("model", LAYERS)
def test_a_drafted_token_reads_little_more_than_the_weights(costs: Any, model: str) -> None:
    weights, draft = costs[model, "weights"]["bytes"], costs[model, "draft"]
    assert draft["matrix_bytes"] < 1.05 * weights
    assert draft["bytes"] < 1.11 * weights
    limit = {"llama-3-8b": 26, "qwen2.5-7b": 26, "gemma-2-9b": 36}[model]
    assert draft["kernels"] < limit * LAYERS[model]


@pytest.mark.parametrize("model", LAYERS)
def test_a_verification_of_five_costs_little_more_than_a_token(costs: Any, model: str) -> None:
    """At most half as much again, except for a model whose soft caps need the plain attention."""
    draft, verify = costs[model, "draft"]["bytes"], costs[model, "verify"]["bytes"]
    assert verify < (1.3 if model == "gemma-2-9b" else 1.15) * draft


@pytest.mark.parametrize("model", LAYERS)
def test_each_layer_has_one_attention_call_for_any_input(costs: Any, model: str) -> None:
    assert [costs[model, step]["attention"] for step in ("draft", "verify", "prompt")] == [{"paged": LAYERS[model]}] * 3
