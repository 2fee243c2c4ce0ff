"""The shared engine: several causal language models of any family answer together, segment by segment.

Importing this package is cheap: torch and transformers are imported when the engine is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from specfuse_shared.config import EnsembleConfig, MemberConfig, SamplingParams
from specfuse_shared.errors import (
    ConfigError,
    EngineClosedError,
    GenerationError,
    GrammarError,
    MemberLoadError,
    MissingExtraError,
    PromptTooLongError,
    RequestError,
    SpecFuseError,
    UnfinishedValueError,
    UnsupportedModelError,
)
from specfuse_shared.events import Event, ExitEvent, FinishEvent, SegmentEvent, StartEvent
from specfuse_shared.grammar import Grammar
from specfuse_shared.policies import (
    AggregatePolicy,
    ExitDecision,
    ExitPolicy,
    FeedbackPolicy,
    MeanLogprob,
    MeanProb,
    OnlineFeedback,
    RetentionExit,
    ScorePolicy,
)
from specfuse_shared.types import (
    Candidate,
    EnsembleResult,
    FinishReason,
    MemberExit,
    MemberReport,
    MemberSummary,
    MemberUsage,
    Message,
    RoundRecord,
    RoundTiming,
    Tool,
    ToolCall,
    Usage,
)

if TYPE_CHECKING:
    from specfuse_shared.demo import demo_members
    from specfuse_shared.engine import EnsembleEngine
    from specfuse_shared.loading import LoadProgress

__all__ = [
    "AggregatePolicy",
    "Candidate",
    "ConfigError",
    "EngineClosedError",
    "EnsembleConfig",
    "EnsembleEngine",
    "EnsembleResult",
    "Event",
    "ExitDecision",
    "ExitEvent",
    "ExitPolicy",
    "FeedbackPolicy",
    "FinishEvent",
    "FinishReason",
    "GenerationError",
    "Grammar",
    "GrammarError",
    "LoadProgress",
    "MeanLogprob",
    "MeanProb",
    "MemberConfig",
    "MemberExit",
    "MemberLoadError",
    "MemberReport",
    "MemberSummary",
    "MemberUsage",
    "Message",
    "MissingExtraError",
    "OnlineFeedback",
    "PromptTooLongError",
    "RequestError",
    "RetentionExit",
    "RoundRecord",
    "RoundTiming",
    "SamplingParams",
    "ScorePolicy",
    "SegmentEvent",
    "SpecFuseError",
    "StartEvent",
    "Tool",
    "ToolCall",
    "UnfinishedValueError",
    "UnsupportedModelError",
    "Usage",
    "demo_members",
]

_NEEDS_TORCH = {
    "EnsembleEngine": "specfuse_shared.engine",
    "LoadProgress": "specfuse_shared.loading",
    "demo_members": "specfuse_shared.demo",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'specfuse_shared' has no attribute {name!r}")
    return getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
