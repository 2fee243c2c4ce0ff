"""The training rows of the demo's adapters."""

from __future__ import annotations

import random

from train_demo_adapter import BREVITY, PASSAGE, SHORT, variants_of

LONG = "x" * (SHORT + 1)


def test_rows_with_a_short_answer_ask_for_one() -> None:
    chance = random.Random(0)
    assert variants_of("How many?", LONG, chance) == ["How many?"]
    plain, before, after = variants_of("How many?", "Two", chance)
    assert plain == "How many?"
    assert before.partition("\n\n")[0] in BREVITY
    assert before.endswith("\n\nHow many?")
    assert after.startswith("How many?\n\n")
    assert after.rpartition("\n\n")[2] in BREVITY


def test_half_of_the_passages_come_before_their_question() -> None:
    chance, passage = random.Random(0), "p" * PASSAGE
    prompts = [variants_of(f"How many?\n\n{passage}", LONG, chance)[0] for _ in range(100)]
    assert set(prompts) == {f"How many?\n\n{passage}", f"{passage}\n\nHow many?"}
    assert 30 < sum(words.startswith("How") for words in prompts) < 70
    assert variants_of("How many?\n\na, b", LONG, chance) == ["How many?\n\na, b"]
