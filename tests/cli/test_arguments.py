"""Mistakes get one helpful line on stderr and exit code 2, help and version answer without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from specfuse_shared.cli import main


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["ask", "hi", "--score", "mean_log"], "--score is 'mean_log': did you mean 'mean_logprob'?"),
        (["ask", "hi", "--feedback", "online"], "--feedback is 'online'"),
        (["ask", "hi", "--exit", "nevr"], "did you mean 'never'?"),
        (["ask", "hi", "--dtype", "bf16"], "--dtype is 'bf16'"),
        (["ask", "hi", "--max-tokens", "0"], "--max-tokens"),
        (["ask", "hi", "--max-tokens", "many"], "--max-tokens"),
        (["ask", "hi", "--temperature", "-1"], "--temperature"),
        (["ask", "hi", "--segment-tokens", "0"], "--segment-tokens"),
        (["ask", "hi", "--stop", ""], "--stop"),
        (["ask", "hi", "--member", ""], "--member is empty"),
        (["ask", "hi", "--scor", "mean_prob"], "--score"),
        (["ask", "hi", "--zzz"], "specfuse-llm ask --help"),
        (["ask", "hi", "--score"], "--score"),
        (["ask"], "QUESTION"),
        (["ask", "two", "questions"], "questions"),
        (["ask", " ", "--member", "x"], "the question is empty"),
        (["aks"], "aks"),
        (["doctor", "--member", ""], "--member is empty"),
        (["--versio"], "--version"),
    ],
)
def test_a_mistake_gets_one_helpful_line_and_exit_code_2(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("specfuse-llm: ")
    assert err.count("\n") == 1
    assert hint in err


def test_control_characters_of_an_argument_are_not_sent_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "hi", "--score", "\x1b[31mred\nline"]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("argv", [["--help"], ["ask", "--help"], ["doctor", "--help"], []])
def test_help_is_on_stdout(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert "Usage: specfuse-llm" in out
    assert err == ""


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.split()[0] == "specfuse-llm"


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["ask", "hi", "--exit", "later"], ["ask", "hi", "--zzz"]])
def test_no_model_library_is_imported_for_help_and_mistakes(argv: list[str]) -> None:
    code = "import sys; from specfuse_shared.cli import main; main(sys.argv[1:]); print(sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    modules = run.stdout.splitlines()[-1]
    assert "'torch'" not in modules
    assert "'transformers'" not in modules
