"""A bar shows the progress of loading in a terminal."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig
from specfuse_shared.loading.progress import LoadingBar, LoadProgress
from tests.support.tiny import byte_level_tokenizer, save_model


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_shown_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    bar = LoadingBar()
    bar.open(["smol", "gemma"])
    assert "loading smol, gemma" in terminal.getvalue()
    bar(LoadProgress("smol", 1, 2, "reading the weights"))
    bar(LoadProgress("smol", 1, 2, "ready"))
    bar.close()
    assert "smol: reading the weights:   0%" in terminal.getvalue()
    assert "1/2" in terminal.getvalue()


def test_nothing_is_written_to_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    bar = LoadingBar()
    bar.open(["smol"])
    bar(LoadProgress("smol", 1, 1, "ready"))
    bar.close()
    assert file.getvalue() == ""


def test_an_engine_shows_the_bar_unless_it_is_given_something_to_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EnsembleConfig([MemberConfig(str(save_model("llama", byte_level_tokenizer(), tmp_path / "tiny")))])
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with EnsembleEngine(config) as engine:
        engine.load()
    assert "tiny: checking parity" in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", quiet := Terminal())
    with EnsembleEngine(config) as engine:
        engine.load(lambda progress: None)
    assert quiet.getvalue() == ""
