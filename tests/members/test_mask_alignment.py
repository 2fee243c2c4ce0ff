"""Kernels that align masks to the wrong corner after a first piece of the prompt, as some of ROCm and MPS do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import CausalBias
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from specfuse_shared import MemberLoadError
from specfuse_shared.members.local.probe import _attempt, probe
from specfuse_shared.runtime import attention
from specfuse_shared.runtime.attention import GROUPED
from tests.support.tiny import byte_level_tokenizer, save_model

own_kernel = scaled_dot_product_attention


def top_left(query: Any, key: Any, value: Any, attn_mask: Any = None, **more: Any) -> torch.Tensor:
    if isinstance(attn_mask, CausalBias):
        return own_kernel(query, key, value, is_causal=True, **more)
    return own_kernel(query, key, value, attn_mask, **more)


@pytest.fixture(params=[("llama", {}), ("mistral", {"sliding_window": 4096}), ("qwen3", {})], ids=lambda kind: kind[0])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    kind, shape = request.param
    loaded = AutoModelForCausalLM.from_pretrained(save_model(kind, byte_level_tokenizer(), tmp_path, **shape))
    loaded.set_attn_implementation(GROUPED)
    return loaded.eval()


def test_the_probe_refuses_kernels_that_mask_from_the_wrong_corner(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with a window of 4,096 uses them as well, though its windows are shrunk for the rest of the probe."""
    for module in ("runtime.attention", "members.local.probe"):
        monkeypatch.setattr(f"specfuse_shared.{module}.masks_lower_right", lambda device: True)
    right = probe(model, "tiny")
    assert right.verification == "packed"
    assert right.error < 1e-4
    monkeypatch.setattr(attention, "scaled_dot_product_attention", top_left)
    assert _attempt(model, right, [], {}).error > 0.01
    assert probe(model, "tiny").verification == "rows", "the model's own masks are used"


@pytest.mark.parametrize("words", ["CUDA out of memory", "MPS backend out of memory (MPS allocated: 17.90 GB)"])
def test_out_of_memory_in_the_probe_does_not_refuse_the_model(
    model: Any, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """Earlier, such a model was refused for wrong probabilities."""

    def out_of_memory(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError(words)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", out_of_memory)
    monkeypatch.setattr(attention, "sdpa_attention_forward", out_of_memory)
    with pytest.raises(MemberLoadError, match=r"member 'tiny': memory ran out .* name a smaller model"):
        probe(model, "tiny")


@pytest.mark.parametrize(
    ("device", "hip", "knows"),
    [("cuda", None, True), ("cuda", "6.4", False), ("mps", None, False), ("xpu", None, False), ("cpu", None, False)],
)
def test_kernels_with_lower_right_masks_are_used_only_on_known_devices(
    monkeypatch: pytest.MonkeyPatch, device: str, hip: str | None, knows: bool
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    assert attention.masks_lower_right(torch.device(device)) is knows
