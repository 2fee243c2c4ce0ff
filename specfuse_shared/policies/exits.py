"""Exit: which members leave the answer after a verified round (SpecFuse)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specfuse_shared.policies.feedback import normalised
from specfuse_shared.policies.protocols import ExitDecision


def never(totals: Sequence[float], round_index: int) -> ExitDecision:
    """No member leaves (an ablation of the paper), and no retention is computed."""
    return ExitDecision((), ())


@dataclass(frozen=True, slots=True)
class RetentionExit:
    """SpecFuse exit, reconstructed: p = softmax(Q/τ); a member with p_i < δ = threshold/n leaves.

    `entropy`: τ = H·√t·q, H the normalised entropy of Q/ΣQ in (0, 1] and q = ΣQ/(n·t) the mean score of a round:
    √t because Q grows with t, H so that close races stay soft and clear ones sharpen, q so that only ratios of
    scores matter. Without q, small models (scores about 0.2) would hardly ever leave. `fixed`: τ = 1. n counts the
    members still active; the best one always stays.
    """

    temperature: Literal["entropy", "fixed"] = "entropy"
    threshold: float = 0.5
    min_active: int = 1

    def __call__(self, totals: Sequence[float], round_index: int) -> ExitDecision:
        n, top = len(totals), max(totals)
        if self.temperature == "entropy":
            # Q/τ = √t · (Q / mean Q) / H
            unit = math.fsum(totals) / n or 1.0
            tau = entropy(totals) / math.sqrt(round_index)
        else:
            unit = tau = 1.0
        retention = normalised([math.exp((q - top) / unit / max(tau, 1e-9)) for q in totals])
        best = sorted(range(n), key=lambda i: -totals[i])[: self.min_active]
        leavers = tuple(i for i, p in enumerate(retention) if p < self.threshold / n and i not in best)
        return ExitDecision(tuple(retention), leavers)


def entropy(totals: Sequence[float]) -> float:
    """Normalised Shannon entropy of Q/ΣQ in [0, 1]; 1 where nothing can be told apart."""
    mass = math.fsum(totals)
    if len(totals) < 2 or mass <= 0:
        return 1.0
    shares = [q / mass for q in totals]
    return -math.fsum(s * math.log(s) for s in shares if s > 0) / math.log(len(totals))
