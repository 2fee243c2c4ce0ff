"""Configurations of public 7 to 9 B models, written as config.json without any weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

_LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": ("llama", _LLAMA),
    "qwen2.5-7b": (
        "qwen2",
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
        },
    ),
    "mistral-7b": (
        "mistral",
        {**_LLAMA, "vocab_size": 32768, "max_position_embeddings": 32768, "sliding_window": None},
    ),
    "gemma-2-9b": (
        "gemma2",
        {
            "vocab_size": 256000,
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
        },
    ),
    "glm-4-9b": (
        "glm",
        {
            "vocab_size": 151552,
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
        },
    ),
}


def write_shape(name: str, folder: Path, **settings: Any) -> Path:
    """A folder with the config.json of a model, its weights in bfloat16 unless `settings` say otherwise."""
    kind, shape = SHAPES[name]
    config = AutoConfig.for_model(kind, **{"dtype": "bfloat16", **shape, **settings})
    config.save_pretrained(folder / name)
    return folder / name
