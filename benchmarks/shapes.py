"""Members with random weights at the shapes of real models: nothing is downloaded, the weights are made on the device.

Each has a tokenizer of its own, trained on the spot on the example documents. It knows a few thousand tokens of
printable ASCII; the ids beyond them are padding, which no member may say, so that the logits are as wide as the real
model's. No token ends a turn: answers are as long as asked for.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from specfuse_shared import MemberConfig
from specfuse_shared.members.local.member import LocalMember

DOCUMENTS = sorted((Path(__file__).parents[1] / "examples" / "documents").glob("*.md"))
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
_SMALLEST_VOCABULARY, _STEP = 900, 150


@dataclass(frozen=True)
class Shape:
    """A model's configuration: `kind` as transformers names it, `real` sizes, and what `--tiny` puts in their place."""

    name: str
    kind: str
    real: dict[str, Any]
    tiny: dict[str, Any]

    def config(self, tiny: bool) -> Any:
        """Without special tokens, so that nothing ends an answer."""
        none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        return AutoConfig.for_model(self.kind, **{**self.real, **(self.tiny if tiny else {}), **none})


def _shape(
    name: str, kind: str, sizes: tuple[int, int, int], heads: tuple[int, int, int], ids: int, **more: Any
) -> Shape:
    """`sizes`: hidden, inner, layers. `heads`: of queries, of keys, numbers in each. `ids`: of the vocabulary."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    real = {**dict(zip(names, (*sizes, *heads), strict=False)), "head_dim": heads[2], "vocab_size": ids, **more}
    tiny = {**dict(zip(names, (64, 96, 2, 4, 2), strict=True)), "head_dim": 16, "vocab_size": 2000}
    return Shape(name, kind, real, tiny)


_LONG: dict[str, Any] = {"max_position_embeddings": 32768, "rope_theta": 1e6}
_SHORT: dict[str, Any] = {"max_position_embeddings": 8192}
SHAPES = (
    _shape("llama-3-8b", "llama", (4096, 14336, 32), (32, 8, 128), 128256, **_SHORT, rope_theta=5e5),
    _shape("qwen2.5-7b", "qwen2", (3584, 18944, 28), (28, 4, 128), 152064, **_LONG),
    _shape("mistral-7b", "mistral", (4096, 14336, 32), (32, 8, 128), 32768, **_LONG, sliding_window=None),
    _shape("gemma-2-9b", "gemma2", (3584, 14336, 42), (16, 8, 256), 256000, **_SHORT, query_pre_attn_scalar=256),
    _shape("glm-4-9b", "glm", (4096, 13696, 40), (32, 2, 128), 151552, **_SHORT, attention_bias=True),
)
"""Llama 3 8B, Qwen 2.5 7B, Mistral 7B v0.3, Gemma 2 9B and GLM-4 9B, as their published configurations have them."""


def members(
    tiny: bool, device: torch.device, dtype: torch.dtype, execution: str, most_bytes: float
) -> Iterator[LocalMember]:
    """As many of the shapes, in their order, as `most_bytes` of weights hold."""
    taken = 0
    for number, shape in enumerate(SHAPES):
        config = shape.config(tiny)
        taken += weight_bytes(config, dtype)
        if taken > most_bytes:
            return
        torch.manual_seed(number)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        member = MemberConfig(shape.name, name=shape.name, device=str(device))
        tokenizer = trained_tokenizer(_SMALLEST_VOCABULARY + number * _STEP)
        yield LocalMember(member, execution=execution, loaded=(model, tokenizer))


def weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """Of a model that is not made."""
    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(config, dtype=dtype).get_memory_footprint())


def trained_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over printable ASCII, with a chat template and no special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["".join(c for c in d.read_text("utf-8") if c in string.printable) for d in DOCUMENTS]
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False)
    tokenizer.train_from_iterator([*texts, string.printable], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = TEMPLATE
    return fast
