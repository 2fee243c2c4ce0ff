"""Random tiny models of many architectures against the naive round."""

from __future__ import annotations

from pathlib import Path

import pytest

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, SamplingParams
from tests.support.against_naive import SCORES, assert_equals_naive, local_members, with_settings
from tests.support.marks import weekly
from tests.support.tiny import (
    ARCHITECTURES,
    MESSAGES,
    ROW_BY_ROW,
    byte_level_tokenizer,
    metaspace_tokenizer,
    save_model,
)

PAGED = ("qwen3", "gemma2", "gpt2", "gpt_oss")
"""Architectures whose attention differs: per-head norms, soft caps, learned positions, and sinks."""
WAYS = [
    *((kind, "dynamic") for kind in ARCHITECTURES),
    *((kind, "paged") for kind in PAGED),
    *weekly(*((kind, "paged") for kind in ARCHITECTURES if kind not in {*PAGED, *ROW_BY_ROW})),
]


@pytest.fixture(scope="module")
def partner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A member of another family with another tokenizer, for every architecture under test."""
    return save_model("llama", metaspace_tokenizer(), tmp_path_factory.mktemp("partner"), seed=1)


@pytest.mark.parametrize(("kind", "execution"), WAYS)
def test_tiny_models_equal_the_naive_round(kind: str, execution: str, partner: Path, tmp_path: Path) -> None:
    save_model(kind, byte_level_tokenizer(), tmp_path)
    members = [MemberConfig(str(tmp_path), name=kind, dtype="float32"), MemberConfig(str(partner), dtype="float32")]
    config = EnsembleConfig(
        members=members, segment_tokens=6, first_segment_tokens=None, exit="never", execution=execution
    )
    with EnsembleEngine(config) as engine:
        report = engine.describe()[0]
        assert report.verification == ("rows" if kind in ROW_BY_ROW else "packed")
        assert report.probe_error < 1e-3
        assert ("paged execution" in report.graphs) == (execution != "dynamic")
        for params in (SamplingParams(max_tokens=300), SamplingParams(max_tokens=300, temperature=1.2, seed=7)):
            records = assert_equals_naive(engine.config, local_members(engine), MESSAGES, params, rounds=5)
            assert any(r.verified for r in records)
        guessing = with_settings(engine.config, speculation="auto")
        assert_equals_naive(guessing, local_members(engine), MESSAGES, SamplingParams(max_tokens=300), rounds=4)
        if execution == "dynamic":  # weights and exits do not depend on it
            for score in SCORES[:2]:
                learning = with_settings(engine.config, feedback="constant", exit="entropy", segment_tokens=3, **score)
                assert_equals_naive(learning, local_members(engine), MESSAGES, SamplingParams(max_tokens=300), rounds=4)


@pytest.mark.parametrize(
    ("score", "speculation"),
    [
        (SCORES[0], "off"),
        (SCORES[0], "auto"),
        *weekly(*((score, way) for score in SCORES[1:] for way in ("auto", "off"))),
    ],
    ids=str,
)
def test_three_members_equal_the_naive_round(
    partner: Path, tmp_path: Path, score: dict[str, str], speculation: str
) -> None:
    """With three members, votes and weights depend on the authors of a candidate and on who finds it plausible."""
    members = [MemberConfig(str(partner), name="one", dtype="float32")]
    for number, kind in enumerate(("gpt2", "qwen3"), start=2):
        save_model(kind, byte_level_tokenizer(), tmp_path / kind, seed=number)
        members.append(MemberConfig(str(tmp_path / kind), name=kind, dtype="float32"))
    with EnsembleEngine(EnsembleConfig(members=members, speculation=speculation, **score)) as engine:
        for params in (SamplingParams(max_tokens=300), SamplingParams(max_tokens=300, temperature=1.2, seed=7)):
            records = assert_equals_naive(engine.config, local_members(engine), MESSAGES, params, rounds=8)
            assert all(len(r.active) == 3 for r in records)
            leaving = with_settings(engine.config, exit="entropy", exit_threshold=1.0, min_active=2)
            records = assert_equals_naive(leaving, local_members(engine), MESSAGES, params, rounds=8)
            assert [len(r.active) for r in records] == [3] + [2] * (len(records) - 1), "the best two never leave"


@pytest.mark.parametrize("score", [SCORES[0], *weekly(*SCORES[1:])], ids=str)
def test_ends_and_common_beginnings_equal_the_naive_round(partner: Path, tmp_path: Path, score: dict[str, str]) -> None:
    """Members that end their turn at any time, and two of one model, whose drafts begin alike."""
    save_model("gpt2", byte_level_tokenizer(), tmp_path)
    often = tuple(range(40, 300, 3))
    members = [
        MemberConfig(str(partner), name="one", dtype="float32", stop_token_ids=often),
        MemberConfig(str(tmp_path), name="two", dtype="float32", stop_token_ids=often),
        MemberConfig(str(tmp_path), name="three", dtype="float32", stop_token_ids=often),
    ]
    ends, beginnings = 0, 0
    with EnsembleEngine(EnsembleConfig(members=members, repetition_guard=False, **score)) as engine:
        for seed in range(12):
            params = SamplingParams(max_tokens=300, temperature=0.5, seed=seed)
            for record in assert_equals_naive(engine.config, local_members(engine), MESSAGES, params, rounds=3):
                ends += sum(c.ends for c in record.candidates)
                texts = [c.text for c in record.candidates]
                beginnings += any(a != b and b.startswith(a) for a in texts for b in texts)
        params = SamplingParams(max_tokens=300, temperature=0.5, seed=1, ignore_eos=True)
        records = assert_equals_naive(engine.config, local_members(engine), MESSAGES, params, rounds=3)
    assert min(ends, beginnings) >= 5
    assert not any(candidate.ends for record in records for candidate in record.candidates)
