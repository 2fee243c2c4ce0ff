"""The helpers of the tests that wait for another process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support.serving import line_of

PROGRAM = "import sys, time; print('no GPU\\nready at 7\\nmore', flush=True); time.sleep(60)"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as result:
        yield result
        result.kill()


def test_lines_of_other_libraries_are_passed_over(process: subprocess.Popen[str]) -> None:
    assert line_of(process, process.stdout, r"ready at (\d)")[1] == "7"
    assert process.stdout.readline() == "more\n"


def test_a_missing_line_fails_with_the_other_lines(process: subprocess.Popen[str]) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match="no line matches 'listening': no GPU\nready at 7"):
        line_of(process, process.stdout, "listening", seconds=1)
    assert time.monotonic() - began < 20
