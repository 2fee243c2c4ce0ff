"""The demo ensemble of real models, as a person would run it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from specfuse_shared.errors import MemberLoadError
from specfuse_shared.loading.demo import demo_members

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def result() -> Any:
    try:
        demo_members()
    except MemberLoadError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "specfuse_shared", "ask", "Name three colours.", "--max-tokens", "24", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return json.loads(run.stdout)


def test_the_demo_members_answer_together(result: Any) -> None:
    assert result["text"].strip()
    assert result["members"] == ["smollm2-135m", "gemma3-270m"]
    assert set(result["usage"]["members"]) == set(result["members"])


def test_the_answer_is_its_segments(result: Any) -> None:
    assert "".join(record["text"] for record in result["rounds"]).startswith(result["text"])
    assert result["usage"]["completion_tokens"] <= 24
