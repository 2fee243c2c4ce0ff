"""Compiled layers give the same results, and one compilation serves all layers and numbers of tokens."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, SamplingParams
from specfuse_shared.members.local import member, probe
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.runtime import compiled_layers
from specfuse_shared.runtime.attention import ForwardInput
from specfuse_shared.runtime.compiled_layers import compile_layers
from tests.support.against_naive import assert_equals_naive, local_members
from tests.support.captured import paged_runner
from tests.support.tiny import MESSAGES, byte_level_tokenizer, save_model

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def compiling(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make members on the CPU compile their layers."""
    monkeypatch.setattr(member, "uses_kernel", lambda device: True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
    yield
    torch._dynamo.reset()


def backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plainly = compile_layers
    monkeypatch.setattr(probe, "compile_layers", lambda model, folder: plainly(model, folder, name))


def loaded(folder: Path, kind: str = "llama", **settings: Any) -> LocalMember:
    save_model(kind, byte_level_tokenizer(), folder, **settings)
    return LocalMember(MemberConfig(str(folder), dtype="float32"), execution="paged")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_layer_is_compiled_for_one_token_and_for_several(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend("eager", monkeypatch)
    counters.clear()
    made = loaded(tmp_path, kind, num_hidden_layers=4)
    assert made.report.layers == "compiled"
    graphs = counters["stats"]["unique_graphs"]
    assert graphs <= 28, "of one layer, not of four"
    runner = paged_runner(made.runner.model, made.runner)
    with torch.inference_mode():
        for count in (1, 2, 7, 30, 200, 600):
            row = runner.pool.row(0)
            ids = [10 + n % 90 for n in range(count)]
            [logits] = runner.step([ForwardInput(row, ids, logit_count=count)])
            torch.testing.assert_close(logits, runner.plain(ids), rtol=1e-3, atol=1e-4)
            row.free()
    assert counters["stats"]["unique_graphs"] == graphs, "no number of tokens compiles anew"


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_answers_of_compiled_members_equal_the_naive_round(tmp_path: Path) -> None:
    for name, kind, seed in (("one", "qwen3", 1), ("two", "gemma2", 0)):
        save_model(kind, byte_level_tokenizer(), tmp_path / name, seed=seed)
    members = [MemberConfig(str(tmp_path / name), name=name, dtype="float32") for name in ("one", "two")]
    with EnsembleEngine(EnsembleConfig(members, segment_tokens=5, execution="paged")) as engine:
        assert [report.layers for report in engine.describe()] == ["compiled"] * 2
        for params in (SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=1.1, seed=4)):
            assert_equals_naive(engine.config, local_members(engine), MESSAGES, params, rounds=4)


def test_a_model_that_cannot_be_compiled_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("there is no compiler here")

    backend(broken, monkeypatch)
    made = loaded(tmp_path)
    assert made.report.layers.startswith("not compiled: ")
    assert "there is no compiler here" in made.report.layers
    assert made.report.probe_error < 1e-3
    assert made.runner.is_paged
    assert not any(hasattr(layer, "uncompiled_class") for layer in made.runner.model.model.layers)


@pytest.mark.slow
def test_compiled_layers_with_other_numbers_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *values: [
            2 * value if torch.is_tensor(value) and value.is_floating_point() else value for value in graph(*values)
        ]

    backend(wrong, monkeypatch)
    made = loaded(tmp_path)
    assert made.report.layers.startswith("not compiled: packed steps are off by")
    assert made.report.probe_error < 1e-3


def test_layers_are_compiled_only_where_configured_and_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("llama", byte_level_tokenizer(), tmp_path)
    off = LocalMember(MemberConfig(str(tmp_path), compile="off"), execution="paged")
    assert off.report.layers == ""
    off.runner.model._no_split_modules = None
    assert compiled_layers.compile_layers(off.runner.model, tmp_path) == 0
    monkeypatch.undo()
    assert LocalMember(MemberConfig(str(tmp_path)), execution="paged").report.layers == ""


@torch.inference_mode()
def test_a_compiled_model_is_copied_and_pickled_as_it_was(tmp_path: Path) -> None:
    save_model("llama", byte_level_tokenizer(), tmp_path)
    model = LocalMember(MemberConfig(str(tmp_path), compile="off")).runner.model
    assert compile_layers(model, tmp_path, "eager") == compile_layers(model, tmp_path, "eager") == 3
    ids = torch.arange(3, 12)[None]
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not hasattr(copied.model.layers[0], "uncompiled_class")
        torch.testing.assert_close(copied(input_ids=ids).logits, model(input_ids=ids).logits)
    model.model.layers[0].forward = lambda *args, **kwargs: None
    assert compile_layers(model, tmp_path) == 0, "changed by something else"
