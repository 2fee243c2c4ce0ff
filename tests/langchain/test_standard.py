"""The standard suites of LangChain, on the real demo ensemble."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_specfuse import ChatSpecFuse
from specfuse_shared import EnsembleEngine


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatSpecFuse

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"members": ["no/one", "no/two"]}

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def returns_usage_metadata(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "demo"


@pytest.mark.slow
class TestIntegration(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _use_the_demo_engine(self, demo_engine: EnsembleEngine) -> None:
        type(self).engine = demo_engine

    engine: EnsembleEngine | None = None

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatSpecFuse

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"max_tokens": 48}

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine} if self.engine else {"members": "demo"}

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def returns_usage_metadata(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "demo"

    @pytest.mark.xfail(
        reason="neither demo model begins a call of its own accord: 0 of 3 questions that "
        "need a tool, each with 6 ways to describe the tools"
    )
    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)
