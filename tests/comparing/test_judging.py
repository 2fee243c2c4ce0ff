"""Members rate each other's answers: their input, the ratings that count, and the report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from specfuse_shared import EnsembleConfig, EnsembleEngine, GenerationError, Message, RequestError
from specfuse_shared.candidate import CandidateLogprobs
from specfuse_shared.comparing import ENSEMBLE, Comparison, rate
from specfuse_shared.comparing.judging import MARKS, mark_of
from specfuse_shared.members.stages import Close, Fault, Open, Verdicts, Verify
from tests.comparing.comparisons import made
from tests.comparing.fakes import Fakes, ScriptedLane
from tests.support.against_naive import local_members

GOOD, BAD = "the sea", "a bird"
CONFIG = EnsembleConfig(["one", "two", "three"])


class JudgeLane(ScriptedLane):
    """A judge that prefers answers with the word "sea", unless it is `blind`."""

    blind = False
    seen: list[tuple[str, ...]]
    about: dict[Any, tuple[int, ...]]

    def _value(self, key, request):  # type: ignore[no-untyped-def]
        if isinstance(request.op, Verify):
            good = not self.blind and (hash("sea") in self.about[key])
            marks = [question.text for question in request.op.candidates]
            logprobs = [-abs(int(mark) - (5 if good else 1)) - 0.5 for mark in marks]
            return Verdicts(
                tuple(CandidateLogprobs(m, False, (p,), (1,)) for m, p in zip(marks, logprobs, strict=True))
            )
        if isinstance(request.op, Open):
            self.about = {**getattr(self, "about", {}), key: _rated(request.op.prompt)}
        return super()._value(key, request)


def _rated(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The words of the rated answer in the prompt of a rating."""
    words = list(prompt)
    place = words[len(words) - 1 - words[::-1].index(hash("good")) + 3]
    letter = {hash(f"{name}?"): hash(f"{name}:") for name in "ABCD"}[place]
    start = words.index(letter) + 1
    return tuple(words[start : start + 2])


@pytest.fixture
def judges(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    monkeypatch.setattr("tests.comparing.fakes.ScriptedLane", JudgeLane)
    return Fakes({name: {} for name in CONFIG.names})


def comparison(references: list[str] | str | None = GOOD) -> Comparison:
    """The ensemble is always right, one member sometimes, the others never."""
    texts = {
        "one": [GOOD if n % 4 == 0 else BAD for n in range(24)],
        "two": ["a bee"] * 24,
        "three": ["an owl"] * 24,
        ENSEMBLE: [GOOD] * 24,
    }
    return made(texts, references)


def test_a_mark_is_the_mean_of_marks_weighted_by_their_normalised_probabilities() -> None:
    assert mark_of([math.log(p) for p in (0.1, 0.0001, 0.0001, 0.0001, 0.3)]) == pytest.approx(4.0, abs=0.01)
    assert mark_of([-1000.0] * 5) == pytest.approx(3.0)


def test_good_judges_mark_the_ensemble_higher_and_agree_with_references(judges: Fakes) -> None:
    result = rate(comparison(), CONFIG, make_engine=judges)
    assert result.to == "one"
    assert result.gap.above
    assert result.gap.rows == 24
    assert result.agreed[0] == result.agreed[1] > 20
    assert "the ensemble's answers are marked +" in result.point.text
    assert "marks agree with references on 100 % [" in result.point.text
    assert "chance, as far" not in result.point.text


def test_no_member_rates_its_own_answer_and_answers_are_read_in_both_orders(judges: Fakes) -> None:
    result = rate(comparison(), CONFIG, make_engine=judges)
    assert not [r for r in result.ratings if r.judge == r.asker]
    same = [r for r in result.ratings if r.judge == "one" and r.asker == ENSEMBLE]
    assert len(same) == 18, "an ensemble's answer that equals the judge's own is not counted"
    assert judges.opened == 18 * (4 - 1) * 3 * 2 + 6 * (3 - 1) * 3 * 2


def test_marks_are_standardised_by_judge(judges: Fakes) -> None:
    result = rate(comparison(), CONFIG, make_engine=judges)
    for judge in CONFIG.names:
        marks = [r.mark for r in result.ratings if r.judge == judge]
        assert sum(marks) == pytest.approx(0, abs=1e-9)
        assert sum(m * m for m in marks) / len(marks) == pytest.approx(1)


def test_uninformed_judges_are_reported_as_uninformative(judges: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JudgeLane, "blind", True)
    result = rate(comparison(), CONFIG, make_engine=judges)
    assert result.gap.mean == 0
    assert result.agreed == (0, 0), "equal marks say nothing of a pair"
    assert not result.gap.above


def test_agreement_with_references_by_chance_alone_is_reported(judges: Fakes) -> None:
    """The judges prefer the word "sea", and most references contradict them."""
    references = [GOOD if n % 4 == 1 else "an owl" for n in range(24)]
    result = rate(comparison(references), CONFIG, make_engine=judges)
    assert result.agreed[1] > 20
    assert "no better than chance, on these pairs" in result.point.text


def test_without_references_no_agreement_is_reported(judges: Fakes) -> None:
    result = rate(comparison(None), CONFIG, make_engine=judges)
    assert result.agreed == (0, 0)
    assert "references" not in result.point.text


def test_a_second_run_asks_nothing(judges: Fakes, tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"
    first = rate(comparison(), CONFIG, run=run, make_engine=judges)
    engines = len(judges.engines)
    assert rate(comparison(), CONFIG, run=run, make_engine=judges) == first
    assert len(judges.engines) == engines


def test_a_judge_that_fails_is_named_and_the_others_count(judges: Fakes) -> None:
    judges.disturb = lambda r: (
        Fault("RuntimeError", "out of order") if r.member == "two" and isinstance(r.op, Verify) else None
    )
    result = rate(comparison(), CONFIG, make_engine=judges)
    assert {r.judge for r in result.ratings} == {"one", "three"}
    assert result.failures == ("two could not rate everything: member 'two' could not judge the texts: out of order",)
    assert result.failures[0] in result.point.text


# ── what members think of given texts ────────────────────────────────────────────────────────────


def test_every_member_gives_the_log_probabilities_of_all_texts(tiny_engine: EnsembleEngine) -> None:
    texts = ["yes", "no, never", "4"]
    result = tiny_engine.log_probabilities("Is it so?", texts)
    assert list(result) == ["chat", "base"]
    for name, scores in result.items():
        alone = tiny_engine.log_probabilities("Is it so?", texts, members=[name])
        assert alone == {name: pytest.approx(scores, abs=1e-4)}
        assert scores == pytest.approx([_naive(tiny_engine, name, "Is it so?", text) for text in texts], abs=1e-3)
    add = {"type": "function", "function": {"name": "add", "parameters": {"properties": {}}}}
    offered = tiny_engine.log_probabilities("Is it so?", texts, tools=[add])
    none = tiny_engine.log_probabilities("Is it so?", texts, tools=[add], tool_choice="none")
    for name, scores in result.items():
        assert offered[name] != pytest.approx(scores, abs=1e-2), "the prompts of members contain the tools"
        assert none[name] == pytest.approx(scores, abs=1e-3)
    assert tiny_engine.metrics().running == 0


def _naive(engine: EnsembleEngine, name: str, question: str, text: str) -> float:
    """Computed by one forward pass of the model over the whole text."""
    member = next(m for m in engine._members if m.name == name)
    prompt, ids = member.encode_prompt([Message("user", question)], ()), member.codec.encode(text)
    local = next(each for each in local_members(engine) if each.name == name)
    logprobs = local.runner.plain([*prompt, *ids]).float().log_softmax(-1)
    return sum(float(logprobs[len(prompt) - 1 + n, token]) for n, token in enumerate(ids))


def test_judging_needs_answers(tiny_engine: EnsembleEngine) -> None:
    for texts in ([], [""], "text"):
        with pytest.raises(RequestError, match="list of texts"):
            tiny_engine.log_probabilities("Is it so?", texts)


def test_the_failure_of_all_members_is_reported() -> None:
    broken = Fakes(
        {"a": {}, "b": {}}, disturb=lambda r: None if isinstance(r.op, Close) else Fault("RuntimeError", "no")
    )
    with broken(EnsembleConfig(["a", "b"])) as engine:
        with pytest.raises(GenerationError, match="could not judge the texts: no"):
            engine.log_probabilities("Is it so?", MARKS)
        assert engine.metrics().running == 0
