"""The settings of LangChain's standard suites for our models, and the tests that the demo members cannot pass."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel

from langchain_specfuse import ChatSpecFuse


class Supported:
    """A mixin for a suite: the abilities of its models."""

    chat_model_class: type[BaseChatModel] = ChatSpecFuse
    has_tool_calling = True
    has_tool_choice = True
    has_structured_output = True
    supports_json_mode = True
    returns_usage_metadata = True
    supports_model_override = True
    model_override_value = "demo"


class ByTheDemo(Supported):
    """A mixin for the integration suite with the demo members."""

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"max_tokens": 256}
