"""Tiny random models of many architectures, with two small tokenizers of different kinds, saved as local folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from specfuse_shared import EnsembleConfig, MemberConfig, Message

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen jugs of liquor, he said.",
    "def f(x):\n    if x > 1:\n        return x ** 2\n    return None\n",
    "北京是中国的首都，有很多历史。日本語のテキストもあります。 Ещё немного текста.",
    "🎉 party 🐱 cat 👩‍🚀 astronaut — naïve café, 12.5 km/h and 3/4 of it; (see below) [1] {x}",
    "User asks a question about the sea. Assistant answers that the tides follow the moon.",
] * 4

CHAT_TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _SHAPE,
    "qwen3": _SHAPE,
    "mistral": {**_SHAPE, "sliding_window": 12},
    "gemma2": {**_SHAPE, "sliding_window": 12, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        **_SHAPE,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {**_SHAPE, "pad_token_id": 0, "sliding_window": 14},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "olmo2": _SHAPE,
    "gpt_neox": {k: v for k, v in _SHAPE.items() if k not in ("num_key_value_heads", "head_dim")},
    "cohere2": {
        **_SHAPE,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "gpt_oss": {**_SHAPE, "sliding_window": 12, "num_local_experts": 2, "num_experts_per_tok": 1},
    "lfm2": {**_SHAPE, "layer_types": ["conv", "full_attention", "conv"]},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
}
"""Among them windows, soft-capped and sink attention, learned positions, experts, a hybrid and a recurrent model."""


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a chat template, as of the GPT and Llama-3 families."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|pad|>", "<|turn|>", "<|end|>"]
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """BPE over "▁" with byte fallback and a dummy prefix, as of the Llama-2 family; no chat template."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{n:02X}>" for n in range(256)]
    tokenizer.train_from_iterator(
        _common_characters(CORPUS),
        trainers.BpeTrainer(vocab_size=800, special_tokens=special + byte_tokens, show_progress=False),
    )
    data = tokenizer.to_str()
    tokenizer = Tokenizer.from_str(_bytes_are_plain(data))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def save_model(kind: str, tokenizer: PreTrainedTokenizerFast, folder: Path, seed: int = 0, **shape: Any) -> Path:
    """A random model of an architecture, its `shape` changed, with weights large enough for distinct probabilities."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **{**ARCHITECTURES[kind], **shape},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "A_log" not in name:
                parameter.normal_(0, 0.25)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_pair(folders: pytest.TempPathFactory, **shape: Any) -> dict[str, Path]:
    """Two members of different families, each in its folder: a byte-level chat model, a metaspace base model."""
    return {
        "chat": save_model("qwen3", byte_level_tokenizer(), folders.mktemp("chat"), **shape),
        "base": save_model("llama", metaspace_tokenizer(), folders.mktemp("base"), seed=1, **shape),
    }


def pair_config(pair: Mapping[str, Path]) -> EnsembleConfig:
    """The ensemble of a pair."""
    members = [MemberConfig(str(folder), name=name) for name, folder in pair.items()]
    return EnsembleConfig(members, segment_tokens=6, first_segment_tokens=None, exit="never")


def _common_characters(texts: list[str]) -> list[str]:
    """The texts with their 80 most frequent characters only; the trainer's limit breaks ties at random."""
    counted = Counter("".join(texts))
    retained = set(sorted(counted, key=lambda char: (-counted[char], char))[:80])
    return ["".join(char if char in retained else " " for char in text) for text in texts]


def _bytes_are_plain(data: str) -> str:
    """Mark byte tokens as vocabulary, not as special tokens."""
    import json

    parsed = json.loads(data)
    parsed["added_tokens"] = [t for t in parsed["added_tokens"] if not t["content"].startswith("<0x")]
    return json.dumps(parsed)


ROW_BY_ROW = {"lfm2", "mamba"}
MESSAGES = [Message("user", "The fox asks: how do the tides follow the moon? Explain with 3 reasons, ça va?")]
THINKING = CHAT_TEMPLATE.replace(
    "assistant\n{% endif %}", "assistant\n{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
