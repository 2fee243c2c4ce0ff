"""Tiny members on llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specfuse_shared import EnsembleEngine, MemberConfig
from specfuse_shared.members.local.lane import LaneThread, LocalLane
from specfuse_shared.members.local.member import InProcessMember
from specfuse_shared.members.token_tree import Branch
from tests.support.tiny import byte_level_tokenizer, metaspace_tokenizer

FILES = {
    "llama": ("llama", byte_level_tokenizer, 0),
    "spoken": ("llama", metaspace_tokenizer, 1),
    "qwen2": ("qwen2", byte_level_tokenizer, 2),
    "window": ("gemma3", metaspace_tokenizer, 3),
    "recurrent": ("mamba", byte_level_tokenizer, 4),
}
"""Architecture, tokenizer and seed; "window" has one of 64 tokens, "recurrent" a state in place of a cache."""
TOLERANCE = {"window": 2e-3}
"""llama.cpp uses a half-precision table for its activation, so rounding differs; a wrong mask would cost nats."""


def off(member: Any, context: Any, branch: Branch) -> float:
    """Largest |Δ log p| of a branch's tokens."""
    whole = [*context.prompt, *context.answer[: branch.base], *branch.tokens]
    rows = member.runner.context.plain(whole, len(branch.tokens) + 1)[:-1].log_softmax(-1)
    expected = rows.gather(1, torch.tensor(branch.tokens)[:, None])[:, 0]
    return float((torch.tensor(context.logprobs(branch)) - expected).abs().max())


def member_config(file: Path, backend: str = "llama.cpp", **settings: object) -> MemberConfig:
    """A member in float32."""
    name = f"{file.stem}-there" if backend == "transformers" else file.stem
    return MemberConfig.from_dict(
        {"model": str(file), "name": name, "backend": backend, "dtype": "float32", **settings}
    )


def members_of(engine: EnsembleEngine) -> list[InProcessMember]:
    lanes = [lane._lane if isinstance(lane, LaneThread) else lane for lane in engine.load()._assembly.lanes]
    results = {name: member for lane in lanes if isinstance(lane, LocalLane) for name, member in lane.local.items()}
    return [results[name] for name in engine.config.names]
