"""Mistakes print one helpful line on stderr with exit code 2; `--help` and `--version` do not import torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specfuse_shared.cli.commands import main


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
        (["ask", "hi", "--report"], "--report"),
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


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("missing/report.html", "missing/report.html (No such file or directory)"),
        (".", "(Is a directory)"),
        ("file/report.html", "(Not a directory)"),
        ("x" * 300, "(File name too long)"),
    ],
)
def test_an_unwritable_report_is_refused_before_any_model_is_loaded(
    path: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["ask", "hi", "--member", "no/such-member", "--report", path]) == 2
    err = capsys.readouterr().err
    assert err.startswith("specfuse-llm: --report cannot be written to ")
    assert err.count("\n") == 1
    assert hint in err
    assert "name a file in a folder that exists" in err
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(getattr(os, "geteuid", int)() == 0, reason="root may write everywhere, Windows has no such bits")
def test_a_report_in_a_folder_without_permission_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert main(["ask", "hi", "--member", "no/such-member", "--report", str(tmp_path / "report.html")]) == 2
    assert "(Permission denied)" in capsys.readouterr().err


def test_the_check_of_a_report_path_changes_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.html", tmp_path / "new.html"
    old.write_text("an older report")
    for path in (old, new):
        assert main(["ask", " ", "--member", "x", "--report", str(path)]) == 2
    assert "the question is empty" in capsys.readouterr().err
    assert old.read_text() == "an older report"
    assert not new.exists()


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
    code = "import sys; from specfuse_shared.cli.commands import main; main(sys.argv[1:]); print(sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    modules = run.stdout.splitlines()[-1]
    assert "'torch'" not in modules
    assert "'transformers'" not in modules


def test_an_error_in_a_file_is_not_reported_as_an_error_of_an_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "e.toml"
    file.write_text('[ensembles.a]\nmembers = ["x"]\nfeedback_rate = -1\n', "utf-8")
    assert main(["ask", "hi", "--config", str(file)]) == 2
    assert "EnsembleConfig.feedback_rate must be between 0 and 100, not -1" in capsys.readouterr().err
