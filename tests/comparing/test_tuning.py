"""Weights are chosen on half of the questions, confirmed on the other half, and written if they gain."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from specfuse_shared import ConfigError, EnsembleConfig, MemberConfig
from specfuse_shared.comparing import ENSEMBLE, Question, Tuned, tune, write_ensemble
from specfuse_shared.comparing.intervals import Interval
from specfuse_shared.comparing.tuning import check_config_file, halves
from specfuse_shared.loading.config_files import read_ensemble
from tests.comparing.fakes import Fakes, Script

ROWS = [{"text": f"question {n}", "references": [f"word{n} sea"]} for n in range(60)]


def script(**right: range) -> Script:
    """A script of members with some right and some wrong answers."""
    return {
        name: {f"question {n}": f"word{n} sea ." if n in questions else f"{name} errs ." for n in range(60)}
        for name, questions in right.items()
    }


def test_the_halves_have_equal_groups_and_share_no_passage() -> None:
    rows = [Question(f"q{n}", f"a{n}", ["x"], passage=f"passage {n // 3}") for n in range(12)]
    rows += [Question(f"p{n}", f"b{n}", ["1"]) for n in range(8)]
    first, second = halves(rows)
    assert len(first) == len(second) == 10
    assert not {q.passage for q in first if q.passage} & {q.passage for q in second if q.passage}
    assert sum(q.kind == "number" for q in first) == 4
    assert not {q.id for q in first} & {q.id for q in second}


def test_many_small_groups_are_halved_together() -> None:
    first, second = halves([Question(f"q{n}", references=["x"], group=str(n)) for n in range(60)])
    assert len(first) == len(second) == 30


def test_the_weight_of_a_worse_member_falls_and_the_other_half_confirms_it() -> None:
    """The worse one is first, so that it wins with equal weights."""
    fakes = Fakes(script(worse=range(0), better=range(60)), likes=True)
    result = tune(["worse", "better"], ROWS, make_engine=fakes)
    weights = {m.label: m.weight for m in result.config.member_configs}
    assert weights["better"] > weights["worse"]
    assert result.change == "weight 2 for better"
    assert result.gained
    assert result.gain == Interval(100.0, 100.0, 100.0, 30, 0.0)
    assert result.best == "better"
    assert result.to_best.mean == 0.0
    assert "gives +100.0 [+100.0, +100.0] points on the 30 questions that did not choose it" in result.point.text


@pytest.mark.parametrize(("larger", "change"), [(8, "equal votes"), (2, "equal votes"), (0.5, "")])
def test_a_small_member_that_knows_more_gets_an_equal_vote(larger: float, change: str) -> None:
    sizes = {"better": 1000, "worse": int(1000 * larger)}
    fakes = Fakes(script(better=range(60), worse=range(0)), likes=True, sizes=sizes)
    result = tune(["better", "worse"], ROWS, make_engine=fakes)
    assert result.change == change
    assert result.gained == bool(change)
    assert result.config.first_weights == ("equal" if change else "size")


def test_weights_stay_unless_others_are_better() -> None:
    result = tune(["one", "two"], ROWS, make_engine=Fakes(script(one=range(60), two=range(60)), likes=True))
    assert result.change == ""
    assert not result.gained
    assert "settings is better than the current ones" in result.point.text
    assert result.config == EnsembleConfig(["one", "two"])


def test_a_gain_on_one_half_only_is_not_reported_as_a_gain() -> None:
    choosing, _ = halves([Question(**row) for row in numbered_rows()])
    chosen = {int(q.text.split()[1]) for q in choosing}
    members = {
        "first": {f"question {n}": "first errs ." for n in range(60)},
        "second": {f"question {n}": f"word{n} sea ." if n in chosen else "second errs ." for n in range(60)},
    }
    result = tune(["first", "second"], ROWS, make_engine=Fakes(members, likes=True))
    assert result.change
    assert result.chosen.above
    assert not result.gained
    assert "no gain is shown" in result.point.text


def numbered_rows() -> list[dict[str, object]]:
    return [{**row, "id": str(n)} for n, row in enumerate(ROWS, 1)]


def test_a_second_run_asks_nothing(tmp_path: Path) -> None:
    members, run = script(worse=range(0), better=range(60)), tmp_path / "run.jsonl"
    first = tune(["worse", "better"], ROWS, run=run, make_engine=Fakes(members, likes=True))
    fakes = Fakes(members, likes=True)
    assert tune(["worse", "better"], ROWS, run=run, make_engine=fakes) == first
    assert not fakes.engines


def test_too_few_questions_are_refused_before_any_request() -> None:
    fakes = Fakes(script(one=range(9), two=range(9)))
    with pytest.raises(ConfigError, match=r"tuning takes 40 questions with references or more.*there are 39"):
        tune(["one", "two"], ROWS[:39], make_engine=fakes)
    with pytest.raises(ConfigError, match=r"EnsembleConfig\.score is an object, which a file cannot contain"):
        tune(EnsembleConfig(["one", "two"], score=lambda *a: 0.0), ROWS, make_engine=fakes)
    assert not fakes.engines


CONFIG = EnsembleConfig(
    [
        MemberConfig("org/one", weight=4.0, template_options={"style": "brief"}, stop_token_ids=(3,)),
        MemberConfig("org/two", name='the "second"', dtype="float32", thinking=("<t>", "</t>")),
        MemberConfig("org/three", server="http://127.0.0.1:8000/v1", api_key_env="KEY"),
    ],
    segment_tokens=7,
    first_segment_tokens=9,
    exit="entropy",
)


def test_a_written_ensemble_reads_back_and_the_rest_of_the_file_stays(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    text = '# ours\n[server]\nport = 9000 # a port\n\n[ensembles.demo]\nmembers = ["org/x"]\n'
    file.write_text(text)
    write_ensemble(file, "best of all", CONFIG, ["Yes: it is\nbetter", "second"])
    written = file.read_text("utf-8")
    assert written.startswith(text)
    assert "# Yes: it is better\n# second\n" in written
    assert read_ensemble(f"{file}#best of all") == CONFIG
    assert read_ensemble(f"{file}#demo").names == ("x",)
    write_ensemble(file, "best of all", EnsembleConfig(["org/y"], first_segment_tokens=None))
    assert read_ensemble(f"{file}#best of all").names == ("y",)
    assert tomllib.loads(file.read_text())["ensembles"]["best of all"]["first_segment_tokens"] == 5
    assert file.read_text().startswith(text)


def test_a_new_file_contains_only_the_ensemble(tmp_path: Path) -> None:
    write_ensemble(tmp_path / "new.toml", "tuned", CONFIG)
    assert read_ensemble(tmp_path / "new.toml") == CONFIG
    assert [f.name for f in tmp_path.iterdir()] == ["new.toml"]


@pytest.mark.parametrize("text", ["x = 1\n", "[tool.poetry]\nname = 1\n", "no toml"])
def test_a_file_with_other_content_is_not_changed(tmp_path: Path, text: str) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is no configuration file"):
        write_ensemble(file, "tuned", CONFIG)
    assert file.read_text() == text


def test_the_verdict_names_the_rows_of_its_claim() -> None:
    gain = Interval(2.0, -1.0, 5.0, 30)
    text = Tuned(CONFIG, "weight 2 for a", 5, Interval(9.0, 4.0, 14.0, 30), gain, "a", gain).point.text
    assert text == (
        "weight 2 for a gives +2.0 [-1.0, +5.0] points on the 30 questions that did not choose it (+9.0 on the 30 that "
        "did, of 5 settings tried): no gain is shown; to a alone +2.0 [-1.0, +5.0]."
    )
    assert ENSEMBLE not in text


@pytest.mark.parametrize("preset", ["default", "fast", "specfuse", "specem"])
def test_every_preset_can_be_written_and_reads_back(tmp_path: Path, preset: str) -> None:
    config = EnsembleConfig.preset(preset, ["org/x", "org/y"])
    write_ensemble(tmp_path / "new.toml", "tuned", config)
    assert read_ensemble(tmp_path / "new.toml").feedback_limit == config.feedback_limit


def test_a_file_with_inline_ensembles_is_refused_before_any_request(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text('ensembles = {a = {members = ["org/x"]}}\n', "utf-8")
    with pytest.raises(ConfigError, match=r"an inline table: write a table \[ensembles\.NAME\]"):
        check_config_file(file)
