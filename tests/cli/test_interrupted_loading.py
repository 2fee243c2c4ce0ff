"""Ctrl-C while members load: a command prints one line, and Python raises `KeyboardInterrupt` once."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_pty import COLOUR, in_terminal
from tests.support.terminals import COMMAND, restore_interrupts

pytestmark = pytest.mark.slow

LOADS = """
import sys
from specfuse_shared import EnsembleEngine
EnsembleEngine(sys.argv[1:]).load(lambda progress: print(progress.stage, flush=True))
print("loaded", flush=True)
"""
IMPORTS = """
import signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from specfuse_shared.__main__ import main
sys.exit(main())
"""


@pytest.fixture
def speaker(recite: Callable[..., str]) -> str:
    return recite("speaker", "Plain words spoken here.")


def interrupted(command: list[str], until: bytes) -> tuple[int, bytes, bytes]:
    """Run a command and interrupt it after a line of output with `until`: exit code, the rest of stdout, stderr."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=restore_interrupts, bufsize=0
    )
    assert process.stdout is not None
    assert process.stderr is not None
    text, read = b"", process.stderr if "serve" in command else process.stdout
    while until not in text:
        line = read.readline()
        assert line, f"it ended before: {text!r}"
        text += line
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    return process.returncode, out, errors


@pytest.mark.parametrize("command", [["ask", "Speak"], ["chat"]])
def test_an_interrupted_command_prints_one_line(command: list[str], speaker: str) -> None:
    code, output = in_terminal([*command, "--member", speaker], until=b"loading")
    assert code == 130
    assert "Traceback" not in output
    texts = [line for line in COLOUR.sub("", output).splitlines() if "interrupted" in line]
    assert [line.rpartition("\r")[2].rpartition("\x1b[2K")[2] for line in texts] == ["specfuse-llm: interrupted"]


def test_an_interrupted_loading_server_prints_one_line(speaker: str) -> None:
    members = ["--member", speaker]
    code, _, errors = interrupted([*COMMAND, "serve", "--port", "0", *members], until=b"loading speaker")
    assert code == 130
    last = [line for line in errors.decode().splitlines() if " loading " not in line]
    assert len(last) == 1
    assert last[0].endswith("stopped while the models were being loaded")


def test_a_command_is_interrupted_while_it_imports_its_libraries() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "specfuse-llm: interrupted\n")


def test_python_raises_keyboardinterrupt_once(speaker: str, tmp_path: Path) -> None:
    program = tmp_path / "loads.py"
    program.write_text(LOADS)
    code, out, errors = interrupted([sys.executable, str(program), speaker], until=b"reading the weights")
    assert code in (-signal.SIGINT, 130)
    assert b"loaded" not in out
    assert errors.count(b"Traceback") == 1
    assert b"Exception ignored" not in errors
    assert errors.decode().strip().splitlines()[-1] == "KeyboardInterrupt"
