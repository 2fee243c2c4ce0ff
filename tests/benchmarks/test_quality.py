"""The quality benchmark's rows, variants, intervals and tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import applications
import numpy as np
import pytest
import quality
import quality_rows
import variants
from numpy.typing import NDArray
from typer import BadParameter
from typer.testing import CliRunner
from variants import BARS, PUBLISHED, SMOL, VARIANTS

from specfuse_shared import EnsembleConfig
from specfuse_shared.comparing import Answer
from specfuse_shared.comparing.intervals import difference
from specfuse_shared.comparing.run.run_file import RunFile


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of two sets, and a folder for answers."""
    monkeypatch.setattr(quality_rows, "FOLDER", tmp_path / "answers")
    open_rows = [
        {"id": str(n), "task": "open", "prompt": f"{n}?", "references": ["the sea", "the sea at ebb"]} for n in range(5)
    ]
    passages = [
        {"id": str(n), "task": "rag", "prompt": f"{n}?", "context": "It is red.", "references": ["red"]}
        for n in range(5)
    ]
    for name, rows in (("open", open_rows), ("rag_en", passages)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def answered(data: Path) -> Callable[[str, dict[str, str]], None]:
    """Store a variant's answers: one text for each set."""

    def store(name: str, texts: dict[str, str]) -> None:
        quality_rows.answers_file(name).parent.mkdir(exist_ok=True)
        with RunFile(quality_rows.answers_file(name)) as file:
            for row in quality_rows.read_rows(data, texts, "all"):
                made = Answer(texts[row.group], "stop", tokens=3, rounds=2, active=2.0, forwards=5)
                file.add_answer(row.id, made, name, row.id)

    return store


def encode(texts: list[str]) -> NDArray[np.float32]:
    """Texts about the sea, and others."""
    return np.array([[1.0, 0.0] if "sea" in text else [0.0, 1.0] for text in texts], dtype=np.float32)


def test_the_halves_divide_the_rows(data: Path) -> None:
    chosen, confirmed, whole = (
        [row.id for row in quality_rows.read_rows(data, ["open"], half)] for half in ("choose", "confirm", "all")
    )
    assert (chosen, confirmed) == (["open/0", "open/2", "open/4"], ["open/1", "open/3"])
    assert len(whole) == 5
    assert quality_rows.read_rows(data, ["open"], "all", 2, 400)[1].max_tokens == 400
    with pytest.raises(BadParameter, match="choose, confirm or all"):
        quality_rows.read_rows(data, ["open"], "neither")
    with pytest.raises(BadParameter, match="no task 'opne'"):
        quality_rows.read_rows(data, ["opne"], "all")


def test_a_passage_is_asked_in_two_ways_with_separate_answers(data: Path) -> None:
    few, sentence = (quality_rows.read_rows(data, [task], "all", 1)[0] for task in ("rag", "rag-sentence"))
    assert (few.id, sentence.id) == ("rag/0", "rag-sentence/0")
    assert few.prompt == "Answer the question with a few words.\n\nIt is red.\n\n0?"
    assert sentence.prompt == "Read the passage, then reply to the question with one full sentence.\n\nIt is red.\n\n0?"


def test_a_table_compares_every_column_with_its_best_member(
    data: Path, answered: Callable[[str, dict[str, str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    answered(BARS[0], {"open": "the sea", "rag": "blue"})
    answered(BARS[1], {"open": "no", "rag": "It is red, I think, or so"})
    answered(BARS[2], {"open": "no idea", "rag": "green"})
    answered("default", {"open": "the sea " * 8, "rag": "red"})
    request = quality_rows.read_rows(data, ["open", "rag"], "all")
    whole: dict[str, Any] = {name: quality.measured(name, request, encode) for name in (*BARS, "default")}
    rivals = quality.rivals_of(whole, "best")
    best = {"open: rougeL": BARS[0], "open: cosine": BARS[0], "rag: f1": BARS[1], "rag: contains": BARS[1]}
    assert rivals == {column: dict.fromkeys(whole, rival) for column, rival in best.items()}
    assert set(quality.rivals_of(whole, "default")["rag: f1"].values()) == {"default"}
    assert {c: whole["default"]["columns"][c]["mean"] for c in ("open: cosine", "rag: f1", "rag: contains")} == {
        "open: cosine": 100.0,
        "rag: f1": 100.0,
        "rag: contains": 100.0,
    }
    assert whole[BARS[1]]["columns"]["rag: contains"]["mean"] == 100.0
    assert whole[BARS[1]]["columns"]["open: cosine"]["mean"] == 0.0
    assert whole["default"]["sets"]["open"]["loops"] == 100.0
    for facts in whole.values():
        for column, rival in best.items():
            rival_scores = whole[rival]["columns"][column]["each"]
            facts["columns"][column]["difference"] = difference(facts["columns"][column]["each"], rival_scores)
    quality.show(whole, rivals, "title", plain=True)
    head, _, *lines = capsys.readouterr().out.strip().splitlines()
    cells = dict(zip(head.split(" | "), lines[-1].split(" | "), strict=True))
    assert cells["words"] == "16, 1"
    assert cells["words ÷ members'"] == f"{16 / 1.5:.2f}, {1 / 4:.2f}"
    assert cells["loops %"] == "100, 0"
    assert quality.measured("specfuse", request, encode) is None, "nothing is answered yet"


def test_an_interrupted_run_is_compared_on_the_rows_that_all_have_answered(
    data: Path, answered: Callable[[str, dict[str, str]], None]
) -> None:
    answered(BARS[1], {"rag": "blue"})
    first = quality_rows.read_rows(data, ["rag"], "choose")[0]
    with RunFile(quality_rows.answers_file("default")) as file:
        file.add_answer(
            first.id, Answer("red", "stop", tokens=1, rounds=1, active=2.0, forwards=2), "default", first.id
        )
    requests = ["table", "--data", str(data), "--tasks", "rag", "--half", "all", "--variants", "default"]
    reported = {
        "default: not all rows are answered, left out": ["--against", BARS[1]],
        f"1 rows, difference to {BARS[1]}": ["--against", BARS[1], "--answered"],
        "nothing to compare": ["--against", BARS[0]],
    }
    for line, more in reported.items():
        assert line in CliRunner().invoke(quality.app, [*requests, *more]).output


def test_each_table_states_the_smallest_visible_difference() -> None:
    def facts(each: list[float]) -> dict[str, Any]:
        return {"columns": {"open: rougeL": {"each": each, "difference": difference(each, [0.0] * 40)}}}

    noisy = [float(5 * (n % 2)) for n in range(40)]
    [line] = quality.smallest_differences(
        {BARS[0]: facts([0.0] * 40), "default": facts(noisy)},
        {"open: rougeL": dict.fromkeys((BARS[0], "default"), BARS[0])},
    )
    assert line == "open: rougeL, 40 rows: differences below 1.1 cannot be seen (80% power)."


def test_with_further_members_each_ensemble_is_compared_with_its_own_best(
    data: Path, answered: Callable[[str, dict[str, str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "VARIANTS", dict(VARIANTS))
    monkeypatch.setattr(quality, "VARIANTS", variants.VARIANTS)
    variants.with_further(["some/large"])
    both = f"{SMOL.label}+large"
    assert [m.label for m in variants.VARIANTS[both].members()] == [SMOL.label, "large"]
    assert f"{SMOL.label}+{BARS[2]}+large" in variants.VARIANTS
    assert f"{SMOL.label}+{BARS[2]}" not in variants.VARIANTS, "that is the default"
    texts = {BARS[0]: "It is red", BARS[1]: "so red", "large": "red", both: "red", "default": "red"}
    for name, text in texts.items():
        answered(name, {"rag": text})
    request = quality_rows.read_rows(data, ["rag"], "all")
    whole: dict[str, Any] = {name: quality.measured(name, request) for name in texts}
    rivals = quality.rivals_of(whole, "best")["rag: f1"]
    assert rivals == {BARS[0]: BARS[1], BARS[1]: BARS[1], "default": BARS[1], "large": "large", both: "large"}


def test_every_variant_is_a_configuration() -> None:
    for variant in VARIANTS.values():
        config = EnsembleConfig.preset(variant.preset, ["no/one", "no/two"], **variant.settings)
        assert config.names == ("one", "two")
        assert variant.about
        assert set(variant.alone) <= set(BARS)


def test_the_baselines_include_smollm2_without_its_adapter() -> None:
    assert PUBLISHED.label in BARS
    assert (PUBLISHED.model, PUBLISHED.adapter) == (SMOL.model, None)
    assert [m.name for m in VARIANTS["stretch-published"].members()] == [PUBLISHED.name, BARS[2]]
    assert set(quality.COMPARED) >= set(BARS)


def test_answers_are_shown_side_by_side_unchanged(
    data: Path, answered: Callable[[str, dict[str, str]], None], tmp_path: Path
) -> None:
    answered("default", {"open": "# The sea\n```\nebb"})
    answered("alone", {"open": ""})
    quality.side_by_side(data, tmp_path / "beside.md", ["default", "alone"], "all", ("open",), 2)
    page = (tmp_path / "beside.md").read_text("utf-8")
    assert page.count("## open/") == 2
    assert page.count("**default**\n\n    # The sea\n    ```\n    ebb\n") == 2
    assert page.count("**alone**\n\n    (nothing)\n") == 2


def test_a_long_answer_is_cut_and_the_text_above_the_answers_stays(
    data: Path, answered: Callable[[str, dict[str, str]], None], tmp_path: Path
) -> None:
    answered("default", {"open": "The sea.\n\n1. ebb\n2. flood"})
    page = tmp_path / "beside.md"
    quality.side_by_side(data, page, ["default"], "all", ("open",), 1)
    assert "cut after 30 words" in page.read_text("utf-8")
    page.write_text("# Two answers\n\nAs we read them.\n\n## open/0\n\nan earlier one\n", "utf-8")
    quality.side_by_side(data, page, ["default"], "all", ("open",), 1, 4)
    beginning = "# Two answers\n\nAs we read them.\n\n## open/0\n\n    0?\n\n**default**\n\n"
    assert page.read_text("utf-8") == f"{beginning}    The sea.\n\n    1. ebb …\n"
    quality.side_by_side(data, page, ["default"], "all", ("open",), 1, 6)
    assert page.read_text("utf-8") == f"{beginning}    The sea.\n\n    1. ebb\n    2. flood\n"


def test_twenty_questions_are_graded_by_their_whole_answers() -> None:
    long = "It is, as far as the documents of the observatory say so, blackcurrant."
    page = applications.page([({"question": "What is it?", "facts": [f]}, long) for f in ("Blackcurrant", "lemon")], 1)
    output = "- **What is it?** It is, as far as the documents of the observatory …"
    assert page.endswith(f"\n\n{output}\n{output} *Wrong.*\n")
    assert "1 of 2 answers contain the fact" in page
