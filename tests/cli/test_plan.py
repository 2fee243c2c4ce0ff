"""`specfuse-llm doctor --plan`: from config.json alone, for this machine or for described hardware."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specfuse_shared.cli.commands import main
from tests.support.shapes import SHAPES, write_shape


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("five")
    return [argument for name in SHAPES for argument in ("--member", str(write_shape(name, folder)))]


def test_the_plan_shows_members_and_devices(five: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--plan", "--devices", "80GB", "--quantization", "auto", *five]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = {line.split()[0]: " ".join(line.split()) for line in out.splitlines() if line.strip()}
    assert rows["llama-3-8b"].startswith("llama-3-8b cuda:0 8bit (bfloat16) 8.5 GiB 512 MiB ")
    assert rows["llama-3-8b"].endswith(" 10.0 GiB")
    assert rows["gemma-2-9b"].startswith("gemma-2-9b cuda:0 bfloat16 17.2 GiB 1.3 GiB ")
    assert rows["cuda:0"].startswith("cuda:0 74.5 GiB 74.")
    assert "space for 1 × 4,096 tokens" in out


def test_a_split_member_shows_its_parts(five: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--plan", "--devices", "4x24GB", *five]) == 0
    out = capsys.readouterr().out
    assert "mistral-7b  cuda:0 1.2 GiB" in out
    assert "            cuda:3 6.3 GiB" in out


def test_a_plan_that_does_not_fit_fails_with_one_line_of_advice(
    five: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--plan", "--devices", "24GB", "--quantization", "auto", *five]) == 1
    out, err = capsys.readouterr()
    assert out.count("no memory") == 2
    assert err.count("\n") == 1
    assert err.startswith("specfuse-llm: no device has enough memory for ")
    assert "mistral-7b (5.1 GiB)" in err
    assert "leaving out glm-4-9b, gemma-2-9b" in err


def test_more_answers_and_a_longer_context_need_more_memory(
    five: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    planned = []
    for options in ([], ["--answers", "8", "--context", "8192"]):
        assert main(["doctor", "--plan", "--json", "--devices", "5x48GB", *options, *five]) == 0
        planned.append(json.loads(capsys.readouterr().out))
    before, after = (plan["assignments"][0]["need"] for plan in planned)
    assert after["weights"] == before["weights"]
    assert after["caches"] == 16 * before["caches"]
    assert after["logits"] == 8 * before["logits"]
    assert planned[1]["workload"] == {
        "answers": 8,
        "context": 8192,
        "draft_tokens": planned[0]["workload"]["draft_tokens"],
    }


def test_json_is_the_whole_plan(five: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--plan", "--json", "--devices", "24GB", *five]) == 1
    out, err = capsys.readouterr()
    plan = json.loads(out)
    assert plan["fits"] is False
    assert plan["problem"] in err
    assert plan["advice"]
    assert [a["member"] for a in plan["assignments"] if a["memory"]] == ["gemma-2-9b"]
    assert plan["devices"][0]["planned"] == next(a["need"]["total"] for a in plan["assignments"] if a["memory"])


def test_without_devices_the_plan_is_for_this_machine(
    recite: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--plan", "--json", "--member", recite("planned", "Plain words.")]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["devices"][0]["kind"] == "cpu"
    assert plan["assignments"][0]["member"] == "planned"


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--devices", "four cards"], "4x24GB"),
        (["--quantization", "8bits"], "--quantization is '8bits': did you mean '8bit'?"),
        (["--answers", "0"], "at least 1 answer"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(
    options: list[str], hint: str, five: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--plan", *options, *five]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert hint in err


def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    assert main(["doctor", "--plan", "--member", str(tmp_path / "broken")]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "broken" in err
