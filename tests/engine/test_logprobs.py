"""Log-probabilities of an answer's tokens: those of the reference member for the final text, whoever wrote it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from specfuse_shared import EnsembleConfig, EnsembleEngine, EnsembleResult, MemberConfig, Message, SamplingParams
from specfuse_shared.text.codec import Codec
from tests.engine.comparing import local_members

QUESTION = "How do the tides follow the moon?"
TEXTS = [
    "Hello.",
    "Naïve café, 12.5 km/h",
    "北京是中国的首都。",
    "👩‍👩‍👧 and 🎉",
    "  two spaces\n\nand lines\t",
    " leading",
]


def plain_logprobs(engine: EnsembleEngine, name: str, text: str) -> list[float]:
    """By one forward of the model over prompt and answer."""
    member = next(m for m in local_members(engine) if m.name == name)
    prompt, ids = member.encode_prompt([Message("user", QUESTION)]), member.codec.encode(text)
    with torch.inference_mode():
        logprobs = member.runner.plain([*prompt, *ids]).float().log_softmax(-1)
    return [float(logprobs[len(prompt) - 1 + n, token]) for n, token in enumerate(ids)]


def check(engine: EnsembleEngine, result: EnsembleResult) -> None:
    assert result.logprobs is not None
    assert b"".join(bytes(t.bytes) for t in result.logprobs).decode() == result.text
    expected = plain_logprobs(engine, result.usage.reference, result.text)
    assert [t.logprob for t in result.logprobs] == pytest.approx(expected, abs=1e-3)


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
def test_they_are_the_reference_members_own(
    tiny_engine: EnsembleEngine, params: SamplingParams, reference: str
) -> None:
    with EnsembleEngine(replace(tiny_engine.config, reference=reference)) as engine:
        asked = replace(params, logprobs=True)
        check(engine, result := engine.generate(QUESTION, asked))
        assert result.text == engine.generate(QUESTION, params).text
    assert result.usage.reference == reference


def test_they_are_there_when_the_reference_member_has_left(tiny_engine: EnsembleEngine) -> None:
    class LeaveFirst:
        def __call__(self, totals: list[float], round_index: int) -> object:
            from specfuse_shared import ExitDecision

            return ExitDecision((1 / len(totals),) * len(totals), (0,))

    with EnsembleEngine(replace(tiny_engine.config, exit=LeaveFirst(), reference="chat")) as engine:
        result = engine.generate(QUESTION, SamplingParams(max_tokens=40, logprobs=True))
        assert [e.member for r in result.rounds for e in r.exits] == ["chat"]
        check(engine, result)


def test_without_being_asked_for_there_are_none(tiny_engine: EnsembleEngine) -> None:
    assert tiny_engine.generate(QUESTION, SamplingParams(max_tokens=5)).logprobs is None


def test_members_that_verify_row_by_row_give_them_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    from tests.engine.tiny import byte_level_tokenizer, save_model

    folder = save_model("mamba", byte_level_tokenizer(), tmp_path_factory.mktemp("mamba"))
    with EnsembleEngine(EnsembleConfig([MemberConfig(str(folder), name="mamba", dtype="float32")])) as engine:
        result = engine.generate(QUESTION, SamplingParams(max_tokens=12, logprobs=True))
        check(engine, result)
    assert all(math.isfinite(t.logprob) for t in result.logprobs or ())
