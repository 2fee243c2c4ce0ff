"""The Python examples of the README and of the frameworks' pages run as written, over the real demo models."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("docs/langchain.md", "docs/llamaindex.md")
PLACES = ("langchain_specfuse", "llamaindex_specfuse", "specfuse_shared")


def examples_in(page: str) -> list[str]:
    return re.findall(r"(?ms)^```python\n(.*?)^```", (ROOT / page).read_text("utf-8"))


EXAMPLES = examples_in("README.md")


def example_of(place: str) -> list[str]:
    return [code for code in EXAMPLES if f"from {place} " in code]


def test_there_are_examples_for_each_package() -> None:
    assert [len(example_of(place)) for place in PLACES] == [2, 1, 2]


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_runs_as_written_and_prints_an_answer(code: str) -> None:
    assert_runs(code)


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run_one_after_another(page: str) -> None:
    assert_runs("\n".join(examples_in(page)))


def assert_runs(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 3


@pytest.mark.parametrize("place", PLACES[:2])
def test_the_first_example_of_a_framework_has_about_ten_lines(place: str) -> None:
    code, *_ = example_of(place)
    assert len(code.strip().splitlines()) <= 12
