"""RMS norms as one operation instead of eight, on every device; packed weights on a processor.

Packed weights have the layout that the processor's matrix library (oneDNN) reads best: once at load, not in every
product.
"""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache, partial
from typing import Any

import torch
from torch.nn.functional import embedding, linear, rms_norm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_OFFSETS = (0.0, 1.0)
"""The offset that models add to the weight."""


def fuse_norms(model: torch.nn.Module) -> int:
    """Replace the norms whose formula is known, y = x / √(mean x² + ε) · (weight + offset); how many there were.

    The formula is found by trying a small norm of the same class in float32. Where numbers have 16 bits, the fused norm
    rounds once at its end; a model may round before the weight, too. Norms that weights are moved for stay as they are.
    """
    count = 0
    for module in model.modules():
        if hasattr(module, "_hf_hook") or (formula := _formula(module)) is None:
            continue
        norm: Any = module
        kind: Any = type(module)
        offset, norm.fused_epsilon = formula
        if offset:
            scale = torch.as_tensor(module.weight).float() + offset
            module.register_buffer("fused_scale", scale, persistent=False)
        norm.__class__ = _fused(kind, bool(offset))
        count += 1
    return count


@cache
def _fused(kind: Any, has_offset: bool) -> type:
    """A subclass with a fused forward pass. It is the same for all layers, so that compiled code serves all of them."""

    def plain(module: Any, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != module.weight.dtype:
            return torch.as_tensor(kind.forward(module, x))
        return rms_norm(x, module.weight.shape, module.weight, module.fused_epsilon)

    def scaled(module: Any, x: torch.Tensor) -> torch.Tensor:
        """In float32, for 1 + weight has more digits than 16 bits hold."""
        return rms_norm(x.float(), module.weight.shape, module.fused_scale, module.fused_epsilon).to(x.dtype)

    return subclass_of(kind, forward=scaled if has_offset else plain)


def subclass_of(kind: Any, **members: Any) -> type:
    """A subclass of a module's class with these members. Its modules are pickled and copied as modules of `kind`,
    because the subclass cannot be imported."""

    def reduced(module: Any, protocol: Any) -> Any:
        return _unfilled, (kind,), module.__dict__

    return type(kind.__name__, (kind,), {**members, "__reduce_ex__": reduced, "__module__": kind.__module__})


def _unfilled(kind: Any) -> Any:
    return kind.__new__(kind)


def _formula(module: torch.nn.Module) -> tuple[float, float] | None:
    """Offset and ε of an RMS norm; None for other modules, and for one that computes something else."""
    kind = type(module)
    if (
        hasattr(module, "fused_epsilon")
        or not kind.__name__.endswith("RMSNorm")
        or [name for name, _ in module.named_parameters()] != ["weight"]
    ):
        return None
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(epsilon, float):
        return None
    if kind not in _known:
        _known[kind] = _tried(module, epsilon)
    offset = _known[kind]
    return None if offset is None else (offset, epsilon)


_known: dict[type, float | None] = {}
"""The offset of each class, None for a class with another formula."""


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
    except Exception:  # it requires other arguments
        return None
    matching = (o for o in _OFFSETS if torch.allclose(rms_norm(x, (8,), weight + o, epsilon), expected, 1e-5, 1e-6))
    return next(matching, None)


_ROWS = 8
"""Tokens that the layout is made for: it serves one and a thousand as well."""


def pack_weights(model: torch.nn.Module) -> int:
    """Pack the bfloat16 linear layers of `model` on a processor; returns the additional bytes.

    The layers' weights are freed: empty parameters of the same shape replace them. So layers are skipped if the
    model uses their weights in another way, or if a few tokens do not reach them. An embedding that shares weights with
    the output layer keeps them, which accounts for the additional bytes. Products stay the same.
    """
    layers = [m for m in model.modules() if type(m) is torch.nn.Linear and _is_plain(m.weight)]
    if not layers or not _can_pack():
        return 0
    movable = _only_multiplied(model)
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    more = 0
    for module in layers:
        weight = module.weight
        if hasattr(module, "_hf_hook") or id(weight) not in movable:
            continue
        more += weight.nbytes if uses[id(weight)] > 1 else 0
        module.forward = partial(_product, _packed(weight), module.bias)  # type: ignore[method-assign]
        module.weight = torch.nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
    return more


class _Uses(TorchFunctionMode):
    """Which tensors, by their id, linear layers multiply with, and which are given to anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplied = set[int]()
        self.otherwise = set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parameters = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.nn.Parameter)}
        if func is linear:
            self.multiplied |= parameters
        elif func is not embedding and getattr(func, "__name__", "") != "__get__":  # what it looks like is no use of it
            self.otherwise |= parameters
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def _only_multiplied(model: torch.nn.Module) -> set[int]:
    """The weights, by their id, that a forward pass over a few tokens multiplies with and uses in no other way; empty
    for a model without token input."""
    uses = _Uses()
    with uses:
        try:
            model(input_ids=torch.arange(1, 5)[None], use_cache=False)
        except Exception:  # what a model wants instead has no common form
            return set()
    return uses.multiplied - uses.otherwise


def _is_plain(weight: torch.Tensor) -> bool:
    """Quantised weights are parameters of other classes, independent of their stated number format."""
    return type(weight) is torch.nn.Parameter and weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def _packed(weight: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS))


def _product(packed: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], ""))


@cache
def _can_pack() -> bool:
    """Whether this processor and this torch can, and the products are right: tried once, on a small matrix."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 32, generator=generator).bfloat16() for rows in (16, 3))
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        product = _product(_packed(weight), None, x)
    except Exception:  # torch without the library, or with another of its functions
        return False
    return torch.allclose(product.float(), linear(x, weight).float(), rtol=2**-6, atol=2**-6)
