"""Members for benchmarks: random weights at the shapes of real models, weakened copies, engines over loaded members.

Random members need no download: their weights are created on the device. Each has a tokenizer, trained on the example
documents, with a few thousand tokens of printable ASCII. The vocabulary is padded to the real model's size, so that
logits have the real width; no member can produce a padding token. No token ends a turn, so answers have the requested
length.
"""

from __future__ import annotations

import gc
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from specfuse_shared import EnsembleConfig, EnsembleEngine, EnsembleResult, MemberConfig, Message
from specfuse_shared.loading.progress import OnLoadProgress
from specfuse_shared.members.assembly import Assembly, assemble
from specfuse_shared.members.local.member import LocalMember, merges_products
from specfuse_shared.runtime.merged_products import merge_products

DOCUMENTS = sorted((Path(__file__).parents[1] / "examples" / "documents").glob("*.md"))
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
_SMALLEST_VOCABULARY, _STEP = 900, 150


@dataclass(frozen=True)
class Shape:
    """A model's configuration: its `kind` in transformers, its `real` sizes, and the sizes for `--tiny`."""

    name: str
    kind: str
    real: dict[str, Any]
    tiny: dict[str, Any]

    def config(self, tiny: bool) -> Any:
        """The configuration without special tokens, so that no token ends an answer."""
        none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        return AutoConfig.for_model(self.kind, **{**self.real, **(self.tiny if tiny else {}), **none})


def _shape(
    name: str, kind: str, sizes: tuple[int, int, int], heads: tuple[int, int, int], ids: int, **more: Any
) -> Shape:
    """`sizes`: hidden, intermediate, layers. `heads`: query heads, key heads, head size. `ids`: vocabulary size."""
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
"""Llama 3 8B, Qwen 2.5 7B, Mistral 7B v0.3, Gemma 2 9B and GLM-4 9B, with the sizes of the published models."""


def members(
    tiny: bool, device: torch.device, dtype: torch.dtype, execution: str, most_bytes: float
) -> Iterator[LocalMember]:
    """Members of the first shapes, as many as have at most `most_bytes` of weights together."""
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
        if merges_products(device, execution):
            merge_products(model)
        tokenizer = trained_tokenizer(_SMALLEST_VOCABULARY + number * _STEP)
        yield LocalMember(member, execution=execution, loaded=(model, tokenizer))


def weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of a model's weights, without creating it."""
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


# ── weakened copies ──────────────────────────────────────────────────────────────────────────────


def noisy(member: MemberConfig, noise: float, folder: Path) -> MemberConfig:
    """A copy with Gaussian noise on every weight matrix, in standard deviations of that matrix."""
    target = folder / f"{member.label}-noise-{noise}"
    if not target.is_dir():
        generator = torch.Generator().manual_seed(1)
        model, tokenizer = _read(member)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
        _write(model, tokenizer, target)
    return MemberConfig(str(target), name=f"{member.label}+{noise:g}", adapter=member.adapter, dtype=member.dtype)


def shallow(member: MemberConfig, layers: int, folder: Path) -> MemberConfig:
    """A copy of the first `layers` layers, without any adapter: a smaller model that tends to repeat itself."""
    target = folder / f"{member.label}-layers-{layers}"
    if not target.is_dir():
        model, tokenizer = _read(member)
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
        if kinds := getattr(model.config, "layer_types", None):
            model.config.layer_types = kinds[:layers]
        _write(model, tokenizer, target)
    return MemberConfig(str(target), name=f"{member.label}/{layers}", dtype=member.dtype)


def _read(member: MemberConfig) -> tuple[Any, Any]:
    from specfuse_shared.loading.gguf import converted

    source = converted(Path(member.model), None, lambda stage: None)
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), AutoTokenizer.from_pretrained(source)


def _write(model: Any, tokenizer: Any, target: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


# ── engines over loaded members ──────────────────────────────────────────────────────────────────

SENTENCE = "The observatory keeps a log of every clear night, its moon, its wind and its visitors. "
SEGMENT = 10


class LoadedEngine(EnsembleEngine):
    """An engine over loaded members, without the repetition guard: random weights repeat themselves."""

    def __init__(self, members: Sequence[LocalMember], **settings: Any) -> None:
        names = [MemberConfig(member.name, name=member.name) for member in members]
        usual: dict[str, Any] = {
            "segment_tokens": SEGMENT,
            "first_segment_tokens": None,
            "exit": "never",
            "reuse_prefixes": False,
            "repetition_guard": False,
        }
        super().__init__(EnsembleConfig(names, **{**usual, **settings}))
        self._loaded = members

    def _assemble(self, on_progress: OnLoadProgress | None) -> Assembly:
        return assemble(self._loaded, self._metrics.forward, self.config.cache_bytes)


@contextmanager
def engine_over(
    loaded: Sequence[LocalMember], freed: Sequence[LocalMember] = (), **settings: Any
) -> Iterator[EnsembleEngine]:
    """An engine over loaded members. Before, the memory of earlier engines over the `freed` members is freed."""
    for member in freed or loaded:
        member.runner.free_spare()
        member.runner.drop_steps()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with LoadedEngine(loaded, **settings) as engine:
        yield engine.load()


def prompt(loaded: Sequence[LocalMember], size: int, start: str = "") -> list[Message]:
    """A question after filler, so that the longest member prompt has about `size` tokens."""

    def question(sentences: int) -> list[Message]:
        return [Message("user", start + SENTENCE * sentences + "Describe the log of the observatory at length.")]

    def length(sentences: int) -> int:
        return max(len(member.encode_prompt(question(sentences))) for member in loaded)

    each = (length(20) - length(10)) / 10
    return question(max(0, int((size - length(0)) / each)))


def forwards_of(members: Sequence[LocalMember]) -> Counter[str]:
    """Forward passes of all members so far: replayed graphs, packed steps without a graph, and dynamic ones."""
    return sum((Counter(member.report.forwards) for member in members), Counter())


def forwards_text(forwards: Counter[str]) -> str:
    return ", ".join(f"{forwards[way]} {way}" for way in ("replayed", "packed", "dynamic"))


def forwards_a_token(results: Sequence[EnsembleResult], member: str | None = None) -> float:
    """Forward passes of one member, or of all, per token of the answer in their encoding."""
    used = [u for result in results for name, u in result.usage.members.items() if member in (None, name)]
    return sum(usage.forwards for usage in used) / max(1, sum(usage.answer for usage in used))
