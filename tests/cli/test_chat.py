"""`specfuse-llm chat`: turns, commands, Ctrl-C in a real terminal, and refusals."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from specfuse_shared.cli.commands import main
from specfuse_shared.cli.side_by_side import Columns
from tests.support.terminals import COMMAND, restore_interrupts


@pytest.fixture
def speaker(recite: Callable[..., str]) -> list[str]:
    return ["--member", recite("speaker", "Plain words spoken here.")]


def run_chat(lines: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", *arguments])


def test_turns_are_answered_and_saved(
    speaker: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.json"
    assert run_chat(f"One?\n\nTwo?\n/save {file}\n", [*speaker, "--system", "Be kind."], monkeypatch) == 0
    output = capsys.readouterr()
    assert output.out == "Plain words spoken here.\n" * 2
    turns = json.loads(file.read_text("utf-8"))
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user", "assistant"]
    assert [turn["content"] for turn in turns[1:3]] == ["One?", "Plain words spoken here."]


def test_commands_explain_and_list_rounds_and_start_a_new_conversation(
    speaker: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.json"
    lines = f"/why\nOne?\n/why\n/members\n/help\n/nothing\n/clear\n/save {file}\n/save\n/exit\nNever asked\n"
    assert run_chat(lines, speaker, monkeypatch) == 0
    output = capsys.readouterr()
    assert output.out == "Plain words spoken here.\n"
    for part in ("no whole answer", "round 1", "transformers", "/save", "no command /nothing", "the file is missing"):
        assert part in output.err
    assert json.loads(file.read_text("utf-8")) == []


def test_a_refused_question_is_no_turn(
    speaker: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.json"
    assert run_chat(f"{'long ' * 5000}\nOne?\n/save {file}\n", speaker, monkeypatch) == 0
    assert "shorten the prompt" in capsys.readouterr().err
    assert [turn["content"] for turn in json.loads(file.read_text("utf-8"))] == ["One?", "Plain words spoken here."]


def test_input_without_text_is_no_turn_and_ends_nothing(
    speaker: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_chat("caf\udce9\nOne?\n", speaker, monkeypatch) == 0
    assert capsys.readouterr().out == "Plain words spoken here.\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    assert main(["chat", *speaker]) == 0
    assert "not UTF-8 text" in capsys.readouterr().err


def test_a_failure_to_save_is_reported(
    speaker: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_chat(f"/save {tmp_path}/no/talk.json\n/save ~nobody-here/talk.json\n", speaker, monkeypatch) == 0
    assert "not saved" in capsys.readouterr().err


@contextmanager
def chatting(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command in a terminal, and the user's end of that terminal."""
    pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "chat", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", **environment},
        start_new_session=True,
        preexec_fn=restore_interrupts,
    )
    os.close(slave)
    try:
        yield process, master
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_ctrl_c_stops_the_answer_and_not_the_program(recite: Callable[..., str]) -> None:
    endless = recite("talker", "Plain words spoken here", endless=True)
    with chatting("--member", endless, "--max-tokens", "3000") as (process, master):
        rest = _until(master, b"> ")
        os.write(master, b"Speak\n")
        rest = _until(master, b"spoken here", rest)
        process.send_signal(signal.SIGINT)
        rest = _until(master, b"> ", _until(master, b"stopped", rest))
        os.write(master, b"/members\n")
        # the terminal is in another mode before the prompt
        rest = _until(master, b"> ", _until(master, b"talker:", rest))
        os.write(master, b"\x04")
        assert process.wait(30) == 0, rest[-500:]


def test_ctrl_c_stops_all_answers_and_keeps_their_text(recite: Callable[..., str]) -> None:
    endless = [recite(name, "Plain words spoken here", endless=True) for name in ("talker", "speaker2")]
    arguments = [part for folder in endless for part in ("--member", folder)]
    with chatting(*arguments, "--max-tokens", "3000", COLUMNS="100", LINES="30") as (process, master):
        rest = _until(master, b"> ")
        os.write(master, b"/each Speak\n")
        rest = _until(master, b"spoken here", rest)
        process.send_signal(signal.SIGINT)
        rest = _until(master, b"together", _until(master, b"stopped", rest))
        rest = _until(master, b"> ", rest)
        os.write(master, b"\x04")
        assert process.wait(30) == 0, rest[-500:]


def _until(master: int, end: bytes, output: bytes = b"") -> bytes:
    """Read until this is shown; the output after it."""
    limit = time.monotonic() + 120
    while end not in output:
        assert time.monotonic() < limit, output[-500:]
        if select.select([master], [], [], 0.2)[0]:
            output += os.read(master, 65536)
    return output.partition(end)[2]


def two_speakers(recite: Callable[..., str]) -> list[str]:
    return [
        *("--member", recite("left", "The harbour opened in 1887 near Lisbon."), "--member"),
        recite("right", "The harbour opened in 1892 near Porto.", certainty=8.0),
    ]


def test_each_shows_every_members_own_answer_and_the_differences(
    recite: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.json"
    assert run_chat(f"/each\n/each When?\n/why\n/save {file}\n", two_speakers(recite), monkeypatch) == 0
    output = capsys.readouterr()
    together, first, second = output.out.splitlines()
    assert first == "left: The harbour opened in 1887 near Lisbon."
    assert second == "right: The harbour opened in 1892 near Porto."
    assert together.startswith("together: The harbour")
    assert "/each QUESTION: the question is missing" in output.err
    assert "left, unlike another one: 1887, Lisbon" in output.err
    assert "right, unlike another one: 1892, Porto" in output.err
    assert "round 1" in output.err, "/why explains the joint answer"
    turns = json.loads(file.read_text("utf-8"))
    assert turns[0] == {"role": "user", "content": "When?"}
    assert together == f"together: {turns[1]['content']}"


def test_differ_shows_each_members_words(
    recite: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_chat("/differ\nWhen?\n/differ\n/clear\n/differ\n", two_speakers(recite), monkeypatch) == 0
    output = capsys.readouterr()
    won, lost = ("1887", "1892") if "1887" in output.out else ("1892", "1887")
    assert output.err.count("no whole answer") == 2
    _, _, table = output.err.partition("where members differ")
    first, *_ = [line for line in table.splitlines()[1:] if line.strip()]
    assert won in first
    assert f"“{lost}" in first
    one = recite("only", "Plain words spoken here.")
    assert run_chat("When?\n/differ\n", ["--member", one], monkeypatch) == 0
    assert "members differ in no word" in capsys.readouterr().err


def test_each_reports_why_an_answer_failed_and_shows_the_others(
    recite: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_chat(f"/each {'long ' * 5000}\n/each When?\n", two_speakers(recite), monkeypatch) == 0
    output = capsys.readouterr()
    assert "shorten the prompt" in output.err
    assert "left: The harbour opened in 1887" in output.out


@pytest.mark.parametrize("width", [100, 40])
def test_each_has_columns_on_a_terminal_and_marks_in_them(width: int) -> None:
    out = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, legacy_windows=False)
    columns = Columns(["le\x1bft", "right"])
    for column, text in zip(columns._columns, ("It is 5.", "It is 5.", "It is Six."), strict=True):
        column.text = text
    columns.show_differences(out, Console(file=io.StringIO()))
    lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    compared = any("together" in line and "right" in line for line in lines)
    assert compared is (width == 100)
    assert any("le\\x1bft" in line for line in lines)
    assert columns.joint.shown.spans[0].style == "bold reverse"
