"""`pytest -m gpu` starts on a GPU machine with pydantic, pytest and little more, and says which tests it skips."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HIDDEN = """
from importlib.machinery import PathFinder
own = PathFinder.find_spec
def find(cls, name, *args):
    return None if name.partition(".")[0] in {names!r} else own(name, *args)
PathFinder.find_spec = classmethod(find)
"""
MISSING = (
    *("pytest_timeout", "pytest_asyncio", "xdist", "hypothesis", "psutil", "accelerate", "gguf", "httpx", "starlette"),
    *("langchain_core", "llama_index", "prometheus_client", "llguidance", "peft", "jsonschema"),
)


@pytest.mark.slow
def test_the_gpu_tests_start_without_any_extra(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDDEN.format(names=MISSING), "utf-8")
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=ROOT,
        env={"PYTHONPATH": str(tmp_path), "PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "skipped" in done.stdout
    assert "error" not in done.stdout.lower()
