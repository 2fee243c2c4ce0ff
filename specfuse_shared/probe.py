"""The parity probe: which cached path reproduces the model's own probabilities?

At load, a few short random branches are scored through each path that the architecture may allow and compared
with the model's plain forward. Windows are shrunk for the probe, so that a handful of tokens reaches beyond them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from specfuse_shared.attention import MaskPlan, plans_for
from specfuse_shared.context import Context, PackedContext
from specfuse_shared.errors import UnsupportedModelError
from specfuse_shared.rows import RowContext
from specfuse_shared.runner import ModelRunner
from specfuse_shared.tree import Branch

logger = logging.getLogger(__name__)

_WINDOW = 8
_PROMPT, _FIRST, _SECOND = 21, 4, 5
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.15, torch.bfloat16: 0.6}
"""Largest mean |Δ log p| taken for rounding. Half precision is not batch-invariant; a wrong mask costs nats."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The chosen path: `plan` for packed verification, None for rows. `error`: mean |Δ log p| against plain."""

    verification: Literal["packed", "rows"]
    plan: MaskPlan | None
    error: float


def probe(model: Any, member: str) -> ProbeResult:
    """Pick the packed plan with the smallest error, else rows. Raises `UnsupportedModelError` where neither works."""
    config = model.config.get_text_config(decoder=True)
    tolerance = _TOLERANCE.get(model.dtype, 2e-3)
    problems: list[str] = []
    with _small_windows(config):
        packed = [(_attempt(model, PackedContext, p, problems), p) for p in plans_for(config) if _is_packable(model)]
        rows = None
        if not any(error <= tolerance for error, _ in packed):
            rows = _attempt(model, RowContext, None, problems)
    error, plan = min(packed, key=lambda found: found[0], default=(float("inf"), None))
    if plan is not None and error <= tolerance:
        window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
        real = replace(plan, window=window if plan.window else None, chunk=chunk if plan.chunk else None)
        return ProbeResult("packed", real, error)
    if rows is not None and rows <= tolerance:
        logger.info("member %s verifies row by row (packed: %s)", member, "; ".join(problems) or f"off by {error:.3g}")
        return ProbeResult("rows", None, rows)
    raise UnsupportedModelError(
        f"member {member!r} ({type(model).__name__}): neither packed (off by {error:.3g}) nor row-by-row verification "
        f"(off by {rows if rows is not None else float('inf'):.3g} nats) reproduces the model's own probabilities "
        f"within {tolerance:g}; use another model, or dtype='float32' if the numbers are close. {'; '.join(problems)}"
    )


def _is_packable(model: Any) -> bool:
    """Only models built on the library's attention interface take a prepared mask in every layer."""
    return bool(getattr(model, "_supports_attention_backend", False))


def _attempt(
    model: Any, kind: Callable[[ModelRunner], Context], plan: MaskPlan | None, problems: list[str]
) -> float:
    try:
        return _error(ModelRunner(model, plan), kind)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, NotImplementedError) as error:
        problems.append(f"{getattr(kind, '__name__', kind)}: {type(error).__name__}: {error}"[:200])
        return float("inf")


@torch.inference_mode()
def _error(runner: ModelRunner, kind: Callable[[ModelRunner], Context]) -> float:
    """Mean |Δ log p| of two branches, a committed winner, and a branch behind an inner point of the trunk."""
    ids = _random_ids(runner.model, _PROMPT + _FIRST + 2 * _SECOND)
    prompt, first = ids[:_PROMPT], tuple(ids[_PROMPT : _PROMPT + _FIRST])
    second, third = tuple(ids[-2 * _SECOND : -_SECOND]), tuple(ids[-_SECOND:])
    context = kind(runner)
    context.prefill(prompt)
    for size in range(1, _FIRST):
        context.extend([Branch(0, first[:size])])
    branches = [Branch(0, first), Branch(0, second)]
    context.extend(branches)
    deltas = [_deltas(runner, context, prompt, b) for b in branches]
    context.commit(branches[1])
    later = [Branch(len(second), third), Branch(len(second) - 2, third[:3])]
    context.extend(later)
    deltas += [_deltas(runner, context, [*prompt, *second], b) for b in later]
    context.release()
    return float(torch.cat(deltas).mean())


def _deltas(runner: ModelRunner, context: Context, trunk: list[int] | tuple[int, ...], branch: Branch) -> torch.Tensor:
    kept = list(trunk[: len(context.prompt) + branch.base])
    whole = torch.tensor([*kept, *branch.tokens])
    plain = runner.plain(whole.tolist()).float().log_softmax(-1).cpu()
    start = len(kept)
    expected = plain[start - 1 : -1].gather(1, whole[start:, None])[:, 0]
    return (torch.tensor(context.logprobs(branch)) - expected).abs()


def _random_ids(model: Any, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    size = model.get_input_embeddings().num_embeddings
    return [int(i) for i in torch.randint(size // 8, size, (count,), generator=generator)]


@contextmanager
def _small_windows(config: Any) -> Iterator[None]:
    names = [n for n in ("sliding_window", "attention_chunk_size") if getattr(config, n, None)]
    real = {name: getattr(config, name) for name in names}
    for name in names:
        setattr(config, name, min(_WINDOW, real[name]))
    try:
        yield
    finally:
        for name, value in real.items():
            setattr(config, name, value)
