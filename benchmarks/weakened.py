"""Weak members made from good ones: noise on the weights, or layers taken out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specfuse_shared import MemberConfig
from specfuse_shared.loading.gguf import converted


def noisy(member: MemberConfig, noise: float, folder: Path) -> MemberConfig:
    """A copy with Gaussian noise on every weight matrix, in standard deviations of that matrix."""
    target = folder / f"{member.label}-noise-{noise}"
    if not target.is_dir():
        generator = torch.Generator().manual_seed(1)
        model, tokenizer = _read(member)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
        _write(model, tokenizer, target)
    return MemberConfig(str(target), name=f"{member.label}+{noise:g}", adapter=member.adapter, dtype=member.dtype)


def shallow(member: MemberConfig, layers: int, folder: Path) -> MemberConfig:
    """A copy of the first `layers` layers, without any adapter: a smaller model, which soon repeats itself."""
    target = folder / f"{member.label}-layers-{layers}"
    if not target.is_dir():
        model, tokenizer = _read(member)
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
        if kinds := getattr(model.config, "layer_types", None):
            model.config.layer_types = kinds[:layers]
        _write(model, tokenizer, target)
    return MemberConfig(str(target), name=f"{member.label}/{layers}", dtype=member.dtype)


def _read(member: MemberConfig) -> tuple[Any, Any]:
    source = converted(Path(member.model), None, lambda stage: None)
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), AutoTokenizer.from_pretrained(source)


def _write(model: Any, tokenizer: Any, target: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
