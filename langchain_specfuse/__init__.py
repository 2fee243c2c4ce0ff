"""LangChain chat model over an ensemble of local models."""

from specfuse_shared.errors import MissingExtraError

try:
    import langchain_core  # noqa: F401
except ImportError as error:
    raise MissingExtraError("langchain_specfuse", "langchain") from error

from langchain_specfuse.chat_models import ChatSpecFuse

__all__ = ["ChatSpecFuse"]
