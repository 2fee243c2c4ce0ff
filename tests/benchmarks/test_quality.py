"""The quality benchmark's rows, variants and intervals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import quality
from typer import BadParameter
from variants import VARIANTS

from specfuse_shared import EnsembleConfig


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"id": str(n), "task": "instruct", "prompt": f"{n}?", "references": ["x"]} for n in range(5)]
    (tmp_path / "instruct.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_halves_part_the_rows(data: Path) -> None:
    chosen, confirmed, every = (
        [row["id"] for row in quality.read_rows(data, ["instruct"], half)] for half in ("choose", "confirm", "all")
    )
    assert (chosen, confirmed) == (["0", "2", "4"], ["1", "3"])
    assert every == ["0", "1", "2", "3", "4"]
    assert quality.read_rows(data, ["instruct"], "all", 2, 400)[1]["budget"] == 400
    with pytest.raises(BadParameter, match="choose, confirm or all"):
        quality.read_rows(data, ["instruct"], "neither")


def test_intervals_are_of_paired_differences() -> None:
    assert quality.difference([5.0, 6.0], [5.0, 6.0]) == {"mean": 0.0, "low": 0.0, "high": 0.0}
    gap = quality.difference([10.0 * n + 1 for n in range(30)], [10.0 * n for n in range(30)])
    assert gap["low"] == pytest.approx(1.0) == gap["high"]
    wide = quality.difference([float(n % 2) for n in range(40)], [0.0] * 40)
    assert 0.2 < wide["low"] < wide["mean"] == 0.5 < wide["high"] < 0.8


def test_every_variant_is_a_configuration() -> None:
    for variant in VARIANTS.values():
        config = EnsembleConfig.preset(variant.preset, ["no/one", "no/two"], **variant.settings)
        assert config.names == ("one", "two")
        assert variant.about
