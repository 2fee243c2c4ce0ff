"""Norms as one operation give the same results as the model's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specfuse_shared.runtime.fused_norms import fuse_norms
from tests.support.tiny import ARCHITECTURES

WITHOUT = {"gpt2", "gpt_neox", "cohere2"}
"""Architectures with layer norms."""
IDS = torch.arange(3, 40)[None]


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=256, **ARCHITECTURES[kind]))
    for module in model.modules():
        if type(module).__name__.endswith("Norm"):
            module.weight.data += 0.3 * torch.randn_like(module.weight)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("kind", ARCHITECTURES)
@torch.inference_mode()
def test_logits_are_unchanged(kind: str) -> None:
    model = model_of(kind)
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    before = model(IDS, use_cache=False).logits
    assert fuse_norms(model) == len(norms)
    assert (len(norms) == 0) == (kind in WITHOUT)
    assert torch.allclose(model(IDS, use_cache=False).logits, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@torch.inference_mode()
def test_sixteen_bits_differ_by_one_rounding(kind: str) -> None:
    model = model_of(kind).bfloat16()
    norm = next(m for m in model.modules() if type(m).__name__.endswith("RMSNorm"))
    x = torch.randn(1, 7, norm.weight.shape[0]).bfloat16()
    before = norm(x)
    fuse_norms(model)
    assert norm(x).dtype == torch.bfloat16
    assert torch.allclose(norm(x).float(), before.float(), rtol=2**-7, atol=1e-6)


class OddRMSNorm(torch.nn.Module):
    """A norm with another formula, over half of the values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x[..., : x.shape[-1] // 2]
        return x * torch.rsqrt(half.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class GatedRMSNorm(OddRMSNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * gate


@pytest.mark.parametrize("kind", [OddRMSNorm, GatedRMSNorm])
def test_other_norms_are_unchanged(kind: type[torch.nn.Module]) -> None:
    model = torch.nn.Sequential(kind())
    assert fuse_norms(model) == 0
    assert type(model[0]) is kind


def test_norms_with_offloaded_weights_are_unchanged() -> None:
    model = model_of("llama")
    norm = next(m for m in model.modules() if type(m).__name__.endswith("RMSNorm"))
    norm._hf_hook = object()
    count = sum(type(m).__name__.endswith("RMSNorm") for m in model.modules())
    assert fuse_norms(model) == count - 1
    assert "forward" not in vars(norm)


@torch.inference_mode()
def test_the_scale_moves_with_the_model() -> None:
    model = model_of("gemma3_text")
    fuse_norms(model)
    buffers = dict(model.named_buffers())
    assert any(name.endswith("fused_scale") for name in buffers)
    assert not any(name.endswith("fused_scale") for name in model.state_dict())
    moved = copy.deepcopy(model).to("meta")
    assert all(b.device.type == "meta" for name, b in moved.named_buffers() if name.endswith("fused_scale"))
