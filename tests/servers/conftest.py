"""The folders of the two tiny members."""

from __future__ import annotations

from pathlib import Path

import pytest

from specfuse_shared import EnsembleEngine


@pytest.fixture(scope="session")
def folders(tiny_engine: EnsembleEngine) -> dict[str, Path]:
    return {member.label: Path(member.model) for member in tiny_engine.config.member_configs}
