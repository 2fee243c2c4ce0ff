"""`generate_each`: the joint answer and each member's own, at the same time."""

from __future__ import annotations

import pytest

from specfuse_shared import EnsembleEngine, GenerationError, RequestError, SamplingParams
from specfuse_shared.members.stages import Draft, DraftAlone, Fault
from tests.support.fake_engine import FakeEngine, two
from tests.support.served import QUESTIONS

PARAMS = SamplingParams(max_tokens=30)


def test_each_answer_equals_a_separate_request(tiny_engine: EnsembleEngine) -> None:
    results = tiny_engine.generate_each(QUESTIONS[0], PARAMS)
    assert results.joint.text == tiny_engine.generate(QUESTIONS[0], PARAMS).text
    assert list(results.alone) == ["chat", "base"]
    for name, result in results.alone.items():
        assert result.text == tiny_engine.generate(QUESTIONS[0], PARAMS, members=[name]).text
        assert result.members == (name,)
    assert not results.failed
    texts: dict[str | None, str] = {
        None: results.joint.text,
        **{name: result.text for name, result in results.alone.items()},
    }
    for author, differences in results.differences.items():
        assert all(texts[author][difference.start : difference.end].strip() for difference in differences)


def test_with_a_subset_of_members_each_of_them_answers(tiny_engine: EnsembleEngine) -> None:
    assert list(tiny_engine.generate_each(QUESTIONS[0], PARAMS, members=["base"]).alone) == ["base"]


def test_a_member_that_fails_alone_is_named_and_the_others_answer() -> None:
    first, second = two()
    second.disturb = lambda request: Fault("RuntimeError", "injected") if isinstance(request.op, DraftAlone) else None
    with FakeEngine(first, second) as engine:
        results = engine.generate_each("help me", PARAMS)
    assert results.joint.text
    assert list(results.alone) == ["a"]
    assert isinstance(results.failed["b"], GenerationError)
    assert list(results.differences) == [None, "a"]


def test_the_joint_answers_error_is_raised(tiny_engine: EnsembleEngine) -> None:
    with pytest.raises(RequestError):
        tiny_engine.generate_each("long " * 5000, PARAMS)
    first, second = two(disturb=lambda request: Fault("E", "x") if isinstance(request.op, Draft) else None)
    with FakeEngine(first, second) as engine, pytest.raises(GenerationError):
        engine.generate_each("help me", PARAMS)
