"""Decoder layers compiled once, for any number of tokens: small kernels become part of larger ones.

Compiled code runs in packed steps only; other forward passes have other masks and caches. Layers of the same class
share it, so each model compiles one layer, for one token and for several.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from specfuse_shared.runtime.attention import is_in_packed_step
from specfuse_shared.runtime.fused_norms import subclass_of

_CACHE_ENV = "TORCHINDUCTOR_CACHE_DIR"
_MOST_VARIANTS = 64
"""Variants of a function that torch compiles before it gives up. Members of one family share functions."""


def compile_layers(model: torch.nn.Module, folder: Path, backend: Any = "inductor") -> int:
    """Compile the decoder layers of a model at their first packed step; returns their number, 0 if none is known.

    Layers that something else has changed already stay as they are, and so do all others then.

    Args:
        model: A model of transformers, which names the classes of its layers.
        folder: Where compiled code is kept for the next start, unless $TORCHINDUCTOR_CACHE_DIR names another folder.
        backend: The compiler.
    """
    classes = set(getattr(model, "_no_split_modules", None) or ())
    layers: list[Any] = [module for module in model.modules() if type(module).__name__ in classes]
    if any("forward" in vars(layer) or hasattr(layer, "_hf_hook") for layer in layers):
        return 0
    os.environ.setdefault(_CACHE_ENV, str(folder))
    settings: Any = torch._dynamo.config
    settings.allow_unspec_int_on_nn_module = True  # else every layer's number compiles anew
    settings.recompile_limit = max(settings.recompile_limit, _MOST_VARIANTS)
    for layer in layers:
        if not hasattr(layer, "uncompiled_class"):  # another member may have compiled them
            kind: Any = type(layer)
            layer.__class__ = _compiled(kind, backend)
    return len(layers)


def leave_uncompiled(model: torch.nn.Module) -> None:
    """Undo `compile_layers`."""
    for module in model.modules():
        if (original := getattr(module, "uncompiled_class", None)) is not None:
            module.__class__ = original


@cache
def _compiled(kind: Any, backend: Any) -> Any:
    """A subclass whose forward pass is compiled in packed steps."""
    compiled = torch.compile(kind.forward, dynamic=True, backend=backend)

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return (compiled if is_in_packed_step() else kind.forward)(layer, *args, **kwargs)

    return subclass_of(kind, forward=forward, uncompiled_class=kind)
