"""The decisions of a round as pure functions over numbers: score, aggregate, elect, feedback, exit.

They use no tokenizer, tensor or framework. A user can replace each policy by an object with the same signature
(`protocols`). Symbols: n members, verifier j, candidate i, s[j][i] in [0, 1], weights w with Σw = 1.

Sources: SpecFuse (arXiv 2412.07380 v1/v2) for exit, SpecEM (v3, NeurIPS 2025) for feedback. The exit formulas are
a reconstruction: the papers' exact ones could not be read.
"""

from specfuse_shared.policies.aggregates import SecondedMean, geometric_mean, weighted_mean
from specfuse_shared.policies.election import Election, Electorate
from specfuse_shared.policies.exits import RetentionExit, entropy, never
from specfuse_shared.policies.feedback import OnlineFeedback, normalised, rewards, uniform
from specfuse_shared.policies.protocols import (
    ROUNDING,
    AggregatePolicy,
    CandidateLogprobs,
    ExitDecision,
    ExitPolicy,
    FeedbackPolicy,
    Matrix,
    ScorePolicy,
)
from specfuse_shared.policies.scores import MeanLogprob, MeanProb, Stretch

__all__ = [
    "ROUNDING",
    "AggregatePolicy",
    "CandidateLogprobs",
    "Election",
    "Electorate",
    "ExitDecision",
    "ExitPolicy",
    "FeedbackPolicy",
    "Matrix",
    "MeanLogprob",
    "MeanProb",
    "OnlineFeedback",
    "RetentionExit",
    "ScorePolicy",
    "SecondedMean",
    "Stretch",
    "entropy",
    "geometric_mean",
    "never",
    "normalised",
    "rewards",
    "uniform",
    "weighted_mean",
]
