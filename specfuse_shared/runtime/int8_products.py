"""Products of few tokens with int8 weights: weights are widened in registers, so that a step reads half the bytes.

torchao, which quantises to int8 with a scale for each output, widens the whole matrix in memory first. That takes more
traffic than bfloat16 weights (measured on an H200: 2.5 times as much). For more tokens its way is the better one.

Symbols: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

import logging

import torch
from torch.nn.functional import linear

from specfuse_shared.runtime.paged_attention import has_kernel

logger = logging.getLogger(__name__)

MOST_TOKENS = 32
"""Longer inputs are bound by arithmetic."""


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x · (weight · scales)ᵀ + bias, (T, N).

    Args:
        x: (T, K), bfloat16, float16 or float32.
        weight: (N, K), int8.
        scales: (N), float32: one for each output.
        bias: (N), of the type of `x`.
    """
    return torch.ops.specfuse.int8_linear(x, weight, scales, bias)  # type: ignore[no-any-return]


@torch.library.custom_op("specfuse::int8_linear", mutates_args=())
def _operation(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.device.type == "cuda" and has_kernel() and len(x) <= MOST_TOKENS:
        from specfuse_shared.runtime.int8_kernel import multiply

        with torch.cuda.device(x.device):  # Triton launches on the current device
            return multiply(x, weight, scales, bias)
    return plain(x, weight, scales, bias)


@_operation.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def plain(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The operation in plain torch: the scales come last, when the sums are rounded already, as torchao has it."""
    product = linear(x, weight.to(x.dtype)) * scales.to(x.dtype)
    return product if bias is None else product + bias


class Int8Linear(torch.nn.Linear):
    """A linear layer over `int8_weight` (N, K) and `int8_scales` (N)."""

    int8_weight: torch.Tensor
    int8_scales: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = int8_linear(x.flatten(0, -2), self.int8_weight, self.int8_scales, self.bias)
        return product.view(*x.shape[:-1], -1)


def use_int8_products(model: torch.nn.Module) -> int:
    """Let the layers of `model` that torchao quantised to int8 use `int8_linear`; returns their number.

    Layers with another form of weights, and those that an offloading hook feeds, stay as they are.
    """
    count = 0
    if not _works(next(model.parameters()).device):
        return 0
    for module in model.modules():
        if type(module) is not torch.nn.Linear or hasattr(module, "_hf_hook"):
            continue
        parts = _parts(module.weight)
        if parts is not None:
            module.int8_weight, module.int8_scales = parts
            module.__class__ = Int8Linear
            count += 1
    return count


@torch.inference_mode()
def _works(device: torch.device) -> bool:
    """Whether a small product runs on a device: Triton may be installed, but lack a compiler or the card's support."""
    try:
        x, scales = torch.ones(1, 128, device=device), torch.ones(32, device=device)
        product = int8_linear(x, torch.ones(32, 128, dtype=torch.int8, device=device), scales)
        return bool((product == 128).all())
    except Exception as error:  # compilers of kernels have their own classes
        logger.warning("int8 products run as torchao has them: %s: %s", type(error).__name__, error)
        return False


def _parts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Weights (N, K) and scales (N) of an int8 matrix of torchao; None for any other tensor."""
    numbers, scales = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if not isinstance(numbers, torch.Tensor) or not isinstance(scales, torch.Tensor) or numbers.dtype != torch.int8:
        return None
    zero, activations = getattr(weight, "zero_point", None), getattr(weight, "act_quant_kwargs", None)
    shifted = isinstance(zero, torch.Tensor) and bool(zero.any())
    if activations is not None or shifted or numbers.shape != weight.shape or scales.numel() != len(numbers):
        return None
    return numbers, scales.flatten().float()
