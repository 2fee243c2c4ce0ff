"""Log-probabilities of an answer's tokens: the reference member's for the final text, written by any member."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from specfuse_shared import (
    ConfigError,
    EnsembleConfig,
    EnsembleEngine,
    EnsembleResult,
    MemberConfig,
    Message,
    SamplingParams,
)
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.text.codec import Codec
from tests.support.against_naive import local_members

QUESTION = "How do the tides follow the moon?"
TEXTS = [
    "Hello.",
    "Naïve café, 12.5 km/h",
    "北京是中国的首都。",
    "👩‍👩‍👧 and 🎉",
    "  two spaces\n\nand lines\t",
    " leading",
]


def plain_rows(member: LocalMember, text: str) -> torch.Tensor:
    """Log p of the whole vocabulary at each position of the text, by one forward pass over prompt and answer."""
    prompt, ids = member.encode_prompt([Message("user", QUESTION)]), member.codec.encode(text)
    with torch.inference_mode():
        rows = member.runner.plain([*prompt, *ids]).float().log_softmax(-1)
    return rows[len(prompt) - 1 :][: len(ids)]


def check(engine: EnsembleEngine, result: EnsembleResult, top: int = 0, reference: LocalMember | None = None) -> None:
    assert result.logprobs is not None
    assert b"".join(bytes(t.bytes) for t in result.logprobs).decode() == result.text
    member = reference or next(m for m in local_members(engine) if m.name == result.usage.reference)
    rows, ids = plain_rows(member, result.text), member.codec.encode(result.text)
    expected = [float(row[token]) for row, token in zip(rows, ids, strict=True)]
    assert [t.logprob for t in result.logprobs] == pytest.approx(expected, abs=1e-3)
    for reported, row in zip(result.logprobs, rows, strict=True):
        best = row.topk(top)
        assert [each.logprob for each in reported.top] == pytest.approx(best.values.tolist(), abs=1e-3)
        for each, token in zip(reported.top, best.indices.tolist(), strict=True):
            spelled = member.codec.alternatives("", [[token]])[0][0]
            is_close = best.values.diff().abs().min() < 1e-3 if top > 1 else False
            assert bytes(each.bytes) in (spelled, spelled.removeprefix(b" ")) or is_close
            assert each.token == bytes(each.bytes).decode("utf-8", "replace")


@pytest.mark.parametrize("top", [1, 5, 20])
@pytest.mark.parametrize("reference", ["chat", "base"])
def test_the_most_probable_tokens_at_each_position_are_the_reference_members(
    tiny_engine: EnsembleEngine, top: int, reference: str
) -> None:
    with EnsembleEngine(replace(tiny_engine.config, reference=reference)) as engine:
        params = SamplingParams(max_tokens=25, temperature=1.0, seed=3, logprobs=True, top_logprobs=top)
        result = engine.generate(QUESTION, params)
        check(engine, result, top)
        assert all(len(reported.top) == top for reported in result.logprobs or ())
        assert result.text == engine.generate(QUESTION, replace(params, top_logprobs=0)).text


def test_the_answers_token_among_the_most_probable_has_its_own_spelling(tiny_engine: EnsembleEngine) -> None:
    """Also at the first position, before which some tokenizers add a space."""
    for reference in ("chat", "base"):
        with EnsembleEngine(replace(tiny_engine.config, reference=reference)) as engine:
            params = SamplingParams(max_tokens=12, logprobs=True, top_logprobs=20)
            alone = engine.generate(QUESTION, params, members=[reference])
            assert alone.logprobs is not None
            for reported in alone.logprobs:
                if reported.logprob >= reported.top[-1].logprob + 1e-3:
                    assert reported.bytes in {each.bytes for each in reported.top}
            assert any(reported.bytes == reported.top[0].bytes for reported in alone.logprobs)


def test_logprobs_are_the_same_in_paged_execution_and_in_a_batch(tiny_engine: EnsembleEngine) -> None:
    params = SamplingParams(max_tokens=20, logprobs=True, top_logprobs=4)
    with EnsembleEngine(replace(tiny_engine.config, execution="paged")) as engine:
        for result in engine.generate_batch([QUESTION] * 3, params):
            check(engine, result, 4)


@pytest.mark.parametrize("settings", [{"top_logprobs": 21}, {"top_logprobs": -1}, {"top_logprobs": 1.5}])
def test_more_logprobs_than_the_limit_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="top_logprobs"):
        SamplingParams(logprobs=True, **settings)
    with pytest.raises(ConfigError, match="needs logprobs=True"):
        SamplingParams(top_logprobs=3)


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_are_the_text(codecs: dict[str, Codec], text: str) -> None:
    for codec in codecs.values():
        pieces = codec.pieces(text)
        assert b"".join(pieces) == text.encode()
        assert len(pieces) == len(codec.encode(text))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=7),
        SamplingParams(max_tokens=40, temperature=1.2, seed=5),
        SamplingParams(max_tokens=60, stop=["e", "a"]),
    ],
    ids=["greedy", "cut", "sampled", "stopped"],
)
@pytest.mark.parametrize("reference", ["chat", "base"])
def test_logprobs_are_the_reference_members_own(
    tiny_engine: EnsembleEngine, params: SamplingParams, reference: str
) -> None:
    with EnsembleEngine(replace(tiny_engine.config, reference=reference)) as engine:
        with_logprobs = replace(params, logprobs=True)
        check(engine, result := engine.generate(QUESTION, with_logprobs))
        assert result.text == engine.generate(QUESTION, params).text
    assert result.usage.reference == reference


def test_logprobs_remain_available_after_the_reference_member_has_left(tiny_engine: EnsembleEngine) -> None:
    class LeaveFirst:
        def __call__(self, totals: list[float], round_index: int) -> object:
            from specfuse_shared import ExitDecision

            return ExitDecision((1 / len(totals),) * len(totals), (0,))

    with EnsembleEngine(replace(tiny_engine.config, exit=LeaveFirst(), reference="chat")) as engine:
        result = engine.generate(QUESTION, SamplingParams(max_tokens=40, logprobs=True))
        assert [e.member for r in result.rounds for e in r.exits] == ["chat"]
        check(engine, result)


def test_logprobs_are_given_only_on_request(tiny_engine: EnsembleEngine) -> None:
    assert tiny_engine.generate(QUESTION, SamplingParams(max_tokens=5)).logprobs is None


def test_members_that_verify_row_by_row_give_logprobs(tmp_path_factory: pytest.TempPathFactory) -> None:
    from tests.support.tiny import byte_level_tokenizer, save_model

    folder = save_model("mamba", byte_level_tokenizer(), tmp_path_factory.mktemp("mamba"))
    with EnsembleEngine(EnsembleConfig([MemberConfig(str(folder), name="mamba", dtype="float32")])) as engine:
        result = engine.generate(QUESTION, SamplingParams(max_tokens=12, logprobs=True, top_logprobs=3))
        check(engine, result, 3)
    assert all(math.isfinite(t.logprob) for t in result.logprobs or ())
