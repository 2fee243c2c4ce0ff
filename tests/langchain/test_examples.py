"""The examples run as written, in another process that loads the demo models once."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slow

NAMES = ("agent_langgraph", "extract_langchain", "batch_langchain")


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """The output of each example."""
    code = "import runpy\n" + "\n".join(
        f"print('=== {name}')\nrunpy.run_path({str(EXAMPLES / f'{name}.py')!r}, run_name='__main__')" for name in NAMES
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^=== (\w+)\n", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_agent_calls_a_tool_and_streams_an_answer(printed: dict[str, str]) -> None:
    called, tool, answer = printed["agent_langgraph"].strip().split("\n", 2)
    assert ast.literal_eval(called) == {"a": 17, "b": 25}
    assert tool == "[tool] 17 times 25 is 425"
    assert answer


def test_the_extraction_gives_valid_bookings(printed: dict[str, str]) -> None:
    lines = printed["extract_langchain"].splitlines()
    assert len(lines) == 2
    assert all(re.match(r"guest='.*' nights=\d+ room='(single|double|dormitory)' wishes=\[", line) for line in lines)


def test_the_batch_answers_every_question(printed: dict[str, str]) -> None:
    questions = re.findall(r"^ *\d+\.\d s  (.*?\?)  \S", printed["batch_langchain"], re.MULTILINE)
    assert len(set(questions)) == 4
