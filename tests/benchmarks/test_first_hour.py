"""The first hour on a GPU, with small sizes on a CPU: it can be interrupted and resumed, and reports missing parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from figures import Sheet, read_sheet

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "first_hour.py"


def command(out: Path, *options: str) -> list[str]:
    return [sys.executable, str(SCRIPT), str(out), "--tiny", *options]


def result_of(out: Path, step: str) -> dict[str, Any]:
    result = read_sheet(out / f"{step}.json")
    assert result is not None
    return result


@pytest.mark.weekly
def test_a_step_writes_json_and_a_table_and_is_not_run_again(tmp_path: Path) -> None:
    first = subprocess.run(command(tmp_path, "--only", "versions"), capture_output=True, text=True, timeout=250)
    assert first.returncode == 0, first.stdout + first.stderr
    result = result_of(tmp_path, "versions")
    assert result["status"] == "done"
    lines = {line["what"]: line["found"] for line in result["lines"]}
    assert lines["torch"] == torch.__version__
    assert lines["torch has clearCublasWorkspacesForStream"] in ("yes", "no")
    assert any("no CUDA device" in what for what in result["lacking"])
    assert f"| torch | {torch.__version__} |" in (tmp_path / "versions.md").read_text("utf-8")
    assert (tmp_path / "hour.md").read_text("utf-8").startswith("## versions: ")
    again = subprocess.run(command(tmp_path, "--only", "versions"), capture_output=True, text=True, timeout=250)
    assert "versions: done before" in again.stdout
    assert result_of(tmp_path, "versions") == result
    before = (tmp_path / "versions.json").stat().st_mtime_ns
    anew = subprocess.run(
        command(tmp_path, "--only", "versions", "--again"), capture_output=True, text=True, timeout=250
    )
    assert anew.returncode == 0
    assert "done before" not in anew.stdout
    assert (tmp_path / "versions.json").stat().st_mtime_ns > before


@pytest.mark.slow
def test_an_interrupted_run_leaves_nothing_running_and_can_be_resumed(tmp_path: Path) -> None:
    running = subprocess.Popen(command(tmp_path, "--only", "versions", "soak"), stdout=subprocess.PIPE, text=True)
    limit = time.monotonic() + 200
    while not (tmp_path / "soak.json").exists():
        assert running.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "continues from here" in output
    assert result_of(tmp_path, "versions")["status"] == "done"
    assert result_of(tmp_path, "soak")["status"] == "running"
    assert not processes_with(str(tmp_path))
    again = subprocess.run(command(tmp_path, "--only", "versions", "soak"), capture_output=True, text=True, timeout=280)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "versions: done before" in again.stdout
    soak = {line["what"]: line["found"] for line in result_of(tmp_path, "soak")["lines"]}
    assert int(soak["answers"]) >= 24
    assert soak["that differ from dynamic execution"] == "0"


def processes_with(text: str) -> list[str]:
    lines = {process.pid: " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])}
    return [line for pid, line in lines.items() if text in line and pid != os.getpid()]


@pytest.mark.weekly
def test_dropped_graphs_do_not_change_answers(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, "--only", "graphs"), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = result_of(tmp_path, "graphs")["lines"]
    assert line["what"] == "equal answers with buffers that grow"
    same, count = line["found"].split(" of ")
    assert same == count
    assert len(result_of(tmp_path, "graphs")["lacking"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_real_sizes_are_refused_without_a_gpu(tmp_path: Path) -> None:
    real = [part for part in command(tmp_path) if part != "--tiny"]
    done = subprocess.run(real, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "--tiny runs the same code on a CPU" in done.stderr


def test_a_failed_step_reports_the_error_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import first_hour

    def broken(sheet: Sheet, card: first_hour.Card) -> None:
        sheet.add("so far", 1)
        raise ValueError("a card of another make")

    monkeypatch.setitem(first_hour.STEPS, "costs", broken)
    assert first_hour.run_step("costs", first_hour.Card(tmp_path, torch.device("cpu"), True)) == 1
    result = result_of(tmp_path, "costs")
    assert result["status"] == "failed"
    assert [line["found"] for line in result["lines"]] == ["1", "ValueError: a card of another make"]


def test_a_sheet_is_complete_whenever_it_is_read(tmp_path: Path) -> None:
    sheet = Sheet(tmp_path, "one", "one: a | b", True)
    sheet.add("x", "a|b\nc")
    assert json.loads(sheet.file.read_text("utf-8"))["status"] == "running"
    assert "| x | a/b c |" in sheet.table()
    assert read_sheet(tmp_path / "other.json") is None
