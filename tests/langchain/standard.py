"""What LangChain's standard suites are told of our models, and what the demo members cannot do."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel

from langchain_specfuse import ChatSpecFuse


class Supported:
    """Mixed in before a suite: what its models can do."""

    chat_model_class: type[BaseChatModel] = ChatSpecFuse
    has_tool_calling = True
    has_tool_choice = True
    has_structured_output = True
    supports_json_mode = True
    returns_usage_metadata = True
    supports_model_override = True
    model_override_value = "demo"


class ByTheDemo(Supported):
    """Mixed in before the integration suite, whose answers are the demo members'."""

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"max_tokens": 256}
