"""Whether an answer calls a tool or is text: one event, which the members decide before anything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from specfuse_shared import (
    EnsembleConfig,
    EnsembleEngine,
    EnsembleResult,
    Grammar,
    MemberConfig,
    SamplingParams,
    Tool,
    policies,
)
from specfuse_shared.policies import CandidateLogprobs, MeanLogprob, Stretch
from specfuse_shared.text.tool_calls import CALL_OPEN, ToolUse
from tests.support import elections
from tests.support.reciting import reciting_model, reciting_tokenizer

TAG = len(CALL_OPEN)
CALL = CALL_OPEN + '{"'
TEXT = "the sea is salty because rivers carry salt"
TOOLS = [Tool("film_times", "When a film is shown.", {"properties": {"film": {"type": "string"}}})]


def candidate(text: str, *pieces: tuple[int, float], call: int = 0, ends: bool = False) -> CandidateLogprobs:
    sizes, probabilities = zip(*pieces, strict=True)
    return CandidateLogprobs(text, ends, [math.log(p) for p in probabilities], sizes, call)


def elect(*rows: list[CandidateLogprobs], score: policies.ScorePolicy = Stretch()) -> policies.Election:  # noqa: B008
    return elections.elect(rows, [[i % len(rows)] for i in range(len(rows[0]))], score=score)


@pytest.mark.parametrize("score", [Stretch(), MeanLogprob("token"), policies.MeanProb()])
def test_a_likely_text_answer_wins_even_if_its_first_word_is_uncertain(score: policies.ScorePolicy) -> None:
    """Each of ten first words has 7 %, the call 30 %, and the text after its tag is certain."""
    call = candidate(CALL + "name", (TAG, 0.3), (2, 1.0), (4, 1.0), call=TAG)
    text = candidate("No, it is not", (2, 0.07), (1, 0.9), (10, 0.9))
    result = elect([call, text], score=score)
    assert result.scores == [pytest.approx([0.3, 0.7])]
    assert result.winner == 1
    assert elect([call, candidate(text.text, (13, 0.07))], score=score).winner == 1


def test_a_likely_call_wins_and_then_calls_are_compared() -> None:
    one = candidate(CALL_OPEN + "abc", (TAG, 0.8), (3, 0.4), call=TAG)
    second = candidate(CALL_OPEN + "xyz", (TAG, 0.8), (3, 0.6), call=TAG)
    text = candidate("No.", (3, 0.15))
    assert [elect([one, second, text]).winner, elect([second, one, text]).winner] == [1, 0]
    assert elect([one, second, text]).scores == [pytest.approx([0.8, 0.8, 0.2])]


def test_texts_are_compared_if_no_call_wins() -> None:
    call = candidate(CALL, (TAG, 0.2), (2, 1.0), call=TAG)
    yes, no = candidate("Yes.", (4, 0.1)), candidate("No.", (3, 0.3))
    assert elect([call, yes, no]).winner == 2
    assert elect([no, call, yes]).winner == 0


def test_among_calls_alone_and_among_texts_alone_the_score_decides() -> None:
    texts = [candidate("Yes.", (4, 0.1)), candidate("No.", (3, 0.3))]
    assert elect(texts).scores == [Stretch()(texts)]
    calls = [
        candidate(CALL, (TAG, 0.2), (2, 0.5), call=TAG),
        candidate(CALL_OPEN + "{'", (TAG, 0.2), (2, 0.1), call=TAG),
    ]
    assert elect(calls).scores == [Stretch()(calls)]


def test_partial_tags_are_scored_by_their_text_and_the_longest_one_decides() -> None:
    half, whole = candidate("<tool", (5, 0.6), call=5), candidate(CALL_OPEN, (5, 0.6), (6, 0.5), call=TAG)
    text = candidate("No.", (3, 0.2))
    assert elect([half, text]).scores == [pytest.approx([0.6, 0.4])]
    assert elect([half, whole, text]).scores == [pytest.approx([0.3, 0.3, 0.7])]


def test_text_that_a_verifier_cannot_encode_decides_nothing() -> None:
    unseen, text = CandidateLogprobs(CALL, False, (), (), TAG), candidate("No.", (3, 0.2))
    assert elect([unseen, text]).scores == [pytest.approx([0.0, 0.2])]


@pytest.mark.parametrize(
    ("text", "after", "size"),
    [
        (CALL_OPEN, "", TAG),
        (CALL_OPEN + '{"name"', "Let me see. ", TAG),
        ("<tool", "", 5),
        ("", "", 0),
        ("Let me see. " + CALL_OPEN, "", 0),
        ("<div>", "", 0),
        ("\n" + CALL_OPEN, CALL_OPEN + "{}", 0),
        ("<", CALL_OPEN + '{"name": "html", "arguments": {"text": "', 0),
    ],
)
def test_the_tag_opens_the_first_call_and_only_with_tools(text: str, after: str, size: int) -> None:
    assert ToolUse(TOOLS).opened_by(text, after) == size
    assert ToolUse(TOOLS, "none").opened_by(text, after) == ToolUse().opened_by(text, after) == 0


def first_round(
    folder: Path,
    speeches: dict[str, tuple[str, float]],
    tools: Sequence[Tool],
    grammar: Grammar | None = None,
    first_segment: int = 5,
) -> EnsembleResult:
    """The first round of members that recite these texts with these probabilities; their weights are equal."""
    tokenizer = reciting_tokenizer(" ".join(speech for speech, _ in speeches.values()))
    for name, (speech, certainty) in speeches.items():
        reciting_model(tokenizer, speech, certainty, endless=False).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    members = [MemberConfig(str(folder / name), name=name) for name in speeches]
    with EnsembleEngine(EnsembleConfig(members, first_segment_tokens=first_segment)) as engine:
        return engine.generate("Why is the sea salty?", SamplingParams(max_tokens=10, grammar=grammar), tools=tools)


def test_a_member_certain_of_a_call_does_not_outvote_one_certain_of_text(tmp_path: Path) -> None:
    """The second member's words have 60 % each, so its five words together have 8 %."""
    result = first_round(tmp_path, {"caller": (CALL, 8.6), "talker": (TEXT, 6.0)}, TOOLS)
    first = result.rounds[0]
    call, text = sorted(first.candidates, key=lambda c: CALL_OPEN not in c.text)
    assert (call.drafters, text.drafters, first.winner) == (("caller",), ("talker",), "talker")
    assert 0.5 < call.scores["caller"] < 0.9
    assert call.scores["talker"] < 0.01
    assert {name: call.scores[name] + text.scores[name] for name in call.scores} == {
        "caller": pytest.approx(1),
        "talker": pytest.approx(1),
    }
    assert result.text.startswith("the sea is")


@pytest.mark.parametrize(
    ("speeches", "tools", "grammar", "whole"),
    [
        ((TEXT, "rivers carry salt to the sea"), TOOLS, None, False),
        ((TEXT, CALL), TOOLS, None, True),
        ((TEXT, "rivers carry salt to the sea"), [], Grammar.regex("[a-z ]+"), True),
        ((TEXT, "rivers carry salt to the sea"), TOOLS, Grammar.regex("[a-z ]+"), True),
        ((TEXT, "rivers carry salt to the sea"), [], None, False),
    ],
)
def test_calls_and_values_are_decided_early_from_a_larger_lead(
    speeches: tuple[str, str],
    tools: Sequence[Tool],
    grammar: Grammar | None,
    whole: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The required lead is the one for candidates that are compared as a whole."""
    results, margin = [], EnsembleConfig.margin

    def noted(self: EnsembleConfig, *, whole: bool) -> float:
        results.append(whole)
        return margin(self, whole=whole)

    monkeypatch.setattr(EnsembleConfig, "margin", noted)
    first_round(tmp_path, {"one": (speeches[0], 6.0), "other": (speeches[1], 6.0)}, tools, grammar, first_segment=20)
    assert results[0] is whole


def test_short_texts_with_tools_are_not_treated_as_whole_values(tmp_path: Path) -> None:
    """They are compared like texts without tools."""
    speeches = {"one": (" yes it is", 6.0), "other": (" no it was", 6.0)}
    results = [first_round(tmp_path / str(len(tools)), speeches, tools).rounds[0] for tools in (TOOLS, [])]
    scores = [[dict(candidate.scores) for candidate in record.candidates] for record in results]
    assert scores[0] == scores[1]
    assert all(candidate.ends for candidate in results[0].candidates)
    assert sum(each["one"] for each in scores[0]) < 0.9
