"""The best member with the compute, or the seconds, of the ensemble: its number of samples, and the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specfuse_shared import ConfigError, EnsembleEngine
from specfuse_shared.comparing import ENSEMBLE, Comparison, Question, Sampling, compare
from specfuse_shared.comparing.run.run_file import RunFile
from specfuse_shared.comparing.run.sampling import Sampler, Wanted
from specfuse_shared.members.stages import Close, Draft, DraftAlone, Fault, StageRequest
from tests.comparing.comparisons import answer
from tests.comparing.fakes import Fakes, Script

ROWS = [{"text": f"question {n}", "references": ["the sea"]} for n in range(30)]
SCRIPT: Script = {
    "first": {f"question {n}": "the sea ." if n % 3 else "a bird ." for n in range(30)},
    "second": {"": "a bird ."},
}
SIZES = {"first": 1000, "second": 1000}
RIGHT = ("the sea .", "the sea .", "a bird .")
COLUMN = "first, 3 samples (equal compute)"


def fakes(**changes: object) -> Fakes:
    return Fakes(**{"script": SCRIPT, "sizes": SIZES, "samples": {"first": RIGHT}, **changes})


def compared(made: Fakes, rows: list[dict[str, object]] = ROWS, timed: int = 0, **how: object) -> Comparison:  # type: ignore[assignment]
    return compare(["first", "second"], rows, make_engine=made, timed=timed, **{"equal_compute": True, **how})


def section_of(comparison: Comparison, title: str) -> str:
    return next((point.text for point in comparison.verdict.points if point.title == title), "")


def test_the_number_of_samples_follows_from_the_counted_work() -> None:
    """Two members of equal size: prompts of 2 words; the fake counts 2 words an answer, and none for
    verifications. (2 · (2 + 2) − 2) ÷ 2 = 3."""
    made = fakes()
    result = compared(made)
    assert result.equal is not None
    assert result.equal.paid == {"short": pytest.approx(3.0)}
    assert result.equal.samples["compute"] == {"short": 3}
    assert result.equal.columns == {"compute": COLUMN, "ceiling": "first, best of 3 samples (ceiling)"}
    assert made.sampled == 2 * 3 * 30, "each is read twice: to answer, and for its log p"
    assert result.columns["all"].means["first"] == pytest.approx(100 * 2 / 3)
    assert result.columns["all"].means[COLUMN] == 100, "two of three samples are right, so their vote is"
    assert result.costs[COLUMN].flop == result.costs[ENSEMBLE].flop == 2 * 1000 * 8


def test_a_larger_member_gets_fewer_samples_and_a_smaller_one_more() -> None:
    large = compared(fakes(sizes={"first": 1000, "second": 100})).equal
    small = compared(fakes(sizes={"first": 1000, "second": 4000})).equal
    assert large is not None
    assert small is not None
    assert large.paid["short"] == pytest.approx((1000 * 4 + 100 * 4 - 1000 * 2) / 2000)
    assert large.samples["compute"] == {"short": 2}, "rounded up, which favours the member"
    assert small.samples["compute"] == {"short": 9}


def test_a_single_sample_is_the_greedy_answer() -> None:
    made = fakes()
    result = compared(made, equal_compute=Sampling(most=1), timed=1)
    assert made.sampled == 0
    name = "first, 1 sample (equal compute and seconds)"
    assert {q: a.text for q, a in result.answers[name].items()} == {
        q: a.text for q, a in result.answers["first"].items()
    }
    assert "ceiling" not in result.equal.columns
    assert "allows: 3.0 (at most 1 are asked)" in section_of(result, "Equal compute")


def test_the_verdict_has_all_three_sentences_with_intervals() -> None:
    result = compared(fakes(), timed=2)
    assert "points more than the best member, first, asked once, on 30 questions" in result.verdict.headline
    compute, seconds = section_of(result, "Equal compute"), section_of(result, "Equal seconds")
    assert compute.startswith("worse: the ensemble has -"), compute
    assert "points more than first, 3 samples; samples that its compute allows: 3.0;" in compute
    assert "the ensemble has " in seconds
    assert "(medians of 2)" in seconds
    assert "chosen by references" in section_of(result, "Ceiling")
    assert any("one temperature (0.7)" in limit for limit in result.verdict.limits)
    plain = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert plain["equal"]["differences"]["compute"]["all"]["rows"] == 30
    assert plain["equal"]["differences"]["compute"]["all"]["high"] < 0
    html = result.to_html()
    assert COLUMN.removesuffix("s (equal compute)") in html
    assert "compute</th>" in html


def test_without_the_option_nothing_is_sampled_or_reported() -> None:
    made = fakes()
    result = compared(made, equal_compute=False)
    assert result.equal is None
    assert made.sampled == 0
    assert "asked once" not in result.verdict.headline
    assert not section_of(result, "Equal compute")
    assert result.to_dict()["equal"] is None


def stored_samples(run: Path) -> int:
    """Samples in the file of a run; none may be there twice."""
    records = [json.loads(line) for line in run.read_text("utf-8").splitlines()]
    keys = [record["key"] for record in records if "sample_of" in record]
    assert len(set(keys)) == len(keys)
    return len(keys)


# ── resume ───────────────────────────────────────────────────────────────────────────────────────


def test_a_second_run_asks_nothing_and_other_settings_ask_only_missing_samples(tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"
    first = compared(fakes(), run=run, timed=2)
    assert 3 * 30 <= stored_samples(run) <= 32 * 30, "three for the compute; how many for the seconds was measured"
    again = fakes()
    assert compared(again, run=run, timed=2).to_dict() == first.to_dict()
    assert not again.engines
    fewer = fakes()
    compared(fewer, run=run, equal_compute=Sampling(most=2))
    assert fewer.sampled == 0
    before = stored_samples(run)
    compared(fakes(), run=run, equal_compute=Sampling(temperature=1.0, most=2))
    assert stored_samples(run) == before + 2 * 30
    compared(fakes(), run=run, max_tokens=7, equal_compute=Sampling(most=2))
    assert stored_samples(run) == before + 4 * 30


def test_more_rows_and_a_costlier_ensemble_ask_only_further_samples(tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"
    compared(fakes(), ROWS[:20], run=run, equal_compute=Sampling(most=2))
    assert stored_samples(run) == 2 * 20
    compared(fakes(), ROWS[:20], run=run)
    assert stored_samples(run) == 3 * 20
    compared(fakes(), run=run)
    assert stored_samples(run) == 3 * 30


def test_the_work_of_stored_answers_without_counts_is_not_estimated(tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"
    compared(fakes(), run=run, equal_compute=False)
    old = [json.loads(line) for line in run.read_text("utf-8").splitlines()]
    run.write_text("".join(json.dumps({k: v for k, v in each.items() if k != "work"}) + "\n" for each in old))
    result = compared(fakes(), run=run)
    assert "without counting compute" in section_of(result, "Equal compute")


# ── edges ────────────────────────────────────────────────────────────────────────────────────────


def test_without_references_no_sample_is_drawn_and_the_reason_is_reported() -> None:
    made = fakes()
    result = compared(made, [{"text": f"question {n}"} for n in range(3)])
    assert made.sampled == 0
    assert section_of(result, "Equal compute").startswith("unknown: no question has references")
    assert section_of(result, "Equal seconds").startswith("unknown: no question has references")


def test_questions_without_references_are_not_sampled() -> None:
    made = fakes()
    rows = [*ROWS, {"text": "write more about the sea"}]
    result = compared(made, rows)
    assert made.sampled == 2 * 3 * 30
    assert len(result.answers[COLUMN]) == 30
    assert len(result.answers["first"]) == 31
    assert "write more about the sea" in result.to_html()


def test_unknown_sizes_are_named_and_seconds_are_still_reported() -> None:
    result = compared(fakes(sizes={"first": 1000}), timed=2)
    assert section_of(result, "Equal compute") == "unknown: the number of parameters of second is unknown."
    assert "the ensemble has" in section_of(result, "Equal seconds")


def test_without_timed_answers_equal_seconds_are_not_reported() -> None:
    assert "--timed" in section_of(compared(fakes()), "Equal seconds")


def test_a_member_that_fails_while_it_is_sampled_loses_its_columns_and_nothing_else(tmp_path: Path) -> None:
    run, failing = tmp_path / "run.jsonl", set[int]()

    def disturb(request: StageRequest) -> Fault | None:
        op = request.op
        if not isinstance(op, Close) and not getattr(getattr(op, "params", None), "greedy", True):
            failing.add(request.answer)
        drafts = isinstance(op, (Draft, DraftAlone)) and request.answer in failing
        return Fault("RuntimeError", "out of order") if drafts and request.answer % 2 else None

    result = compared(fakes(disturb=disturb), run=run)
    assert len(result.questions) == 30
    reason = section_of(result, "Equal compute")
    assert reason.startswith("unknown: ")
    assert "of 90 samples failed (first: " in reason
    assert "out of order" in reason
    well = fakes()
    assert compared(well, run=run).equal.columns["compute"] == COLUMN
    assert 0 < well.sampled < 2 * 3 * 30, "only what failed is asked again"


def test_the_only_remaining_member_is_sampled() -> None:
    def disturb(request: StageRequest) -> Fault | None:
        drafts = request.member == "second" and isinstance(request.op, (Draft, DraftAlone))
        return Fault("RuntimeError", "out of order") if drafts else None

    result = compared(fakes(disturb=disturb))
    assert result.members == ("first",)
    assert result.equal is not None
    assert result.equal.members == {"short": "first"}
    assert result.equal.samples["compute"]["short"] >= 1


def test_each_kind_with_enough_questions_samples_its_best_member() -> None:
    counts = [Question(f"count {n}", references=["7"]) for n in range(20)]
    rows = [*ROWS, *({"text": each.text, "references": each.references} for each in counts)]
    rows += [{"text": f"name {n}", "references": ["a bird"], "group": "few"} for n in range(3)]
    script = {
        "first": {**{str(row["text"]): "the sea ." for row in ROWS}, **{each.prompt: "8 ." for each in counts}},
        "second": {"": "a bird .", **{each.prompt: "7 ." for each in counts}},
    }
    result = compared(fakes(script=script, samples={}), rows)
    assert result.equal is not None
    assert result.equal.members == {"short": "first", "number": "second", "few": "first"}
    assert result.equal.columns["compute"].startswith("best of each kind, ")
    assert "; short (30, F1) " in section_of(result, "Equal compute")
    assert "few (3" not in section_of(result, "Equal compute")


def test_temperature_zero_and_zero_samples_are_refused_before_any_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="samples need a temperature above 0"):
        Sampling(temperature=0)
    with pytest.raises(ConfigError, match="must be at least 1"):
        Sampling(most=0)
    made = fakes()
    with pytest.raises(ConfigError, match="equal_compute must be True, False or a Sampling, not 4"):
        compared(made, equal_compute=4)
    assert not made.engines


def test_samples_do_not_count_as_a_member() -> None:
    """They are neither left out nor the best member."""
    result = compared(fakes())
    assert result.members == ("first", "second")
    assert result.columns["all"].best == "first"
    assert COLUMN not in section_of(result, "Which to drop")
    assert COLUMN not in section_of(result, "Repetition")


def test_the_work_of_samples_counts_the_prompt_once() -> None:
    result = compared(fakes())
    sample = next(iter(result.answers[COLUMN].values()))
    assert sample.work == (("first", 2, 6),)
    assert replace(answer("x"), work=sample.work).work == sample.work


def test_samples_of_a_real_member_depend_only_on_their_seeds(tiny_engine: EnsembleEngine) -> None:
    """Requests run concurrently, or one by one."""
    config = tiny_engine.config
    member = config.only([config.names[0]])
    question = Question("What does the log say of the moon?", references=["the moon is full"], max_tokens=6)
    expected = Wanted(member, question, 5)
    with RunFile(None) as run:
        sampler = Sampler(run, Sampling(temperature=0.9))
        sampler.ask([expected, Wanted(member, Question("And the sea?", references=["no"]), 3)])
        together = sampler.samples(expected)
    params = replace(question.params(), temperature=0.9)
    alone = [
        tiny_engine.generate(question.prompt, replace(params, seed=seed), members=list(member.names))
        for seed in range(1, 6)
    ]
    assert [sample.text for sample in together] == [result.text for result in alone]
    assert len({sample.text for sample in together}) > 1
    for sample, result in zip(together, alone, strict=True):
        usage = result.usage.members[member.names[0]]
        assert sample.work == ((member.names[0], usage.prompt, usage.fed),)
        assert sample.logprob is None or sample.logprob < 0
