"""Models in several GGUF files: naming any part loads all of them, and a missing part is an error."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, MemberLoadError, Message, SamplingParams
from specfuse_shared.loading.gguf import cache_folder, converted, gguf_head
from specfuse_shared.loading.planning import plan_ensemble
from tests.support.tiny import byte_level_tokenizer
from tests.support.tiny_gguf import split_gguf, write_gguf


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECFUSE_CACHE", str(tmp_path / "cache"))
    return write_gguf(tmp_path / "tiny.gguf", "llama", byte_level_tokenizer())


def member(file: Path) -> MemberConfig:
    return MemberConfig(str(file), name="m", backend="transformers", dtype="float32")


def answer(file: Path) -> str:
    with EnsembleEngine(EnsembleConfig([member(file)])) as engine:
        return engine.generate([Message("user", "The quick brown fox")], SamplingParams(max_tokens=12)).text


def test_parts_answer_as_the_whole_file_does(whole: Path) -> None:
    first, second, third = split_gguf(whole, 3)
    assert answer(first) == answer(whole)
    assert answer(third) == answer(second) == answer(whole), "any part names the model"
    assert not list(cache_folder().glob("*/whole.gguf")), "the joined file is not kept"


def test_a_plan_counts_all_parts(whole: Path) -> None:
    parts = split_gguf(whole, 2)
    assert gguf_head(parts[0]).size == sum(part.stat().st_size for part in parts)
    split, one = (plan_ensemble(EnsembleConfig([member(file)])).of("m") for file in (parts[0], whole))
    assert split.need == one.need


@pytest.mark.parametrize("named", [0, 1])
def test_a_missing_part_is_named(whole: Path, named: int) -> None:
    parts = split_gguf(whole, 2)
    parts[1 - named].unlink()
    with pytest.raises(MemberLoadError, match=rf"one of 2 parts of a model, and {parts[1 - named].name} is missing"):
        answer(parts[named])


def test_a_renamed_part_is_not_a_whole_model(whole: Path) -> None:
    renamed = split_gguf(whole, 2)[0].rename(whole.with_name("renamed.gguf"))
    with pytest.raises(MemberLoadError, match=r"one of 2 parts of a model: name the parts as they were"):
        answer(renamed)


def test_a_part_of_another_model_is_refused(whole: Path) -> None:
    foreign = write_gguf(whole.with_name("other.gguf"), "llama", byte_level_tokenizer(), seed=1)
    mine, theirs = split_gguf(whole, 2), split_gguf(foreign, 3)
    shutil.copy(theirs[1], mine[1])
    with pytest.raises(MemberLoadError, match=r"have \d+ of \d+ tensors: fetch them again"):
        answer(mine[0])


def test_conversions_of_earlier_releases_are_removed(whole: Path) -> None:
    target = converted(whole, None, lambda stage: None)
    older, foreign = target.with_name(f"{target.name[:-1]}1"), target.with_name("other-abc-1")
    for folder in (older, foreign):
        shutil.copytree(target, folder)
    shutil.rmtree(target)
    assert converted(whole, None, lambda stage: None) == target
    assert not older.exists()
    assert foreign.exists()
