"""Differences on Windows, tested on any system: missing modules, encodings, line ends, paths and signals."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from rich.console import Console

from specfuse_shared import ConfigError, EnsembleConfig, Event, MemberConfig, SpecFuseError
from specfuse_shared.api_server.run import stop_signals
from specfuse_shared.cli import commands, terminal
from specfuse_shared.comparing.run.run_file import RunFile
from specfuse_shared.comparing.tuning import check_config_file, write_ensemble
from specfuse_shared.frameworks.settings import path_name, path_of
from specfuse_shared.loading.config_files import read_ensemble
from specfuse_shared.serving import scheduler
from specfuse_shared.serving.scheduler import EventStream
from tests.support.serving import line_of

BOM = b"\xef\xbb\xbf"
UNIX = ("fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
"""Modules that Windows lacks."""


# ── modules ──────────────────────────────────────────────────────────────────────────────────────

IMPORT_ALL = """
    import builtins, importlib, pkgutil, sys

    gone = set(sys.argv[1].split(","))
    import_module = builtins.__import__

    def import_without(name, globals=None, *others, **named):
        ours = ((globals or {}).get("__name__") or "").startswith("specfuse_shared")
        if ours and name.partition(".")[0] in gone:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return import_module(name, globals, *others, **named)

    builtins.__import__ = import_without  # of this package alone: other libraries have releases for Windows

    import specfuse_shared

    missing = []
    for module in pkgutil.walk_packages(specfuse_shared.__path__, "specfuse_shared."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name in gone:
                missing.append(f"{module.name} needs {error.name}")
    print(missing)
"""


def test_every_module_is_imported_without_the_modules_of_unix() -> None:
    command = [sys.executable, "-c", textwrap.dedent(IMPORT_ALL), ",".join(UNIX)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


# ── files of a run ───────────────────────────────────────────────────────────────────────────────


def test_a_run_keeps_its_records_and_its_lock(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    with RunFile(file) as run:
        run.add("one", {"text": "the tide\nturns"})
        with pytest.raises(ConfigError, match="being written by another run"), RunFile(file):
            pytest.fail("two runs write one file")
        assert file.read_bytes().count(b"\n") == 2, "the file can be read meanwhile"
    with RunFile(file) as run:
        assert run.get("one") == {"text": "the tide\nturns"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.jsonl"]


def test_a_run_file_of_another_process_is_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    script = (
        "import sys\nfrom specfuse_shared.comparing.run.run_file import RunFile\n"
        "with RunFile(sys.argv[1]):\n    print('open', flush=True)\n    sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line_of(process, process.stdout, "^open$")
        with pytest.raises(ConfigError, match="being written by another run"), RunFile(file):
            pytest.fail("two processes write one file")
        process.kill()  # like a crashed run, whose lock is released
        process.wait()
        with RunFile(file) as run:
            run.add("two", {"text": "x"})
    finally:
        process.kill()
        process.communicate()


def test_a_thread_may_close_a_file_of_another_thread(tmp_path: Path) -> None:
    run = RunFile(tmp_path / "run.jsonl").__enter__()
    thread = threading.Thread(target=run.close)
    thread.start()
    thread.join()
    with RunFile(tmp_path / "run.jsonl"):
        pass


@pytest.mark.parametrize("mark", [b"", BOM])
def test_a_run_file_saved_by_a_windows_editor_can_be_continued(tmp_path: Path, mark: bytes) -> None:
    file = tmp_path / "run.jsonl"
    with RunFile(file) as run:
        run.add("one", {"text": "a"})
    file.write_bytes(mark + file.read_bytes().replace(b"\n", b"\r\n"))
    with RunFile(file) as run:
        assert run.get("one") == {"text": "a"}
        run.add("two", {"text": "b"})
    with RunFile(file) as run:
        assert len(run) == 2


# ── configurations ───────────────────────────────────────────────────────────────────────────────

TOML = '[ensembles.pair]\nmembers = ["a/b", "c/d"]\n'


def test_a_configuration_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "pair.toml"
    file.write_bytes(BOM + TOML.replace("\n", "\r\n").encode())
    assert read_ensemble(file).names == ("b", "d")
    pytest.importorskip("tomlkit")
    check_config_file(file)
    write_ensemble(file, "other", EnsembleConfig(["e/f"]))
    assert read_ensemble(f"{file}#pair").names == ("b", "d")
    assert read_ensemble(f"{file}#other").names == ("f",)


@pytest.mark.parametrize("path", [r"C:\models\qwen", r"C:\new\big", r"C:\Users\me\m.gguf", r"D:\tables\x", r"C:\u\v"])
def test_a_path_of_windows_in_double_quotes_is_explained(tmp_path: Path, path: str) -> None:
    file = tmp_path / "pair.toml"
    file.write_text(f'[[ensembles.pair.members]]\nmodel = "{path}"\n', "utf-8")
    with pytest.raises(ConfigError, match="write a path of Windows in single quotes in TOML"):
        read_ensemble(file)
    file.write_text(f"[[ensembles.pair.members]]\nmodel = '{path}'\n", "utf-8")
    assert read_ensemble(file).member_configs[0].model == path


def test_other_mistakes_are_not_reported_as_paths(tmp_path: Path) -> None:
    file = tmp_path / "pair.toml"
    file.write_text("[ensembles.pair\n", "utf-8")
    with pytest.raises(ConfigError, match="is no TOML") as error:
        read_ensemble(file)
    assert "Windows" not in str(error.value)


@pytest.mark.parametrize("setting", ["model", "adapter", "tokenizer", "gguf_file"])
def test_a_path_with_interpreted_escapes_is_explained(setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"MemberConfig.{setting} is 'C:\\new\\x08ig', which has a control"):
        MemberConfig(**{"model": "a/b", setting: "C:\new\big"})


def test_a_locked_file_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tomlkit")
    file = tmp_path / "pair.toml"
    file.write_text(TOML, "utf-8")

    def refuse(*names: Any) -> None:
        raise PermissionError(13, "used by another process")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(SpecFuseError, match="cannot be written"):
        write_ensemble(file, "other", EnsembleConfig(["e/f"]))
    assert [each.name for each in tmp_path.iterdir()] == ["pair.toml"]
    assert file.read_text("utf-8") == TOML


# ── paths ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (r"C:\secret\qwen", "qwen"),
        ("C:/secret/qwen", "qwen"),
        (r"..\secret\qwen", "qwen"),
        (r"\\server\secret\qwen.gguf", "qwen.gguf"),
        (r"secret\qwen", "qwen"),
        ("/srv/secret/qwen", "qwen"),
    ],
)
def test_a_path_on_a_missing_drive_is_redacted(path: str, name: str) -> None:
    shown_name = path_name(path)
    assert shown_name.startswith(f"local:{name}#")
    assert "secret" not in shown_name
    assert path_of(shown_name) == path


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "ollama:llama3.2:3b", "gpt2", "demo"])
def test_a_hub_id_is_no_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert path_name(name) == name


# ── streams ──────────────────────────────────────────────────────────────────────────────────────


def test_an_answer_to_a_file_is_utf_8_and_exactly_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="cp1252", newline="\r\n"))
    assert commands.main(["--version"]) == 0
    terminal._write(Console(file=sys.stdout), "大 – 🌊\nsea\r\n", None)
    sys.stdout.flush()
    assert raw.getvalue().split(b"\n", 1)[1] == "大 – 🌊\nsea\r\n".encode()


def test_characters_that_a_terminal_cannot_show_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="cp1252")
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", stream)
    commands.main(["--version"])
    sys.stdout.write("🌊\n")
    sys.stdout.flush()
    assert raw.getvalue().endswith(rb"\U0001f30a" + os.linesep.encode())


def test_a_question_on_standard_input_may_begin_with_a_byte_order_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BOM + "Où ?".encode())))
    assert commands._messages(None, "-")[0].content == "Où ?"


def test_a_wait_for_an_answer_can_be_interrupted_if_ctrl_c_is_only_seen_between_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal during an unlimited wait of the main thread would never be handled on such a system."""
    monkeypatch.setattr(scheduler, "_SECONDS_OF_A_WAIT", 0.02)
    waits: list[float | None] = []

    class Items(SimpleQueue[Event | Exception]):
        def get(self, block: bool = True, timeout: float | None = None) -> Event | Exception:
            waits.append(timeout)
            if len(waits) == 3:
                raise KeyboardInterrupt
            return super().get(block, timeout)

    cancelled: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        next(EventStream(Items(), lambda: cancelled.append(True), None))
    assert waits == [0.02] * 3
    assert cancelled == [True]


def test_an_item_between_two_waits_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_SECONDS_OF_A_WAIT", 0.01)
    items = SimpleQueue[Event | Exception]()
    threading.Timer(0.05, items.put, [ConfigError("here")]).start()
    began = time.monotonic()
    with pytest.raises(ConfigError, match="here"):
        next(EventStream(items, lambda: None, None))
    assert time.monotonic() - began < 5


def test_ctrl_break_stops_the_server_like_other_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "SIGBREAK", 21, raising=False)
    assert stop_signals() == (signal.SIGINT, signal.SIGTERM, 21)
    monkeypatch.delattr(signal, "SIGTERM")
    assert stop_signals() == (signal.SIGINT, 21)


def test_records_are_read_under_any_preferred_encoding(tmp_path: Path) -> None:
    """No file is opened in the encoding of the system."""
    script = (
        "import sys\nfrom specfuse_shared.comparing.run.run_file import RunFile\n"
        "from specfuse_shared.loading.config_files import read_ensemble\n"
        "with RunFile(sys.argv[1]) as run:\n    run.add('k', {'text': '大'})\n"
        "print(read_ensemble(sys.argv[2]).names)\n"
    )
    toml = tmp_path / "pair.toml"
    toml.write_text(TOML, "utf-8")
    command = [sys.executable, "-X", "warn_default_encoding", "-c", script, str(tmp_path / "run.jsonl"), str(toml)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-1] == "('b', 'd')", done.stderr
    assert "specfuse_shared" not in done.stderr
    assert json.loads((tmp_path / "run.jsonl").read_text("utf-8").splitlines()[1])["text"] == "大"
