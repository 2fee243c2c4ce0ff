"""Decoder layers compiled once, for any number of tokens: small kernels become part of larger ones.

Compiled code runs in packed steps only; other forward passes have other masks and caches. Layers of the same class
share it, so each model compiles one layer, for one token and for several.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specfuse_shared.runtime.attention import is_in_packed_step

_CACHE_ENV = "TORCHINDUCTOR_CACHE_DIR"
_MOST_VARIANTS = 64
"""Variants of a function that torch compiles before it gives up. Members of one family share functions."""


def compile_layers(model: torch.nn.Module, folder: Path, backend: str = "inductor") -> list[torch.nn.Module]:
    """Compile the decoder layers of a model at their first packed step; returns them, none if they are not known.

    Args:
        model: A model of transformers, which names the classes of its layers.
        folder: Where compiled code is kept for the next start, unless $TORCHINDUCTOR_CACHE_DIR names another folder.
        backend: The compiler.
    """
    classes = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in classes]
    if not layers or any(hasattr(layer, "_hf_hook") for layer in layers):
        return []
    os.environ.setdefault(_CACHE_ENV, str(folder))
    settings: Any = torch._dynamo.config
    settings.allow_unspec_int_on_nn_module = True  # else every layer's number compiles anew
    settings.recompile_limit = max(settings.recompile_limit, _MOST_VARIANTS)
    for layer in layers:
        compiled = torch.compile(layer.forward, dynamic=True, backend=backend)
        layer.forward = partial(_forward, layer.forward, compiled)
    return layers


def leave_uncompiled(layers: list[torch.nn.Module]) -> None:
    """Undo `compile_layers`."""
    for layer in layers:
        del layer.forward


def _forward(plain: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return (compiled if is_in_packed_step() else plain)(*args, **kwargs)
