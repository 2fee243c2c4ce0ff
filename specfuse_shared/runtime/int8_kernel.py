"""`int8_linear` as kernels in Triton. Its interpreter (TRITON_INTERPRET=1) runs them on a processor, for tests."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

OUTPUTS = 32
"""Outputs of a worker."""
INPUTS = 128
"""Inputs of a worker's turn."""
_WORKERS = 512
"""Few outputs are shared among more workers, each with a part of the inputs: an H200 has 132 processors."""


@triton.jit
def _multiply(
    X, Weight, Scales, Sums, tokens, outputs, inputs,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Some outputs of all tokens, over one part of the inputs: scaled sums (PARTS, T, N) in float32."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(1)
    token = tl.arange(0, TOKENS)
    each = tl.cdiv(tl.cdiv(inputs, INPUTS), PARTS) * INPUTS
    summed = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for start in range(part * each, tl.minimum(part * each + each, inputs), INPUTS):
        at = start + tl.arange(0, INPUTS)
        x = tl.load(
            X + token[:, None] * inputs + at[None, :],
            mask=(token < tokens)[:, None] & (at < inputs)[None, :],
            other=0.0,
        )
        weight = tl.load(
            Weight + output[None, :].to(tl.int64) * inputs + at[:, None],
            mask=(output < outputs)[None, :] & (at < inputs)[:, None],
            other=0,
        )
        summed += tl.dot(x, weight.to(x.dtype), input_precision="ieee")
    scale = tl.load(Scales + output, mask=output < outputs, other=0.0)
    tl.store(
        Sums + (part * tokens + token[:, None]) * outputs + output[None, :],
        summed * scale[None, :],
        mask=(token < tokens)[:, None] & (output < outputs)[None, :],
    )


@triton.jit
def _join(
    Sums, Bias, Out, outputs, size, PARTS: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The sum of all parts, and the bias."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    summed = tl.zeros([BLOCK], tl.float32)
    for part in range(PARTS):
        summed += tl.load(Sums + part * size + at, mask=there, other=0.0)
    if BIASED:
        summed += tl.load(Bias + at % outputs, mask=there, other=0.0).to(tl.float32)
    tl.store(Out + at, summed.to(Out.dtype.element_ty), mask=there)


def multiply(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`int8_linear` by the kernels, for at most 32 tokens."""
    tokens, inputs = x.shape
    outputs = len(weight)
    parts = parts_for(outputs, inputs)
    x = x.contiguous()
    sums = x.new_empty(parts, tokens, outputs, dtype=torch.float32)
    out = x.new_empty(tokens, outputs)
    rows = max(16, triton.next_power_of_2(tokens))
    _multiply[(triton.cdiv(outputs, OUTPUTS), parts)](
        x, weight, scales, sums, tokens, outputs, inputs, TOKENS=rows, OUTPUTS=OUTPUTS, INPUTS=INPUTS, PARTS=parts
    )
    _join[(triton.cdiv(out.numel(), 1024),)](
        sums, out if bias is None else bias, out, outputs, out.numel(), PARTS=parts, BIASED=bias is not None, BLOCK=1024
    )
    return out


def parts_for(outputs: int, inputs: int) -> int:
    """Number of parts of the inputs, so that every processor of a card has work: 1, 2, 4 or 8."""
    parts, workers = 1, -(-outputs // OUTPUTS)
    while parts < 8 and parts * workers < _WORKERS and parts * 2 * INPUTS <= inputs:
        parts *= 2
    return parts
