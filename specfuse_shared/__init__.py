"""The shared engine: several causal language models of any family answer together, segment by segment.

Importing this package is cheap: the first access to the engine imports torch and transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from specfuse_shared.agreement import Agreement, Difference, Disagreement, FieldAgreement, MemberDifference, MemberWords
from specfuse_shared.config import EnsembleConfig, MemberConfig, SamplingParams
from specfuse_shared.errors import (
    AuthenticationError,
    ClosedValueWarning,
    ConfigError,
    EngineBusyError,
    EngineClosedError,
    GenerationError,
    GrammarError,
    MemberFailedWarning,
    MemberLoadError,
    MissingExtraError,
    MissingTemplateWarning,
    PlacementError,
    PromptTooLongError,
    RequestError,
    RequestTimeoutError,
    ServerError,
    ServerKeyError,
    ServerModelError,
    ServerSettingsError,
    ServerUnreachableError,
    SlowVerificationWarning,
    SpecFuseError,
    UnfinishedValueError,
    UnknownModelError,
    UnsupportedModelError,
    ValueTooLongError,
)
from specfuse_shared.events import (
    EnsembleResult,
    Event,
    ExitEvent,
    FinishEvent,
    SegmentEvent,
    SideBySide,
    StartEvent,
    ThinkingEvent,
    WarningEvent,
)
from specfuse_shared.messages import Message, Tool, ToolCall
from specfuse_shared.policies import (
    AggregatePolicy,
    CandidateLogprobs,
    ExitDecision,
    ExitPolicy,
    FeedbackPolicy,
    MeanLogprob,
    MeanProb,
    OnlineFeedback,
    RetentionExit,
    ScorePolicy,
    Stretch,
)
from specfuse_shared.text.grammars.grammar import Grammar
from specfuse_shared.types import (
    Candidate,
    FinishReason,
    MemberAbsence,
    MemberExit,
    MemberFault,
    MemberReport,
    MemberSummary,
    MemberUsage,
    RoundRecord,
    RoundTiming,
    TokenLogprob,
    TopLogprob,
    Usage,
)

if TYPE_CHECKING:
    from specfuse_shared.loading.demo import demo_encoder, demo_members
    from specfuse_shared.loading.progress import LoadProgress
    from specfuse_shared.runtime.mps import mps_lock
    from specfuse_shared.serving.calls import CallOptions
    from specfuse_shared.serving.engine import EngineLease, EnsembleEngine, close_idle_engines, lease_engine
    from specfuse_shared.serving.prometheus import prometheus_collector
    from specfuse_shared.serving.telemetry import Histogram, MetricsSnapshot

__all__ = [
    "AggregatePolicy",
    "Agreement",
    "AuthenticationError",
    "CallOptions",
    "Candidate",
    "CandidateLogprobs",
    "ClosedValueWarning",
    "ConfigError",
    "Difference",
    "Disagreement",
    "EngineBusyError",
    "EngineClosedError",
    "EngineLease",
    "EnsembleConfig",
    "EnsembleEngine",
    "EnsembleResult",
    "Event",
    "ExitDecision",
    "ExitEvent",
    "ExitPolicy",
    "FeedbackPolicy",
    "FieldAgreement",
    "FinishEvent",
    "FinishReason",
    "GenerationError",
    "Grammar",
    "GrammarError",
    "Histogram",
    "LoadProgress",
    "MeanLogprob",
    "MeanProb",
    "MemberAbsence",
    "MemberConfig",
    "MemberDifference",
    "MemberExit",
    "MemberFailedWarning",
    "MemberFault",
    "MemberLoadError",
    "MemberReport",
    "MemberSummary",
    "MemberUsage",
    "MemberWords",
    "Message",
    "MetricsSnapshot",
    "MissingExtraError",
    "MissingTemplateWarning",
    "OnlineFeedback",
    "PlacementError",
    "PromptTooLongError",
    "RequestError",
    "RequestTimeoutError",
    "RetentionExit",
    "RoundRecord",
    "RoundTiming",
    "SamplingParams",
    "ScorePolicy",
    "SegmentEvent",
    "ServerError",
    "ServerKeyError",
    "ServerModelError",
    "ServerSettingsError",
    "ServerUnreachableError",
    "SideBySide",
    "SlowVerificationWarning",
    "SpecFuseError",
    "StartEvent",
    "Stretch",
    "ThinkingEvent",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "TopLogprob",
    "UnfinishedValueError",
    "UnknownModelError",
    "UnsupportedModelError",
    "Usage",
    "ValueTooLongError",
    "WarningEvent",
    "close_idle_engines",
    "demo_encoder",
    "demo_members",
    "lease_engine",
    "mps_lock",
    "prometheus_collector",
]

_NEEDS_TORCH = {
    "CallOptions": "specfuse_shared.serving.calls",
    "EnsembleEngine": "specfuse_shared.serving.engine",
    "LoadProgress": "specfuse_shared.loading.progress",
    "EngineLease": "specfuse_shared.serving.engine",
    "Histogram": "specfuse_shared.serving.telemetry",
    "MetricsSnapshot": "specfuse_shared.serving.telemetry",
    "close_idle_engines": "specfuse_shared.serving.engine",
    "demo_encoder": "specfuse_shared.loading.demo",
    "demo_members": "specfuse_shared.loading.demo",
    "lease_engine": "specfuse_shared.serving.engine",
    "mps_lock": "specfuse_shared.runtime.mps",
    "prometheus_collector": "specfuse_shared.serving.prometheus",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'specfuse_shared' has no attribute {name!r}")
    return getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
