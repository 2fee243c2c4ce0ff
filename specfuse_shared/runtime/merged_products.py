"""Projections of one input as one product: queries, keys and values; gate and up.

A product with few tokens takes as long as reading its matrix, and a card reads one large matrix faster than two small
ones (an H200: 1.18 to 1.30 instead of 1.39 to 1.43 times the time of reading all weights).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import groupby

import torch
from torch.nn.functional import linear


def merge_products(model: torch.nn.Module) -> int:
    """Merge the linear layers of each module that get the same input; returns the number of merged products.

    The layers keep their names and weights: these become views of the merged matrix. Quantised layers, and those that
    weights are moved for, stay as they are.
    """
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    count = 0
    for layers in _layers_of_one_input(model):
        alike = [layer for layer in layers if _is_plain(layer) and uses[id(layer.weight)] == 1]
        kinds = {(layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in alike}
        if len(alike) > 1 and len(kinds) == 1:
            _merge(alike)
            count += 1
    return count


class _Product:
    """One product for several layers: the first to be called with an input computes the outputs of all.

    `weight` (N, K) and `bias` (N) of all, of which each has `sizes` rows.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, sizes: Sequence[int]) -> None:
        self.weight = weight
        self.bias = bias
        self.sizes = list(sizes)
        self.input: torch.Tensor | None = None
        self.outputs: list[torch.Tensor | None] = [None] * len(sizes)


class MergedLinear(torch.nn.Linear):
    """A linear layer whose product is part of a merged one. `weight` and `bias` are views of that one's rows."""

    merged: _Product
    merged_number: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        merged, number = self.merged, self.merged_number
        if merged.input is not x:
            merged.input = x
            merged.outputs = list(linear(x, merged.weight, merged.bias).split(merged.sizes, dim=-1))
        output = merged.outputs[number]
        if output is None:
            return linear(x, self.weight, self.bias)
        merged.outputs[number] = None
        if all(other is None for other in merged.outputs):  # hold no memory until the next step
            merged.input = None
        return output


class _Inputs:
    """Which layers of a module get one input after the other, and which input: noted during a forward pass."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, torch.Tensor, torch.nn.Linear]] = []

    def note(self, parent: str, layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(layer, torch.nn.Linear)
        if inputs:
            self.calls.append((parent, inputs[0], layer))


@torch.inference_mode()
def _layers_of_one_input(model: torch.nn.Module) -> list[list[torch.nn.Linear]]:
    """Linear layers of the same module that a forward pass over a few tokens calls in a row with the same input."""
    inputs, hooks = _Inputs(), []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            note = partial(inputs.note, name.rpartition(".")[0])
            hooks.append(module.register_forward_pre_hook(note))
    try:
        model(input_ids=torch.arange(1, 5, device=next(model.parameters()).device)[None], use_cache=False)
    except Exception:  # what a model wants instead has no common form
        return []
    finally:
        for hook in hooks:
            hook.remove()
    groups = groupby(inputs.calls, key=lambda call: (call[0], id(call[1])))
    return [list(dict.fromkeys(layer for _, _, layer in calls)) for _, calls in groups]


def _is_plain(layer: torch.nn.Linear) -> bool:
    """Whether it is a whole linear layer and nothing else."""
    changed = "forward" in vars(layer) or hasattr(layer, "_hf_hook")
    weight = layer.weight
    return type(layer) is torch.nn.Linear and not changed and type(weight) is torch.nn.Parameter


@torch.no_grad()
def _merge(layers: Sequence[torch.nn.Linear]) -> None:
    weight = torch.cat([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    product = _Product(weight, bias, [layer.out_features for layer in layers])
    start = 0
    for number, layer in enumerate(layers):
        stop = start + layer.out_features
        layer.weight = torch.nn.Parameter(weight[start:stop], requires_grad=False)
        if bias is not None:
            layer.bias = torch.nn.Parameter(bias[start:stop], requires_grad=False)
        layer.__class__ = MergedLinear
        assert isinstance(layer, MergedLinear)
        layer.merged, layer.merged_number = product, number
        start = stop
    if weight.device.type == "cuda":
        torch.cuda.empty_cache()  # else the freed matrices, each too small for the next merged one, would add up
