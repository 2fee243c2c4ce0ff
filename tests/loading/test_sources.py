"""Members' files are checked before torch is imported; one line names the wrong one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specfuse_shared import EnsembleConfig, MemberConfig, MemberLoadError
from specfuse_shared.loading.sources import check_sources


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    (tmp_path / "parent" / "model").mkdir(parents=True)
    (tmp_path / "parent" / "model" / "config.json").write_text("{}")
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "a-Q4_K_M.gguf").write_bytes(b"GGUF")
    (tmp_path / "weights.bin").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("model", "reported"),
    [
        ("empty", r"empty has no config\.json: expected a hub id"),
        ("parent", r"parent has no config\.json \(its folder 'model' has one\)"),
        ("ggufs", r"ggufs holds GGUF files: name one of them, such as .*a-Q4_K_M\.gguf"),
        ("weights.bin", r"weights\.bin is a file, but no \.gguf file"),
        ("parnt", r"there is no file or folder .*parnt \(there is 'parent'\)"),
        ("ggufs/a-Q4_K_S.gguf", r"there is no GGUF file .*a-Q4_K_S\.gguf \(there is 'a-Q4_K_M\.gguf'\)"),
        ("gone/model", r"there is no file or folder .*model, nor a folder .*gone"),
    ],
)
def test_a_source_that_cannot_be_a_model_is_reported(place: Path, model: str, reported: str) -> None:
    with pytest.raises(MemberLoadError, match=reported):
        check_sources(EnsembleConfig(["org/name", str(place / model)]))


def test_relative_paths_are_no_hub_ids() -> None:
    for model in ("./nothing", "../nothing", "a/b/c", "~/nothing-here"):
        with pytest.raises(MemberLoadError, match="there is no file or folder"):
            check_sources(EnsembleConfig([model]))


def test_a_possible_model_passes(place: Path) -> None:
    served = MemberConfig("org/tokenizer", server="http://127.0.0.1:9")
    models = ["gpt2", "org/name.v2", str(place / "parent" / "model"), str(place / "ggufs" / "a-Q4_K_M.gguf"), served]
    check_sources(EnsembleConfig(models))
    check_sources(EnsembleConfig([str(place / "nowhere")], runtime="ray"))


@pytest.mark.parametrize("adapter", ["langchain_specfuse.ChatSpecFuse", "llamaindex_specfuse.SpecFuseLLM"])
def test_neither_importing_nor_constructing_nor_a_wrong_path_imports_torch(adapter: str) -> None:
    package, _, name = adapter.partition(".")
    code = f"""
import sys
from {package} import {name}
from specfuse_shared import MemberLoadError
{name}(members="demo")
try:
    {name}(members=["/nowhere/at/all"]).load()
except MemberLoadError as error:
    print(error)
print(sorted({{"torch", "transformers"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    reported, imported = done.stdout.splitlines()
    assert "no file or folder /nowhere/at/all" in reported
    assert imported == "[]"
