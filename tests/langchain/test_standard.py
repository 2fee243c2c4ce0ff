"""The standard suites of LangChain, on the real demo ensemble."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from specfuse_shared import EnsembleEngine
from tests.langchain.standard import ByTheDemo, Supported


class TestUnit(Supported, ChatModelUnitTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"members": ["no/one", "no/two"]}


@pytest.mark.slow
class TestIntegration(ByTheDemo, ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _use_the_demo_engine(self, demo_engine: EnsembleEngine) -> None:
        type(self).engine = demo_engine

    engine: EnsembleEngine | None = None

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine} if self.engine else {"members": "demo"}
