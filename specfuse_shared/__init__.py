"""The shared engine: several causal language models of any family answer together, segment by segment."""

from specfuse_shared.config import EnsembleConfig, MemberConfig, SamplingParams
from specfuse_shared.demo import demo_members
from specfuse_shared.engine import EnsembleEngine
from specfuse_shared.types import Message

__all__ = ["EnsembleConfig", "EnsembleEngine", "MemberConfig", "Message", "SamplingParams", "demo_members"]
