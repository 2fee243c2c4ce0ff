"""The rows from which the demo's adapters were taught."""

from __future__ import annotations

import random

from train_demo_adapter import PASSAGE, PLEAS, SHORT, ways

LONG = "x" * (SHORT + 1)


def test_rows_with_a_short_answer_come_with_pleas_for_one() -> None:
    chance = random.Random(0)
    assert ways("How many?", LONG, chance) == ["How many?"]
    plain, before, after = ways("How many?", "Two", chance)
    assert plain == "How many?"
    assert before.partition("\n\n")[0] in PLEAS
    assert before.endswith("\n\nHow many?")
    assert after.startswith("How many?\n\n")
    assert after.rpartition("\n\n")[2] in PLEAS


def test_half_of_the_passages_come_before_their_question() -> None:
    chance, passage = random.Random(0), "p" * PASSAGE
    requests = [ways(f"How many?\n\n{passage}", LONG, chance)[0] for _ in range(100)]
    assert set(requests) == {f"How many?\n\n{passage}", f"{passage}\n\nHow many?"}
    assert 30 < sum(words.startswith("How") for words in requests) < 70
    assert ways("How many?\n\na, b", LONG, chance) == ["How many?\n\na, b"]
