"""Packed weights give the same products as plain ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.placement.sizing import weight_bytes
from specfuse_shared.runtime import fused_norms
from specfuse_shared.runtime.fused_norms import pack_weights
from tests.support.against_naive import local_members
from tests.support.tiny import ARCHITECTURES, byte_level_tokenizer, save_model

IDS = torch.arange(3, 40)[None]
needs_packing = pytest.mark.skipif(not fused_norms._can_pack(), reason="this processor packs no bfloat16 weights")


def model_of(kind: str, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=256, **ARCHITECTURES[kind], **settings)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def linears(model: Any) -> list[torch.nn.Linear]:
    return [module for module in model.modules() if type(module) is torch.nn.Linear]


@needs_packing
@pytest.mark.parametrize("rows", [1, 8, 37])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_neox", "phi3", "gpt_oss", "lfm2", "mamba"])
@torch.inference_mode()
def test_logits_are_unchanged(kind: str, rows: int) -> None:
    """Models with and without biases; some have tied embeddings, or use a weight elsewhere."""
    model = model_of(kind)
    before = model(IDS[:, :rows], use_cache=False).logits.float()
    pack_weights(model)
    unpacked = [layer for layer in linears(model) if not layer.weight.is_meta]
    assert len(unpacked) == {"mamba": 2}.get(kind, 0)  # the time steps of each layer are multiplied by hand
    result = model(IDS[:, :rows], use_cache=False).logits.float()
    assert torch.allclose(result, before, rtol=2**-6, atol=2**-6 * float(before.abs().max()))


@needs_packing
@pytest.mark.parametrize("tied", [True, False])
def test_only_weights_shared_with_an_embedding_are_stored_twice(tied: bool) -> None:
    model = model_of("llama", tie_word_embeddings=tied)
    embedding = model.get_input_embeddings().weight
    assert pack_weights(model) == (embedding.nbytes if tied else 0)
    assert not embedding.is_meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_number_formats_are_unchanged(dtype: torch.dtype) -> None:
    model = model_of("llama", dtype)
    assert pack_weights(model) == 0
    assert not any(layer.weight.is_meta for layer in linears(model))


def test_special_linear_layers_are_unchanged() -> None:
    """Offloaded weights, and layers of another class."""
    model = model_of("llama")
    first, second = linears(model)[:2]
    first._hf_hook = object()  # type: ignore[assignment]
    second.__class__ = type("Quantised", (torch.nn.Linear,), {})
    pack_weights(model)
    assert not first.weight.is_meta
    assert not second.weight.is_meta


def test_without_a_suitable_library_all_layers_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(fused_norms, "_packed", missing)
    fused_norms._can_pack.cache_clear()
    try:
        model = model_of("llama")
        assert pack_weights(model) == 0
        assert not any(layer.weight.is_meta for layer in linears(model))
    finally:
        fused_norms._can_pack.cache_clear()


@needs_packing
def test_members_are_packed_and_report_their_memory(tmp_path: Path) -> None:
    folder = save_model("llama", byte_level_tokenizer(), tmp_path / "tiny")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with EnsembleEngine(EnsembleConfig([MemberConfig(str(folder), dtype="bfloat16", device="cpu")])) as engine:
        [report] = engine.load().describe()
        [member] = local_members(engine)
        assert linears(member.runner.model)[0].weight.is_meta
        assert report.parameters == plain.num_parameters()
        tied = plain.get_input_embeddings().weight is plain.get_output_embeddings().weight
        embedding: Any = plain.get_input_embeddings().weight
        assert report.memory_bytes == weight_bytes(plain) + (embedding.nbytes if tied else 0)


def test_a_loaded_model_given_by_the_caller_is_unchanged() -> None:
    model, tokenizer = model_of("llama"), byte_level_tokenizer()
    model.resize_token_embeddings(len(tokenizer))
    LocalMember(MemberConfig("given"), loaded=(model, tokenizer))
    assert not any(layer.weight.is_meta for layer in linears(model))
