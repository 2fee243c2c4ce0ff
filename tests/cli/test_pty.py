"""The command in a real terminal: colours, plain output, hostile models, Ctrl-C, a closed pipe."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.terminals import COMMAND, restore_interrupts

pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
pytestmark = pytest.mark.slow
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
HOSTILE = "Look\x1b]0;owned\x07 [red]here\x1b[2J\x9b31m ok"


def in_terminal(arguments: list[str], until: bytes | None = None, **environment: str) -> tuple[int, str]:
    """Run on a pseudo-terminal, and interrupt after `until` was printed: exit code and all output."""
    master, slave = pty.openpty()
    settings = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "FORCE_COLOR", "COLUMNS"}}
    settings |= {"TERM": "xterm", **environment}
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=settings,
        start_new_session=True,
        preexec_fn=restore_interrupts,
    )
    os.close(slave)
    output = read_terminal(master, process, until)
    os.close(master)
    return process.wait(30), output.decode().replace("\r\n", "\n")


def read_terminal(master: int, process: subprocess.Popen[bytes], until: bytes | None) -> bytes:
    output, limit = b"", time.monotonic() + 120
    while time.monotonic() < limit:
        if not select.select([master], [], [], 0.2)[0]:
            continue
        try:
            output += os.read(master, 65536)
        except OSError:  # the terminal was closed
            return output
        if until and until in output:
            process.send_signal(signal.SIGINT)
            until = None
    process.kill()
    pytest.fail(f"the command did not end; it showed {output[-500:]!r}")


@pytest.fixture
def pair(recite: Callable[..., str]) -> list[str]:
    speaker = recite("speaker", "Plain words spoken here.")
    return ["--member", speaker, "--member", recite("listener", "Nothing else.", certainty=5.0)]


@pytest.fixture
def hostile(recite: Callable[..., str]) -> list[str]:
    return ["--member", recite("hostile", HOSTILE), "--member", recite("listener", "Nothing else.", certainty=5.0)]


def test_segments_have_the_colour_that_the_legend_gives_their_author(pair: list[str]) -> None:
    code, output = in_terminal(["ask", "Speak", *pair])
    assert code == 0
    assert "\x1b[36m● speaker\x1b[0m" in output
    assert "\x1b[35m● listener\x1b[0m" in output
    assert "\x1b[36mPlain words" in output
    assert "Plain words spoken here.\n" in COLOUR.sub("", output)
    assert "segments won" in output


def test_no_color_means_no_colour(pair: list[str]) -> None:
    code, output = in_terminal(["ask", "Speak", *pair], NO_COLOR="1")
    assert code == 0
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", output)
    assert "Plain words spoken here.\n" in output


def test_control_sequences_of_a_model_have_no_effect_on_the_terminal(hostile: list[str]) -> None:
    code, output = in_terminal(["ask", "Speak", "--explain", *hostile])
    assert code == 0
    assert "\x1b]0;" not in output
    assert "\x1b[2J" not in output
    assert "\x9b" not in output
    assert r"Look\x1b]0;owned\x07 [red]here\x1b[2J\x9b31m ok" in COLOUR.sub("", output)


def test_a_file_gets_a_models_exact_text(hostile: list[str]) -> None:
    run = subprocess.run([*COMMAND, "ask", "Speak", *hostile], capture_output=True, check=False)
    assert run.returncode == 0
    assert run.stdout.decode() == HOSTILE + "\n"


def test_ctrl_c_ends_with_130_and_keeps_the_shown_text(recite: Callable[..., str], tmp_path: Path) -> None:
    endless = ["--member", recite("endless", "round and", endless=True)]
    report = tmp_path / "report.html"
    arguments = ["ask", "Speak", "--max-tokens", "4000", "--report", str(report), *endless, *endless]
    code, output = in_terminal(arguments, until=b"round and")
    assert code == 130
    assert "round and" in COLOUR.sub("", output)
    assert output.endswith("\n")
    assert "Traceback" not in output
    assert not report.exists()


def test_a_reader_that_leaves_early_causes_no_traceback(recite: Callable[..., str]) -> None:
    endless = ["--member", recite("endless", "round and", endless=True)]
    process = subprocess.Popen(
        [*COMMAND, "ask", "Speak", "--max-tokens", "2000", *endless, *endless],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 1
    assert b"Traceback" not in errors


@pytest.mark.parametrize("target", [">&-", "> /dev/full"])
def test_an_unwritable_output_causes_no_traceback(recite: Callable[..., str], target: str) -> None:
    speaker = recite("brief", "So be it.")
    command = shlex.join([*COMMAND, "ask", "Speak", "--member", speaker])
    done = subprocess.run(["bash", "-c", f"{command} {target}"], stderr=subprocess.PIPE, timeout=100)
    assert b"Traceback" not in done.stderr
    assert done.returncode == (1 if "full" in target else 0)


def test_python_m_and_the_installed_command_are_the_same(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("specfuse-llm")
    if not command.exists():
        pytest.skip("the command is not installed: make setup")
    runs = [
        subprocess.run([*c, "--version"], capture_output=True, cwd=tmp_path, check=True) for c in ([command], COMMAND)
    ]
    assert runs[0].stdout == runs[1].stdout
