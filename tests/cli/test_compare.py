"""`specfuse-llm compare` on real (reciting) models, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specfuse_shared import PlacementError
from specfuse_shared.cli.commands import main

SPEECH = "Every member recites one fixed speech, word by next: nothing here may ever repeat itself!"


@pytest.fixture
def folder(recite: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with two members and questions."""
    monkeypatch.chdir(tmp_path)
    members = [recite("first", SPEECH), recite("second", "Another answer entirely.", certainty=5.0)]
    text = "".join(f"[[ensembles.pair.members]]\nmodel = {json.dumps(model)}\n" for model in members)
    (tmp_path / "pair.toml").write_text(f"[ensembles.pair]\n{text}")
    rows = [{"question": f"Speak {n}", "reference": SPEECH} for n in range(21)]
    choice = {"question": "Which?", "choices": ["this", "that"], "answer": 0}
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, choice]))
    return tmp_path


def test_the_verdict_is_printed_and_all_files_are_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "--config", "pair.toml", "--questions", "q.jsonl"]
    assert main([*command, "--out", "report.html", "--vote", "vote.html", "--against", "second"]) == 0
    out, err = capsys.readouterr()
    assert "than the best member, first, on 22 questions" in " ".join(out.split())
    assert "Cost: " in out
    assert "Limits of this comparison:" in out
    assert "66/66 many at a time" in err
    assert "0/66 loading first" in err
    assert err.endswith("report: report.html\nvoting page: vote.html\nanswers: compare.jsonl\n")
    assert "Which answer is better?" in (folder / "vote.html").read_text("utf-8")
    html = (folder / "report.html").read_text("utf-8")
    assert "Content-Security-Policy" in html
    assert SPEECH in html
    size = (folder / "compare.jsonl").stat().st_size
    assert main([*command, "--json", "--votes", "vote.html"]) == 0
    out, err = capsys.readouterr()
    reported = json.loads(out)
    assert reported["questions"] == 22
    assert reported["columns"]["text: rougeL"]["means"]["first"] == pytest.approx(100)
    assert reported["votes"]["ours"] == 0
    assert "loading" not in err
    assert (folder / "compare.jsonl").stat().st_size == size


def test_options_reach_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "--config", "pair.toml#pair", "--questions", "q.jsonl", "--json", "--run", "other.jsonl"]
    assert main([*command, "--max-tokens", "3", "--timed", "0"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["costs"]["first"]["timed"] == 0
    assert reported["habits"]["first"]["words"] < 4
    assert (folder / "other.jsonl").exists()
    assert not (folder / "compare.jsonl").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--questions", "none.txt"], "none.txt cannot be read"),
        (["--questions", "pair.toml"], "has the ending '.toml'"),
        (["--out", "no/where.html"], "--out cannot be written to no/where.html"),
        (["--vote", "no/where.html"], "--vote cannot be written to no/where.html"),
        (["--vote", "q.jsonl"], "q.jsonl is not a voting page"),
        (["--votes", "none.html"], "none.html cannot be read"),
        (["--run", "q.jsonl"], "q.jsonl is not a run's file"),
        (["--against", "frist"], "did you mean 'first'?"),
        (["--judge", "people"], "--judge is 'people': use one of 'members'"),
        (["--tune", "q.jsonl"], "q.jsonl is no configuration file"),
        (["--tune", "no/where.toml"], "--tune cannot be written to no/where.toml"),
        (["--tune", "new.toml"], "tuning takes 40 questions with references or more"),
        (["--timed", "-1"], "timed must be 0 or more"),
        (
            ["--suggest", "--out", "report.html", "--equal-compute"],
            "asks no ensemble: leave --out, --equal-compute out",
        ),
        (["--most-samples", "4"], "belong to --equal-compute: add it"),
        (["--equal-compute", "--sample-temperature", "0"], "samples need a temperature above 0"),
        (["--config", "none.toml"], "none.toml cannot be read"),
        (["--config", "pair.toml#pari"], "did you mean 'pair'?"),
        (["--config", "pair.toml", "--member", "x"], "leave --member, --preset out"),
        (["--config", "pair.toml", "--preset", "fast"], "leave --member, --preset out"),
    ],
)
def test_mistakes_are_named_before_any_model_is_loaded(
    folder: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = [] if "--config" in argv else ["--config", "pair.toml"]
    request = [] if "--questions" in argv else ["--questions", "q.jsonl"]
    assert main(["compare", *config, *request, *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "loading" not in err


def test_the_best_member_is_sampled_with_the_compute_of_the_ensemble(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", "--config", "pair.toml", "--questions", "q.jsonl", "--equal-compute", "--most-samples", "3"]
    assert main([*command, "--timed", "2", "--out", "report.html"]) == 0
    out, err = capsys.readouterr()
    text = " ".join(out.split())
    assert "the best member, first, asked once, on 22 questions" in text
    assert "Equal compute: no difference is seen: the ensemble has +" in text
    assert "(at most 3 are asked)" in text
    assert "Equal seconds: " in text
    assert "2 samples together" in err
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    ours, theirs = rows["forward"][3], rows["forward"][4]
    assert int(theirs) > int(rows["forward"][1]) > 0
    assert int(ours) > 0
    assert rows["compute"][1::2] == ["MFLOP"] * (len(rows["compute"]) // 2)
    html = (folder / "report.html").read_text("utf-8")
    assert "3 samples (equal compute" in html
    size = (folder / "compare.jsonl").stat().st_size
    assert main([*command, "--timed", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    reported = json.loads(out)
    assert reported["equal"]["samples"]["compute"] == {"text": 3, "choice": 3}
    assert reported["equal"]["differences"]["compute"]["all"]["rows"] == 22
    assert reported["costs"]["the ensemble"]["flop"] > reported["costs"]["first"]["flop"] > 0
    assert "loading" not in err
    assert (folder / "compare.jsonl").stat().st_size == size


def test_members_are_suggested_without_an_ensemble(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "--config", "pair.toml", "--questions", "q.jsonl", "--timed", "0"]
    assert main([*command, "--suggest"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Use first alone: for the most promising ensemble, first + second, -")
    assert "Too far apart: first + second: members are " in out
    assert "Limits of this comparison:" in out
    assert "44/44 many at a time" in err
    assert "loading first, second" not in err
    assert main([*command, "--suggest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == "first"
    assert main(command) == 0
    assert "44/66 many at a time" in capsys.readouterr().err, "the members' own answers are stored"


@pytest.mark.slow
def test_members_rate_and_weights_are_tuned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"Speak {n}", "reference": SPEECH} for n in range(40)]
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["compare", "--config", "pair.toml", "--questions", "q.jsonl", "--timed", "0"]
    assert main([*command, "--judge", "members", "--tune", "tuned.toml#best"]) == 0
    out, err = capsys.readouterr()
    assert "Rated by members: " in out
    assert "smaller: first, second" in " ".join(out.split())
    assert "settings is better than the current ones" in out
    assert "members rate answers" in err
    assert not (folder / "tuned.toml").exists(), "nothing is gained, so nothing is written"


@pytest.mark.slow
def test_a_gain_is_written_and_read_by_ask(
    folder: Path, recite: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two equally certain members, the one that is right gets the larger weight."""
    right = recite("right", "Another answer entirely.", certainty=7.0)
    rows = [{"question": f"Speak {n}", "reference": "Another answer entirely."} for n in range(40)]
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["compare", "--member", recite("first", SPEECH), "--member", right, "--questions", "q.jsonl"]
    assert main([*command, "--timed", "0", "--tune", "tuned.toml#best"]) == 0
    out, err = capsys.readouterr()
    assert "Tuned: weight 8 for right gives +100.0 [+100.0, +100.0] points on the 20 questions" in out
    assert "ensemble: tuned.toml [ensembles.best]" in err
    assert "points on the 20 questions that did not choose it" in (folder / "tuned.toml").read_text()
    assert main(["ask", "Speak", "--config", "tuned.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "Another answer entirely."


def test_later_errors_are_reported_after_the_verdict(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*args: object, **settings: object) -> None:
        raise PlacementError("no device has enough memory")

    monkeypatch.setattr("specfuse_shared.comparing.rate", no_room)
    command = ["compare", "--config", "pair.toml", "--questions", "q.jsonl", "--timed", "0", "--judge", "members"]
    assert main([*command, "--out", "report.html"]) == 1
    out, err = capsys.readouterr()
    assert "than the best member, first, on 22 questions" in " ".join(out.split())
    assert err.endswith("report: report.html\nspecfuse-llm: no device has enough memory\n")


def test_a_single_member_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--member", "x", "--questions", "q.jsonl"]) == 2
    assert "two members or more" in capsys.readouterr().err


def test_rows_left_out_of_a_file_are_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / "q.jsonl").open("a") as file:
        file.write('{"question": ""}\n')
    assert main(["compare", "--config", "pair.toml", "--questions", "q.jsonl", "--timed", "0"]) == 0
    assert "line 23 is left out: the question is empty" in capsys.readouterr().out


def test_ask_takes_a_file_of_an_ensemble(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "Speak", "--config", "pair.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["members"] == ["first", "second"]
    assert main(["ask", "Speak", "--config", "pair.toml", "--exit", "never"]) == 2
    assert "leave --member, --preset, --exit out" in capsys.readouterr().err
