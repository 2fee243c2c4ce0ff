"""Tiny random models of several architectures as F32 GGUF files, with two small tokenizers of different kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedTokenizerFast

from tests.support.tiny import byte_level_tokenizer, metaspace_tokenizer

HIDDEN, FEED, HEADS, GROUPS, CONTEXT = 64, 96, 4, 2, 512
WINDOW = 64
Floats = np.ndarray[Any, np.dtype[np.float32]]


class _Weights:
    """Adds random tensors, with values large enough for distinct probabilities."""

    def __init__(self, writer: gguf.GGUFWriter, seed: int, scale: float = 0.25) -> None:
        self._writer, self._random, self._scale = writer, np.random.default_rng(seed), scale

    def matrix(self, name: str, *shape: int) -> None:
        self.add(name, self._random.normal(0, self._scale, shape))

    def norm(self, name: str, size: int = HIDDEN) -> None:
        self.add(name, 1 + self._random.normal(0, 0.05, size))

    def add(self, name: str, values: Any) -> None:
        self._writer.add_tensor(name, np.asarray(values, dtype=np.float32))


def write_gguf(
    file: Path, architecture: str, tokenizer: PreTrainedTokenizerFast, seed: int = 0, context: int = CONTEXT
) -> Path:
    """A random model of an architecture."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(context)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _SHAPES[architecture](writer, _Weights(writer, seed, 0.1 if architecture == "gemma3" else 0.25), len(tokenizer))
    _add_tokenizer(writer, tokenizer, "qwen2" if architecture == "qwen2" else "gpt-2", architecture != "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def byte_level() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer()


def metaspace() -> PreTrainedTokenizerFast:
    return metaspace_tokenizer()


def _attention(writer: gguf.GGUFWriter, layers: int, head_size: int) -> None:
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_block_count(layers)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(10000.0)


def _layer(weights: _Weights, n: int, head_size: int) -> None:
    at = f"blk.{n}."
    weights.norm(at + "attn_norm.weight")
    weights.matrix(at + "attn_q.weight", HEADS * head_size, HIDDEN)
    weights.matrix(at + "attn_k.weight", GROUPS * head_size, HIDDEN)
    weights.matrix(at + "attn_v.weight", GROUPS * head_size, HIDDEN)
    weights.matrix(at + "attn_output.weight", HIDDEN, HEADS * head_size)
    weights.norm(at + "ffn_norm.weight")
    weights.matrix(at + "ffn_gate.weight", FEED, HIDDEN)
    weights.matrix(at + "ffn_up.weight", FEED, HIDDEN)
    weights.matrix(at + "ffn_down.weight", HIDDEN, FEED)


def _llama(writer: gguf.GGUFWriter, weights: _Weights, vocabulary: int) -> None:
    _attention(writer, 3, 16)
    writer.add_vocab_size(vocabulary)
    weights.matrix("token_embd.weight", vocabulary, HIDDEN)
    for n in range(3):
        _layer(weights, n, 16)
    weights.norm("output_norm.weight")
    weights.matrix("output.weight", vocabulary, HIDDEN)


def _qwen2(writer: gguf.GGUFWriter, weights: _Weights, vocabulary: int) -> None:
    _llama(writer, weights, vocabulary)
    for n in range(3):
        for name, size in (("q", HEADS * 16), ("k", GROUPS * 16), ("v", GROUPS * 16)):
            weights.matrix(f"blk.{n}.attn_{name}.bias", size)


def _gemma3(writer: gguf.GGUFWriter, weights: _Weights, vocabulary: int) -> None:
    """Seven layers: the sixth attends to all tokens, the others to a window; heads have the family's size."""
    _attention(writer, 7, 256)
    writer.add_sliding_window(WINDOW)
    writer.add_vocab_size(vocabulary)
    weights.matrix("token_embd.weight", vocabulary, HIDDEN)
    for n in range(7):
        _layer(weights, n, 256)
        weights.norm(f"blk.{n}.attn_q_norm.weight", 256)
        weights.norm(f"blk.{n}.attn_k_norm.weight", 256)
        weights.norm(f"blk.{n}.post_attention_norm.weight")
        weights.norm(f"blk.{n}.post_ffw_norm.weight")
    weights.norm("output_norm.weight")


def _mamba(writer: gguf.GGUFWriter, weights: _Weights, vocabulary: int) -> None:
    """Recurrent: a state in place of keys and values."""
    inner, state, rank, window = 2 * HIDDEN, 8, 4, 4
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(2)
    writer.add_ssm_conv_kernel(window)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    weights.matrix("token_embd.weight", vocabulary, HIDDEN)
    for n in range(2):
        at = f"blk.{n}."
        weights.norm(at + "attn_norm.weight")
        weights.matrix(at + "ssm_in.weight", 2 * inner, HIDDEN)
        weights.matrix(at + "ssm_conv1d.weight", inner, window)
        weights.matrix(at + "ssm_conv1d.bias", inner)
        weights.matrix(at + "ssm_x.weight", rank + 2 * state, inner)
        weights.matrix(at + "ssm_dt.weight", inner, rank)
        weights.matrix(at + "ssm_dt.bias", inner)
        weights.add(at + "ssm_a", -np.tile(np.arange(1, state + 1), (inner, 1)))
        weights.norm(at + "ssm_d", inner)
        weights.matrix(at + "ssm_out.weight", HIDDEN, inner)
    weights.norm("output_norm.weight")


_SHAPES: dict[str, Callable[[gguf.GGUFWriter, _Weights, int], None]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "gemma3": _gemma3,
    "mamba": _mamba,
}


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast, pre: str, prefix: bool) -> None:
    model = tokenizer.backend_tokenizer.to_str()
    tokens = [str(tokenizer.convert_ids_to_tokens(n)) for n in range(len(tokenizer))]
    special = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    is_bytes = '"byte_fallback":true' in model
    writer.add_tokenizer_model("llama" if is_bytes else "gpt2")
    if not is_bytes:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in _merges(tokenizer)])
    else:
        writer.add_token_scores([0.0 if n in special else -float(n) for n in range(len(tokens))])
        writer.add_add_space_prefix(prefix)
    writer.add_token_list(tokens)
    kinds = [_kind(token, n in special) for n, token in enumerate(tokens)]
    writer.add_token_types(kinds)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.unk_token_id is not None:
        writer.add_unk_token_id(tokenizer.unk_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _merges(tokenizer: PreTrainedTokenizerFast) -> list[list[str]]:
    import json

    result: list[list[str]] = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return result


def _kind(token: str, is_special: bool) -> gguf.TokenType:
    if is_special:
        return gguf.TokenType.UNKNOWN if token == "<unk>" else gguf.TokenType.CONTROL
    is_byte = len(token) == 6 and token.startswith("<0x")
    return gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL


def split_gguf(file: Path, parts: int) -> list[Path]:
    """The file in parts in its folder, named and marked as `llama-gguf-split` does; metadata is in the first one."""
    reader = gguf.GGUFReader(file)
    architecture = str(reader.fields["general.architecture"].contents())
    paths = [file.with_name(f"{file.stem}-{n + 1:05}-of-{parts:05}.gguf") for n in range(parts)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, architecture)
        for name, field in reader.fields.items() if number == 0 else ():
            if not name.startswith("GGUF.") and name != "general.architecture":
                inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), field.types[0], inner)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths
