"""Products with int8 weights equal torchao's, and the kernels equal plain torch in Triton's interpreter."""

from __future__ import annotations

import importlib
import importlib.util
import os
from copy import deepcopy

import pytest
import torch

from specfuse_shared.runtime.int8_products import int8_linear, plain, use_int8_products

INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


def matrix(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    return numbers, torch.rand(outputs, generator=generator) / 100


def test_the_product_is_that_of_the_widened_matrix() -> None:
    numbers, scales = matrix(48, 96)
    x, bias = torch.randn(5, 96), torch.randn(48)
    expected = x @ (numbers.float() * scales[:, None]).T + bias
    torch.testing.assert_close(int8_linear(x, numbers, scales, bias), expected, rtol=1e-4, atol=1e-4)


def test_layers_with_other_weights_are_unchanged() -> None:
    layer = torch.nn.Linear(8, 8)
    assert use_int8_products(torch.nn.Sequential(layer)) == 0
    assert "forward" not in vars(layer)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs the extra quant")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchaos_layers_give_the_same_results(dtype: torch.dtype) -> None:
    quantization = importlib.import_module("torchao.quantization")
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(48, 32, bias=False)).to(dtype)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    changed = deepcopy(model)
    assert use_int8_products(changed) == 2
    x = torch.randn(2, 3, 64).to(dtype)
    difference = (changed(x).float() - model(x).float()).abs().max()
    assert difference <= model(x).float().abs().max() * (0.02 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs"), [(1, 64, 256), (1, 33, 300), (5, 100, 1030), (17, 32, 128), (32, 40, 64)]
)
def test_the_kernels_equal_plain_torch(tokens: int, outputs: int, inputs: int, biased: bool) -> None:
    from specfuse_shared.runtime.int8_kernel import multiply

    numbers, scales = matrix(outputs, inputs)
    x, bias = torch.randn(tokens, inputs), torch.randn(outputs) if biased else None
    torch.testing.assert_close(
        multiply(x, numbers, scales, bias), plain(x, numbers, scales, bias), rtol=1e-4, atol=1e-3
    )


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
def test_few_outputs_are_divided_among_more_workers() -> None:
    from specfuse_shared.runtime.int8_kernel import parts_for

    assert [parts_for(n, 4096) for n in (1024, 4096, 28672)] == [8, 4, 1]
    assert parts_for(32, 128) == 1
