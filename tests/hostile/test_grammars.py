"""Random grammars in a separate process: none kills it, and all failures are our errors."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hostile.strategies import chain, grammars

LONGEST_SECONDS = 2.0
"""Processor seconds of the slowest round of an answer."""
PATIENCE_SECONDS = 30
"""Processor seconds of a whole answer."""
EXPECTED = {"an answer", "GrammarError", "ValueTooLongError", "UnfinishedValueError"}
"""Outcomes that are no failure of the server."""


class Watched:
    """The process, restarted after it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.outcomes: Counter[str] = Counter()

    def follow(self, fields: dict[str, Any], seed: int) -> tuple[str, float]:
        process = self._running()
        assert process.stdin is not None
        process.stdin.write(json.dumps([fields, seed]) + "\n")
        process.stdin.flush()
        reported, seconds = self._read(process)
        self.outcomes[reported] += 1
        return reported, seconds

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            self._process.stdout.close()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            command = [sys.executable, "-m", "tests.hostile.follower"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._read(self._process) == "ready"
        return self._process

    def _read(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        began = _processor_seconds(process)
        while not select.select([process.stdout], [], [], 1.0)[0]:
            if _processor_seconds(process) - began > PATIENCE_SECONDS:
                process.kill()  # the next grammar gets an idle process
                process.wait()
                raise AssertionError("it never ends")
        line = process.stdout.readline()
        assert line, f"the process died with {process.wait()}"
        return json.loads(line)


def _processor_seconds(process: subprocess.Popen[str]) -> float:
    used = psutil.Process(process.pid).cpu_times()
    return float(used.user + used.system)


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    result = Watched()
    yield result
    result.close()
    sys.stdout.write(f"\noutcomes: {dict(result.outcomes)}\n")


def check(watched: Watched, grammar: dict[str, Any], seed: int = 0) -> None:
    reported, seconds = watched.follow(grammar, seed)
    assert reported in EXPECTED
    assert seconds < LONGEST_SECONDS, f"a round took {seconds:.2f} s"


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(grammar=grammars(), seed=st.integers(0, 2**32))
def test_no_grammar_ends_the_process_or_stalls_a_round(watched: Watched, grammar: dict[str, Any], seed: int) -> None:
    check(watched, grammar, seed)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(grammar=grammars(), seed=st.integers(0, 2**32))
def test_five_thousand_random_grammars_neither_end_the_process_nor_stall_a_round(
    watched: Watched, grammar: dict[str, Any], seed: int
) -> None:
    check(watched, grammar, seed)


@pytest.mark.parametrize(
    "grammar",
    [
        {"kind": "json_schema", "source": chain(2000)},
        {"kind": "json_schema", "source": chain(4000)},
        {"kind": "lark", "source": "\n".join(["start: r0", *(f"r{n}: r{n + 1}" for n in range(1900)), 'r1900: "a"'])},
        {
            "kind": "lark",
            "source": "\n".join(["start: r0", *(f"r{n}: r{n + 1}" for n in range(20_000)), 'r20000: "a"']),
        },
        {"kind": "lark", "source": 'start: s\ns: s s | "a" |'},
        {"kind": "lark", "source": 'start: s\ns: s s s | s s | "a" | "aa" |'},
        {"kind": "regex", "source": "[b-wy-z]{900}"},
        {"kind": "regex", "source": "((a{0,100}b{0,100}){0,100}c){0,100}"},
        {"kind": "json_schema", "source": '{"type": "integer", "multipleOf": 99991}'},
        {"kind": "json_schema", "source": '{"type": "integer", "multipleOf": 65521}'},
        {"kind": "json_schema", "source": '{"multipleOf": 13088624}'},
        {"kind": "lark", "source": 'start: %json {"multipleOf": 13088624}'},
        {"kind": "lark", "source": '%llguidance {"allow_invalid_utf8": true}\nstart: /(?-u)[\\x80-\\xff]{3}/'},
    ],
    ids=lambda grammar: f"{grammar['kind']} {grammar['source'][:24]}",
)
def test_grammars_that_once_stalled_are_bounded(watched: Watched, grammar: dict[str, Any]) -> None:
    check(watched, grammar)
