"""LlamaIndex LLM over an ensemble of local models."""

from specfuse_shared.errors import MissingExtraError

try:
    import llama_index.core  # noqa: F401
except ImportError as error:
    raise MissingExtraError("llamaindex_specfuse", "llamaindex") from error

from llamaindex_specfuse.base import SpecFuseLLM
from llamaindex_specfuse.messages import SpecFuseSegmentEvent

__all__ = ["SpecFuseLLM", "SpecFuseSegmentEvent"]
