"""`specfuse-llm ask` on real (reciting) models, in this process."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specfuse_shared.cli.commands import main

SPEECH = "Every member recites one fixed speech, word by next: nothing here may ever repeat itself!"


@pytest.fixture
def members(recite: Callable[..., str]) -> list[str]:
    models = [recite("first", SPEECH), recite("second", "Another answer entirely.", certainty=5.0)]
    return [argument for model in models for argument in ("--member", model)]


def test_stdout_has_only_the_answer_and_stderr_the_rest(members: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "Speak", *members]) == 0
    out, err = capsys.readouterr()
    assert out == SPEECH + "\n"
    assert err.startswith("● first  ● second\n")
    assert "tokens/s" in err
    assert "finished: stop" in err


def test_json_is_one_valid_line_and_its_text_equals_the_joined_segments(
    members: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", "Speak", "--json", *members]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    result = json.loads(out)
    assert result["text"] == "".join(record["text"] for record in result["rounds"]) == SPEECH
    assert result["finish_reason"] == "stop"
    assert result["members"] == ["first", "second"]
    assert result["usage"]["total_tokens"] == result["usage"]["prompt_tokens"] + result["usage"]["completion_tokens"]


def test_explain_adds_every_round(members: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "Speak", "--explain", "--segment-tokens", "4", "--exit", "never", *members]) == 0
    answer, *rounds = capsys.readouterr().out.split("\nround ")
    assert answer.startswith(SPEECH + "\n\nA score is the probability that a member gives a draft")
    assert [r.partition(" ")[0] for r in rounds] == [str(i) for i in range(1, len(rounds) + 1)]
    assert all("→  first" in r and "weights: first" in r for r in rounds)
    assert '"Another answer entirely."' in rounds[0] or '"Another answer' in rounds[0]
    _, _, table = rounds[-1].partition("where members differ")
    assert "second “Another answer" in table


def test_a_report_is_written_and_named_on_stderr(
    members: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.html"
    assert main(["ask", "Speak <b>now</b>", "--report", str(file), "--exit", "never", *members]) == 0
    out, err = capsys.readouterr()
    assert out == SPEECH + "\n"
    assert f"report: {file}\n" in err
    html = file.read_text("utf-8")
    assert '<h1 dir="auto">Speak &lt;b&gt;now&lt;/b&gt;</h1>' in html
    assert all(word in html for word in SPEECH.split())
    assert "Another answer" in html


def test_a_report_does_not_disturb_json_and_replaces_an_older_one(
    members: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.html"
    file.write_text("an older report" * 9999)
    assert main(["ask", "Speak", "--json", "--report", str(file), *members]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["text"] == SPEECH
    assert err == f"report: {file}\n"
    assert "an older report" not in file.read_text("utf-8")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_report_that_cannot_be_written_after_all_ends_with_exit_code_1(
    members: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", "Speak", "--json", "--report", "/dev/full", *members]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["text"] == SPEECH
    assert err == "specfuse-llm: the report was not written to /dev/full: No space left on device\n"


def test_options_reach_the_engine(members: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-tokens", "6", "--stop", "recites", "--segment-tokens", "2", "--feedback", "constant"]
    assert main(["ask", "Speak", "--json", "--system", "Be brief", *options, *members]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == "Every member "
    assert result["stop_sequence"] == "recites"


def test_a_sampled_answer_is_repeatable_by_its_seed(members: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        assert (
            main(["ask", "Speak", "--json", "--temperature", "3", "--max-tokens", "16", "--seed", "7", *members]) == 0
        )
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]


def test_a_dash_reads_the_question_from_standard_input(
    members: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Sprich, bitte schön".encode())))
    assert main(["ask", "-", *members]) == 0
    assert capsys.readouterr().out == SPEECH + "\n"


@pytest.mark.parametrize(("typed", "message"), [(b"\xff\xfe", "not UTF-8"), (b" \n", "empty")])
def test_a_question_that_is_no_text_is_refused(
    typed: bytes, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
    assert main(["ask", "-", "--member", "unused"]) == 2
    assert message in capsys.readouterr().err


def test_a_member_that_cannot_load_is_named_in_one_line_with_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", "hi", "--member", str(tmp_path / "missing")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "missing" in err


def test_a_prompt_that_is_too_long_gets_exit_code_2(members: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "much " * 3000, *members]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "shorten the prompt" in err


def test_verbose_describes_the_members_on_stderr(members: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "Speak", "--verbose", *members]) == 0
    out, err = capsys.readouterr()
    assert out == SPEECH + "\n"
    assert "first: LlamaForCausalLM" in err


def test_doctor_reports_members_versions_and_devices(members: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", *members]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["versions"]) == {"llama-cpp-python", "python", "torch", "transformers"}
    assert report["devices"][0]["name"] == "cpu"
    assert [m["name"] for m in report["members"]] == ["first", "second"]
    assert report["members"][0]["architecture"] == "LlamaForCausalLM"
    assert report["problems"] == []


def test_doctor_shows_a_column_for_each_member(members: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *members]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.split() for line in out.splitlines() if line.split() == ["first", "second"]]
    for row in ("architecture", "dtype", "memory", "context", "template", "verification", "probe error", "load"):
        assert f"\n{row} " in out


def test_doctor_separates_good_members_from_bad_ones(
    members: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    assert main(["doctor", "--json", *members, "--member", str(broken)]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert [m["name"] for m in report["members"]] == ["first", "second"]
    assert len(report["problems"]) == 1
    assert "broken" in report["problems"][0]
    assert err.count("\n") == 1
    assert "broken" in err


def test_the_demo_on_llama_cpp_reports_that_its_adapters_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    from specfuse_shared.cli.setup import ensemble_of

    config = ensemble_of(None, {"backend": "llama.cpp"})
    assert [(member.backend, member.adapter) for member in config.member_configs] == [("llama.cpp", None)] * 2
    assert "without its adapters" in capsys.readouterr().err
    assert all(member.adapter for member in ensemble_of(None, {}).member_configs)
    assert capsys.readouterr().err == ""
