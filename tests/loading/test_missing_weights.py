"""Files that lack weights are refused by name, since transformers fills missing weights with random numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from specfuse_shared import MemberConfig
from specfuse_shared.errors import MemberLoadError, UnsupportedModelError
from specfuse_shared.members.local.member import LocalMember
from tests.support.tiny import byte_level_tokenizer, save_model


def without(folder: Path, lost: Callable[[str], bool], file: str = "model.safetensors") -> None:
    """Rewrite the weights of a folder without some tensors."""
    weights = load_file(folder / file)
    retained = {name: tensor for name, tensor in weights.items() if not lost(name)}
    assert 0 < len(retained) < len(weights)
    save_file(retained, folder / file, metadata={"format": "pt"})


def save_encoder(folder: Path, kind: Any) -> Path:
    tokenizer = byte_level_tokenizer()
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    torch.manual_seed(0)
    model = kind.from_config(AutoConfig.for_model("bert", vocab_size=len(tokenizer), **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        (lambda name: ".layers.2." in name, r"lacks 9 of the 30 tensors of LlamaForCausalLM: model\.layers\.2\."),
        (lambda name: name.startswith("lm_head"), r"lacks 1 of the 30 tensors of LlamaForCausalLM: lm_head\.weight"),
        (lambda name: "embed_tokens" in name, r"embed_tokens"),
        (lambda name: name.endswith("norm.weight"), r"norm\.weight"),
    ],
)
def test_a_file_without_some_tensors_is_refused(tmp_path: Path, lost: Callable[[str], bool], named: str) -> None:
    folder = save_model("llama", byte_level_tokenizer(), tmp_path / "part", tie_word_embeddings=False)
    assert LocalMember(MemberConfig(str(folder))).report.parameters > 0
    without(folder, lost)
    with pytest.raises(MemberLoadError, match=rf"member 'part'.*{named}"):
        LocalMember(MemberConfig(str(folder)))


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    folder = save_model("llama", byte_level_tokenizer(), tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert LocalMember(MemberConfig(str(folder))).report.parameters > 0


def test_an_encoder_without_an_output_layer_is_refused(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "encoder", AutoModel)
    with pytest.raises(MemberLoadError, match=r"cls\.predictions.*configuration says BertModel"):
        LocalMember(MemberConfig(str(folder)))


def test_an_encoder_with_all_its_weights_is_called_one(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "masked", AutoModelForMaskedLM)
    with pytest.raises(UnsupportedModelError, match=r"member 'masked'.*is an encoder.*Name a causal language model"):
        LocalMember(MemberConfig(str(folder)))


def test_an_adapter_without_its_weights_is_refused(tmp_path: Path) -> None:
    folder, adapter = save_model("llama", byte_level_tokenizer(), tmp_path / "base"), tmp_path / "adapter"
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora)
    adapted.save_pretrained(adapter)
    assert LocalMember(MemberConfig(str(folder), adapter=str(adapter))).report.parameters > 0
    without(adapter, lambda name: ".layers.1." in name, "adapter_model.safetensors")
    with pytest.raises(MemberLoadError, match=r"member 'base': the adapter .* lacks some of its weights .*layers\.1\."):
        LocalMember(MemberConfig(str(folder), adapter=str(adapter)))


def test_another_warning_of_an_adapter_does_not_say_that_weights_are_missing(tmp_path: Path) -> None:
    folder, adapter = save_model("llama", byte_level_tokenizer(), tmp_path / "base"), tmp_path / "adapter"
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora).save_pretrained(adapter)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "of_a_newer_version": True}))
    with pytest.warns(UserWarning, match="of_a_newer_version"):
        assert LocalMember(MemberConfig(str(folder), adapter=str(adapter))).report.parameters > 0
    with pytest.raises(
        MemberLoadError, match=r"Unexpected keyword.*of_a_newer_version"
    ):  # warnings are errors in tests
        LocalMember(MemberConfig(str(folder), adapter=str(adapter)))
