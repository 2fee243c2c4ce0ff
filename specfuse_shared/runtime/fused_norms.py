"""RMS norms as one operation of the library, instead of the eight that models write them in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import rms_norm

_OFFSETS = (0.0, 1.0)
"""What models add to the weight."""


def fuse_norms(model: torch.nn.Module) -> int:
    """Replace the norms whose formula is known, y = x / √(mean x² + ε) · (weight + offset); how many there were.

    The formula is found by trying a small norm of the same class in float32. Where numbers have 16 bits, the fused norm
    rounds once at its end; a model may round before the weight, too. Norms that weights are moved for stay as they are.
    """
    count = 0
    for module in model.modules():
        if hasattr(module, "_hf_hook") or (found := _formula(module)) is None:
            continue
        offset, epsilon = found
        if offset:
            scale = torch.as_tensor(module.weight).float() + offset
            module.register_buffer("fused_scale", scale, persistent=False)
            module.forward = partial(_scaled, module, epsilon)
        else:
            module.forward = partial(_plain, module, epsilon, module.forward)
        count += 1
    return count


def _plain(module: Any, epsilon: float, own: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    if x.dtype != module.weight.dtype:
        return torch.as_tensor(own(x))
    return rms_norm(x, module.weight.shape, module.weight, epsilon)


def _scaled(module: Any, epsilon: float, x: torch.Tensor) -> torch.Tensor:
    """In float32, for 1 + weight has more digits than 16 bits hold."""
    return rms_norm(x.float(), module.weight.shape, module.fused_scale, epsilon).to(x.dtype)


def _formula(module: torch.nn.Module) -> tuple[float, float] | None:
    """Offset and ε of an RMS norm; None for other modules, and for one that computes something else."""
    kind = type(module)
    if not kind.__name__.endswith("RMSNorm") or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(epsilon, float):
        return None
    if kind not in _known:
        _known[kind] = _tried(module, epsilon)
    offset = _known[kind]
    return None if offset is None else (offset, epsilon)


_known: dict[type, float | None] = {}
"""The offset of each class, None for those of another formula."""


@torch.inference_mode()
def _tried(module: torch.nn.Module, epsilon: float) -> float | None:
    """Which offset makes the formula give what the module gives, for a weight of eight numbers."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 4, 8, generator=generator), torch.rand(8, generator=generator)
    x *= epsilon**0.5  # small enough for ε to count
    small = copy.copy(module)
    small.__dict__["_parameters"] = {"weight": torch.nn.Parameter(weight, requires_grad=False)}
    try:
        expected = type(module).forward(small, x)
    except Exception:  # it wants more than this, whatever it is
        return None
    matching = (o for o in _OFFSETS if torch.allclose(rms_norm(x, (8,), weight + o, epsilon), expected, 1e-5, 1e-6))
    return next(matching, None)
