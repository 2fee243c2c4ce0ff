"""Configurations of public 7 to 9 B models, written as config.json without any weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench_members import SHAPES as MADE
from transformers import AutoConfig

SHAPES = {shape.name: (shape.kind, shape.real) for shape in MADE}


def write_shape(name: str, folder: Path, **settings: Any) -> Path:
    """A folder with the config.json of a model, its weights in bfloat16 unless `settings` say otherwise."""
    kind, shape = SHAPES[name]
    config = AutoConfig.for_model(kind, **{"dtype": "bfloat16", **shape, **settings})
    config.save_pretrained(folder / name)
    return folder / name
