"""Triton compiles the kernels to machine code for several GPUs, which needs no GPU.

Its interpreter, which the kernels' own tests use, accepts more than the compiler does.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

from specfuse_shared.runtime.packed_layout import PAGE, WORKER_ROWS

COMPILES = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") != "1"
CARDS = {"H100, H200": ("cuda", 90, 32), "A100": ("cuda", 80, 32), "MI300": ("hip", "gfx942", 64)}
POINTERS = {
    **dict.fromkeys(("Peaks", "Sums", "Scales"), "*fp32"),
    **dict.fromkeys(("Tokens", "Answers", "Pages", "TailPositions", "Blocks"), "*i32"),
    "Tail": "*u8",
    "Weight": "*i8",
    "scale": "fp32",
    "cap": "fp32",
}


def machine_code(kernel: Any, card: str, dtype: str, constants: dict[str, Any], **types: str) -> bytes:
    """The machine code for a GPU; tensors that are not in a table have the model's `dtype`."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {
        name: "constexpr"
        if name in constants
        else {**POINTERS, **types}.get(name, f"*{dtype}" if name[0].isupper() else "i32")
        for name in kernel.arg_names
    }
    compiled = compile(ASTSource(kernel, signature, constexprs=constants), target=GPUTarget(*CARDS[card]))
    code: bytes = compiled.asm["hsaco" if CARDS[card][0] == "hip" else "cubin"]
    return code


@pytest.mark.skipif(not COMPILES, reason="needs Triton, and no TRITON_INTERPRET")
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(
    ("dtype", "groups", "size", "parts", "capped", "sinks"),
    [
        ("bf16", 4, 128, 16, False, False),
        ("fp16", 8, 64, 8, True, True),
        ("bf16", 2, 256, 1, False, False),
        ("bf16", 7, 64, 4, False, False),
        ("bf16", 24, 64, 4, False, False),
        ("fp32", 1, 96, 4, True, False),
    ],
)
def test_attention_over_pages_compiles_to_machine_code(
    card: str, dtype: str, groups: int, size: int, parts: int, capped: bool, sinks: bool
) -> None:
    import triton

    from specfuse_shared.runtime.packed_layout import tokens_of_a_worker
    from specfuse_shared.runtime.paged_kernel import _SLOTS, _attend, _merge

    padded = max(16, triton.next_power_of_2(size))
    rows = max(WORKER_ROWS, triton.next_power_of_2(tokens_of_a_worker(groups) * groups))
    shared = {"VALUE": size, "VALUE_PADDED": padded, "PARTS": parts}
    steps = {"GROUPS": groups, "SIZE": size, "SIZE_PADDED": padded, "ROWS": rows, "SLOTS": _SLOTS, "HEADS": 2}
    assert machine_code(_attend, card, dtype, {**steps, **shared, "PAGE": PAGE, "CAPPED": capped}, Out="*fp32")
    assert machine_code(_merge, card, dtype, {**shared, "ALL_HEADS": 2 * groups, "SINKS": sinks}, Out="*fp32")


@pytest.mark.skipif(not COMPILES, reason="needs Triton, and no TRITON_INTERPRET")
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(("dtype", "tokens"), [("bf16", 16), ("fp16", 32), ("fp32", 16)])
def test_products_with_int8_weights_compile_to_machine_code(card: str, dtype: str, tokens: int) -> None:
    from specfuse_shared.runtime.int8_kernel import INPUTS, OUTPUTS, _join, _multiply

    sizes = {"TOKENS": tokens, "OUTPUTS": OUTPUTS, "INPUTS": INPUTS, "PARTS": 4}
    assert machine_code(_multiply, card, dtype, sizes)
    assert machine_code(_join, card, dtype, {"PARTS": 4, "BIASED": True, "BLOCK": 1024})
