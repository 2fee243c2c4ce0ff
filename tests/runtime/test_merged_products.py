"""Merged products give the same results as the layers, and keep their names and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, SamplingParams
from specfuse_shared.members.local import member
from specfuse_shared.runtime.merged_products import merge_products
from tests.support.against_naive import assert_equals_naive, local_members
from tests.support.tiny import ARCHITECTURES, MESSAGES, ROW_BY_ROW, byte_level_tokenizer, save_model

KINDS = [kind for kind in ARCHITECTURES if kind not in ROW_BY_ROW]


def model_of(kind: str) -> Any:
    torch.manual_seed(5)
    config = AutoConfig.for_model(kind, vocab_size=100, bos_token_id=1, eos_token_id=2, **ARCHITECTURES[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    return model


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_outputs_and_weights_stay_the_same(kind: str) -> None:
    model = model_of(kind)
    ids = torch.arange(3, 40)[None]
    expected, weights = model(input_ids=ids).logits, {name: p.clone() for name, p in model.state_dict().items()}
    size = sum(p.nbytes for p in model.parameters())
    merge_products(model)
    for tokens in (37, 1, 5):
        torch.testing.assert_close(model(input_ids=ids[:, :tokens]).logits, expected[:, :tokens], rtol=1e-4, atol=1e-5)
    assert all(torch.equal(p, weights[name]) for name, p in model.state_dict().items())
    assert sum(p.nbytes for p in model.parameters()) == size


def test_queries_keys_and_values_are_one_product_and_gate_and_up_another() -> None:
    model = model_of("llama")
    assert merge_products(model) == 2 * model.config.num_hidden_layers
    products: list[torch.Size] = []
    count = torch.nn.functional.linear

    class Counted(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is count:
                products.append(args[1].shape)
            return func(*args, **(kwargs or {}))

    with Counted(), torch.inference_mode():
        model(input_ids=torch.arange(3, 9)[None])
    assert len(products) == 4 * model.config.num_hidden_layers + 1


@torch.inference_mode()
def test_a_layer_that_is_called_alone_or_twice_gives_its_own_product() -> None:
    model = model_of("llama")
    merge_products(model)
    layer = model.model.layers[0].self_attn
    x, y = torch.randn(3, layer.q_proj.in_features), torch.randn(3, layer.q_proj.in_features)
    for part, inputs in ((layer.k_proj, x), (layer.k_proj, x), (layer.q_proj, y), (layer.v_proj, x), (layer.q_proj, x)):
        torch.testing.assert_close(part(inputs), torch.nn.functional.linear(inputs, part.weight, part.bias))


def test_shared_and_changed_layers_are_not_merged() -> None:
    model = model_of("llama")
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    first.k_proj.weight = first.v_proj.weight
    second.q_proj.forward = lambda x: torch.nn.functional.linear(x, second.q_proj.weight)
    assert merge_products(model) == 2 * model.config.num_hidden_layers - 1, "keys and values of the second layer"
    assert type(first.q_proj) is torch.nn.Linear


def test_answers_of_merged_members_equal_the_naive_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merged: list[int] = []
    monkeypatch.setattr(member, "merges_products", lambda device, execution: True)
    monkeypatch.setattr(member, "merge_products", lambda model: merged.append(merge_products(model)))
    for name, kind, seed in (("one", "qwen3", 1), ("two", "gemma2", 0)):
        save_model(kind, byte_level_tokenizer(), tmp_path / name, seed=seed)
    members = [MemberConfig(str(tmp_path / name), name=name, dtype="float32") for name in ("one", "two")]
    with EnsembleEngine(EnsembleConfig(members, segment_tokens=5, execution="paged")) as engine:
        assert_equals_naive(engine.config, local_members(engine), MESSAGES, SamplingParams(max_tokens=60), rounds=4)
    assert len(merged) == 2
    assert min(merged) >= 4
