"""Candidates compared over equal stretches: with numbers computed by hand, and against every possible rival."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specfuse_shared import policies
from specfuse_shared.policies import (
    AggregatePolicy,
    CandidateLogprobs,
    Election,
    Matrix,
    MeanLogprob,
    ScorePolicy,
    Stretch,
    mean_after,
)
from tests.support import elections


def candidate(*pieces: tuple[str, float], end: float | None = None) -> CandidateLogprobs:
    """A candidate of tokens with their probabilities, and the probability of the end of the turn."""
    tail = [] if end is None else [end]
    return CandidateLogprobs(
        "".join(text for text, _ in pieces),
        end is not None,
        [math.log(p) for _, p in pieces] + [math.log(p) for p in tail],
        [len(text.encode()) for text, _ in pieces] + [1] * len(tail),
    )


WHOLE = Stretch()


def elect(
    *rows: Sequence[CandidateLogprobs],
    weights: Sequence[float] | None = None,
    score: ScorePolicy = WHOLE,
    aggregate: AggregatePolicy = policies.weighted_mean,
    barred: Sequence[int] = (),
) -> Election:
    drafters = [[min(i, len(rows) - 1)] for i in range(len(rows[0]))]
    return elections.elect(rows, drafters, weights, score=score, aggregate=aggregate, barred=barred)


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────


def test_candidates_are_scored_on_the_text_that_all_of_them_cover() -> None:
    short, long = candidate((" The", 0.2)), candidate((" A", 0.25), (" comet", 0.5), (" tart", 0.01))
    assert Stretch()([short, long]) == pytest.approx([0.2, 0.125])
    assert MeanLogprob("text")([short, long]) == pytest.approx([0.2, 0.00125])


def test_the_token_across_the_border_counts_whole_or_in_proportion_to_its_bytes() -> None:
    pair = candidate(("abc", 0.5)), candidate(("x", 0.5), ("yzzz", 0.0625))
    assert Stretch("token")(pair) == pytest.approx([0.5, 0.5 * 0.0625])
    assert Stretch("byte")(pair) == pytest.approx([0.5, 0.5 * 0.0625 ** (2 / 4)])


def test_bytes_are_counted_and_not_characters() -> None:
    pair = candidate(("é", 0.5)), candidate(("a", 0.5), ("b", 0.5), ("c", 0.5))
    assert Stretch()(pair) == pytest.approx([0.5, 0.25])


def test_an_encoding_that_reaches_back_into_the_answer_is_aligned_at_its_end() -> None:
    joined = CandidateLogprobs("et tart", False, [math.log(0.5), math.log(0.5), math.log(0.1)], [5, 3, 2])
    assert joined.size == 7, "the first token holds three bytes of the answer"
    assert Stretch("token")([joined, candidate(("et", 0.3))]) == pytest.approx([0.5, 0.3])
    assert Stretch("byte")([joined, candidate(("e", 0.3))]) == pytest.approx([0.5 ** (4 / 5), 0.3])


def test_ending_and_continuing_are_outcomes_of_one_event_for_any_further_text() -> None:
    ends = candidate((" Paris", 0.5), end=0.4)
    for what_follows in ([(",", 0.9)], [(",", 1e-9), (" the", 1e-9), (" capital", 1e-9)]):
        continues = candidate((" Paris", 0.5), *what_follows)
        assert Stretch()([ends, continues]) == pytest.approx([0.5 * 0.4, 0.5 * 0.6])
        assert elect([ends, continues]).winner == 1
    surer = candidate((" Paris", 0.5), end=0.6)
    assert elect([surer, candidate((" Paris", 0.5), (",", 0.99))]).winner == 0


def test_equal_texts_of_which_one_ends_differ_only_by_the_end() -> None:
    pair = candidate((" Yes", 0.5), end=0.3), candidate((" Yes", 0.5))
    assert Stretch()(pair) == pytest.approx([0.15, 0.35])


def test_the_end_of_a_candidate_beyond_the_stretch_is_not_scored() -> None:
    pair = candidate((" No", 0.2)), candidate((" Yes", 0.5), (".", 0.9), end=1e-6)
    assert Stretch()(pair) == pytest.approx([0.2, 0.5])


def test_answers_that_all_end_are_compared_whole() -> None:
    tart = candidate((" A", 0.5), (" tart", 0.5), end=0.8)
    fox = candidate((" A", 0.5), (" red", 0.6), (" fox", 0.1), end=0.9)
    assert Stretch()([tart, fox]) == pytest.approx([0.2, 0.027])
    assert Stretch("byte")([tart, fox]) == pytest.approx([0.2, 0.027])
    assert elect([tart, fox]).winner == 0
    unfinished = candidate((" A", 0.5), (" red", 0.6), (" fox", 0.1))
    assert Stretch("byte")([tart, unfinished]) == pytest.approx([0.2, 0.3 * 0.1 ** (1 / 4)]), "one continues"


def test_a_rival_that_continues_does_not_hide_the_ends_of_answers() -> None:
    tart = candidate((" A", 0.5), (" tart", 0.5), end=0.8)
    fox = candidate((" The", 0.9), (" red", 0.9), (" fox", 0.1), end=0.9)
    row = [tart, fox, candidate((" Or", 0.1), (" a", 0.1))]
    assert Stretch()(row) == pytest.approx([0.25, 0.81, 0.01]), "only what all three cover"
    assert elect(row).winner == 0
    assert elect(row, barred=[0]).winner == 1, "a repetition loop stays out"
    likelier = candidate((" Or", 0.95), (" a", 0.99))
    assert elect([tart, fox, likelier]).winner == 2


def test_a_whole_answer_that_extends_another_one_does_not_lose_by_its_length() -> None:
    tart = candidate((" The", 0.5), (" tart", 0.5), end=0.3)
    answer = candidate((" The", 0.5), (" tart", 0.5), (" is", 0.2), (" sweet", 0.1), end=0.9)
    assert Stretch()([tart, answer]) == pytest.approx([0.25 * 0.3, 0.25 * 0.7])
    longer = candidate((" The", 0.5), (" tart", 0.5), (" is", 0.2), (" sour", 0.3), end=0.9)
    row = [tart, answer, longer]
    assert Stretch()(row) == pytest.approx([0.075, 0.175, 0.175])
    assert row[elect(row).winner] is longer, "the ones that continue are then compared, whole"


def test_a_short_third_candidate_makes_no_other_candidate_lose() -> None:
    tart, fox = (
        candidate((" A", 0.4), (" tart", 0.5), (" is", 0.9)),
        candidate((" The", 0.5), (" red", 0.1), (" fox", 0.1)),
    )
    short = candidate((" I", 0.1))
    assert Stretch()([tart, fox, short]) == pytest.approx([0.4, 0.5, 0.1]), "no more than all three cover"
    assert elect([tart, fox]).winner == elect([tart, fox, short]).winner == elect([short, fox, tart][::-1]).winner == 0
    assert elect([tart, fox, candidate((" I", 0.6))]).winner == 2
    assert elect([tart, fox, short]).votes == pytest.approx([0.4, 0.5, 0.1]), "the votes are of all three"


def test_ending_the_answer_is_decided_before_its_alternatives() -> None:
    stops, one, second = candidate(end=0.4), candidate((" A", 0.1), (" fox", 0.1)), candidate((" The", 0.2))
    assert Stretch()([stops, one, second]) == pytest.approx([0.4, 0.6, 0.6])
    assert elect([stops, one, second]).winner == 2, "the ones that continue are then compared"
    assert elect([candidate(end=0.7), one, second]).winner == 0


def test_an_expected_continuation_wins_over_its_beginning() -> None:
    def rows(*tail: float, end: float | None = None) -> list[list[CandidateLogprobs]]:
        more = [[(" tart", p), (" is", p)] for p in tail]
        starts = (0.3, 0.6)
        return [
            [candidate((" The", p)), candidate((" The", p), *m, end=end)] for p, m in zip(starts, more, strict=True)
        ]

    election = elect(*rows(0.7, 0.4))
    assert election.winner == 1
    assert election.votes == pytest.approx([0.45, 0.45])
    assert elect(*rows(0.7, 0.4), barred=[1]).winner == 0
    assert elect(*rows(0.7, 0.2)).winner == 0
    assert elect(*rows(0.7, 0.2), weights=[0.7, 0.3]).winner == 1
    assert elect(*rows(0.7, 0.4), weights=[0.1, 0.9]).winner == 0
    assert elect(*rows(0.7, 0.4, end=0.01)).winner == 0, "its end is part of it"
    assert elect(*rows(0.7, 0.4, end=0.9)).winner == 1


def test_a_token_across_the_border_belongs_to_the_text_before_it() -> None:
    digits, joined = candidate((" 180", 0.3), ("0", 0.1), end=0.4), candidate((" 1800", 0.2))
    assert mean_after(digits, 4) == pytest.approx(0.2)
    assert mean_after(digits, 5) == pytest.approx(0.4)
    assert mean_after(joined, 4) == 1.0
    reaching_back = CandidateLogprobs("et tart", False, [math.log(0.5), math.log(0.5), math.log(0.1)], [5, 3, 2])
    assert mean_after(reaching_back, 2) == pytest.approx(math.sqrt(0.05))
    assert mean_after(CandidateLogprobs(" 1800", False, (), ()), 4) == 0.0


def test_one_expected_continuation_is_enough() -> None:
    start, fox = candidate((" The", 0.6)), candidate((" The", 0.6), (" fox", 0.2))
    for likely, winner in ((0.3, start), (0.6, None)):
        tart = candidate((" The", 0.6), (" tart", likely))
        for row in ([start, fox, tart], [tart, fox, start]):
            assert row[elect(row).winner] is (winner or tart)


def test_candidates_that_share_a_short_beginning_are_compared_without_it() -> None:
    start = candidate((" The", 0.6))
    fox, tart = candidate((" The", 0.6), (" fox", 0.2), (" ran", 0.9)), candidate((" The", 0.6), (" tart", 0.6))
    rival = candidate((" A", 0.3), (" tart", 0.9))
    for row in ([start, fox, tart, rival], [rival, tart, start, fox]):
        assert row[elect(row).winner] is tart
    barely = [candidate(end=0.1), candidate(("b", 0.6)), candidate(("b", 0.6), ("a", 0.5)), candidate(("a", 0.3))]
    assert elect(barely).winner == 2, "a text that was not compared yet is not replaced"
    start, fox = candidate((" The", 0.6)), candidate((" The", 0.6), (" fox", 0.8), (" ran", 0.9))
    ends = candidate((" The", 0.6), (" fox", 0.8), end=0.7)
    row = [start, ends, fox]
    assert row[elect(row).winner] is ends


def test_verifiers_see_the_same_candidates_in_their_own_tokens() -> None:
    one = [candidate((" The", 0.5), (" tart", 0.5)), candidate((" A", 0.4))]
    finer = [candidate((" ", 0.9), ("T", 0.9), ("he", 0.9), (" tart", 0.5)), candidate((" A", 0.01))]
    election = elect(one, finer, weights=[0.25, 0.75])
    assert election.scores == [pytest.approx([0.5, 0.4]), pytest.approx([0.81, 0.01])]
    assert election.votes == pytest.approx([0.25 * 0.5 + 0.75 * 0.81, 0.25 * 0.4 + 0.75 * 0.01])
    geometric = elect(one, finer, weights=[0.25, 0.75], aggregate=policies.geometric_mean)
    assert geometric.votes == pytest.approx([0.5**0.25 * 0.81**0.75, 0.4**0.25 * 0.01**0.75])


def test_a_member_that_is_sure_of_its_own_nonsense_needs_a_second() -> None:
    def row(sense: float, nonsense: float) -> list[CandidateLogprobs]:
        return [candidate((" sky", sense)), candidate((" is", sense / 3)), candidate((" zq", nonsense), ("xx", 1.0))]

    rows = [row(0.3, 1e-9), row(0.2, 1e-9), row(1e-6, 0.99)]
    assert elect(*rows).winner == 2
    assert elect(*rows, aggregate=policies.SecondedMean()).winner == 0


def test_a_member_with_most_of_the_votes_needs_no_second() -> None:
    """The two weak members find each other's draft plausible, and the strong member's draft implausible."""

    def row(guess: float, second: float, fact: float) -> list[CandidateLogprobs]:
        return [candidate((" guess", guess)), candidate((" other", second)), candidate((" known", fact))]

    rows = [row(0.5, 0.2, 1e-9), row(0.2, 0.5, 1e-9), row(1e-5, 1e-5, 0.6)]
    seconded = policies.SecondedMean()
    assert elect(*rows, aggregate=seconded, weights=[0.1, 0.1, 0.8]).winner == 2
    assert elect(*rows, aggregate=seconded, weights=[0.25, 0.25, 0.5]).winner == 0, "half is no majority"
    events = [row(0.5, 0.2, 1e-9), row(0.2, 0.5, 1e-9), row(1e-3, 1e-5, 0.6)]
    assert elect(*events, aggregate=seconded, weights=[0.1, 0.1, 0.8]).winner == 2, "its own draft counts in full"
    assert elect(*events, aggregate=seconded, weights=[0.25, 0.25, 0.5]).winner == 0


def test_a_member_that_produces_noise_changes_nothing() -> None:
    """Of two that disagree, the one with the higher mean wins, with or without a third member that produces noise."""
    war = [candidate((" 1756", 0.06), end=0.9), candidate((" six", 0.002), (" years", 0.9), end=0.9)]
    years = [candidate((" 1756", 1e-8), end=0.9), candidate((" six", 0.05), (" years", 0.9), end=0.9)]
    babbler = [candidate((" 1756", 1e-9), end=0.1), candidate((" six", 1e-9), (" years", 0.9), end=0.1)]
    nonsense = [candidate((" zq", p), (" d", 0.5)) for p in (1e-9, 1e-9, 0.9)]
    pair = elect(war, years)
    three = [[*row, zq] for row, zq in zip((war, years, babbler), nonsense, strict=True)]
    result = elect(*three, aggregate=policies.SecondedMean())
    assert result.winner == pair.winner == 0
    assert result.votes == pytest.approx([*pair.votes, 0.0])
    assert len(result.scores) == 3, "its scores are reported all the same"
    uneven = elect(*three, aggregate=policies.SecondedMean(), weights=[0.1, 0.5, 0.4])
    assert uneven.winner == elect(war, years, weights=[1 / 6, 5 / 6]).winner == 1
    received = candidate((" six", 1e-3), (" years", 0.9), end=0.9)
    understood = [*three[:2], [babbler[0], received, nonsense[2]]]
    assert elect(*understood, aggregate=policies.SecondedMean()).winner == 1, (
        "a candidate of one member needs support from another"
    )
    strangers = [[candidate((" a", p)), candidate((" b", q))] for p, q in ((0.9, 1e-9), (1e-9, 0.8))]
    assert elect(*strangers, aggregate=policies.SecondedMean()).winner == 0, "they are all insiders"


def test_noise_does_not_end_a_repetition_loop() -> None:
    def row(circle: float, sense: float, nonsense: float) -> list[CandidateLogprobs]:
        return [candidate((" again", circle)), candidate((" and", sense)), candidate((" zq", nonsense))]

    rows = [row(0.9, 0.02, 1e-9), row(0.8, 0.05, 1e-9), row(1e-6, 1e-6, 0.99)]
    seconded = policies.SecondedMean()
    assert elect(*rows, barred=[0], aggregate=seconded).winner == 1
    assert elect(*rows, barred=[0, 1], aggregate=seconded).winner == 0, "else the repetition loop continues, and ends"
    pair = [[row[0], row[2]] for row in rows[:2]]
    assert elect(*pair, barred=[0], aggregate=seconded).winner == 1, "of two, each is the only alternative of the other"


def test_a_verifier_to_which_a_candidate_is_invisible_has_no_opinion_on_it() -> None:
    unseen = CandidateLogprobs("\u200b", False, (), ())
    election = elect([unseen, candidate((" a", 0.1))], [candidate(("\u200b", 0.5)), candidate((" a", 0.2))])
    assert election.scores == [[0.0, pytest.approx(0.1)], pytest.approx([0.5, 0.2])]


def test_the_first_of_equals_wins() -> None:
    row = [candidate((" a", 0.2)), candidate((" b", 0.2))]
    assert elect(row).winner == 0
    assert elect(row, barred=[0, 1]).winner == 0
    assert elect(row, barred=[0]).winner == 1


# ── against every rival ──────────────────────────────────────────────────────────────────────────

LETTERS = "ab"
TOKENS = ("a", "b", "ab", "ba", "aab")
END = ""
Draft = tuple[str, bool]
"""A text, and whether the turn ends after it."""


@lru_cache(maxsize=100_000)
def next_token(seed: int, vocabulary: Sequence[str], sharpness: float, before: Sequence[str]) -> dict[str, float]:
    dice = Random(f"{seed} {' '.join(before)}")
    mass = {token: dice.random() ** sharpness + 1e-9 for token in (*vocabulary, END)}
    return {token: m / sum(mass.values()) for token, m in mass.items()}


@dataclass(frozen=True)
class Verifier:
    """A language model over `TOKENS`, whose probabilities depend on all earlier tokens, and its encoding of texts."""

    seed: int
    vocabulary: tuple[str, ...]
    sharpness: float

    def encode(self, text: str) -> list[str]:
        """The longest token first, if its vocabulary has it."""
        ids: list[str] = []
        while text:
            ids.append(max((t for t in self.vocabulary if text.startswith(t)), key=len))
            text = text[len(ids[-1]) :]
        return ids

    def judge(self, text: str, ends: bool) -> CandidateLogprobs:
        ids = self.encode(text)
        line = [*ids, END] if ends else ids
        model = (self.seed, self.vocabulary, self.sharpness)
        results = [math.log(next_token(*model, tuple(line[:n]))[token]) for n, token in enumerate(line)]
        return CandidateLogprobs(text, ends, results, [max(1, len(token)) for token in line])


TEXTS = ["".join(letters) for n in range(5) for letters in itertools.product(LETTERS, repeat=n)]
CHOICES = [(text, ends) for text in TEXTS for ends in (False, True) if text or ends]
VERIFIERS = st.lists(
    st.builds(
        Verifier,
        st.integers(0, 10**6),
        st.sets(st.sampled_from(TOKENS[2:])).map(lambda more: (*LETTERS, *sorted(more))),
        st.sampled_from([0.5, 2.0, 12.0]),
    ),
    min_size=1,
    max_size=3,
)
WEIGHTS = st.lists(st.floats(0.05, 1), min_size=3, max_size=3)
DRAFTS = st.lists(st.sampled_from(CHOICES), min_size=2, max_size=6, unique=True)


def tables(verifiers: Sequence[Verifier], drafts: Sequence[Draft]) -> list[list[CandidateLogprobs]]:
    return [[verifier.judge(*draft) for draft in drafts] for verifier in verifiers]


@settings(max_examples=300, deadline=None)
@given(VERIFIERS, WEIGHTS, DRAFTS)
def test_scores_of_candidates_that_differ_within_the_stretch_are_probabilities_of_one_outcome(
    verifiers: list[Verifier], raw: list[float], drafts: list[Draft]
) -> None:
    weights = policies.normalised(raw[: len(verifiers)])
    distinct = _distinct_within(drafts)
    result = elect(*tables(verifiers, distinct), weights=weights)
    for row in result.scores:
        assert sum(row) <= 1 + 1e-9
    assert sum(result.votes) <= 1 + 1e-9


def _distinct_within(drafts: Sequence[Draft]) -> list[Draft]:
    """The drafts that differ within their stretch, in text or in whether they end.

    If all end, the stretch covers whole texts, except for a continuation of a shorter text.
    """
    cut = max if all(ends for _, ends in drafts) else min
    border = cut(len(text) for text, _ in drafts)
    recorded: dict[Draft, Draft] = {}
    for text, ends in sorted(drafts, key=lambda d: len(d[0])):
        ended = next((t for (t, e) in recorded if e and text.startswith(t) and (text, ends) != (t, e)), None)
        key = (text[:border], ends and len(text) <= border) if ended is None else (ended, False)
        recorded.setdefault(key, (text, ends))
    return list(recorded.values())


def weighted(verifiers: Sequence[Verifier], weights: Sequence[float], draft: Draft) -> float:
    """Weighted probability of a whole draft."""
    return sum(w * math.exp(sum(v.judge(*draft).logprobs)) for w, v in zip(weights, verifiers, strict=True))


def survives(draft: Draft, drafts: Sequence[Draft], verifiers: Sequence[Verifier], weights: Sequence[float]) -> bool:
    """Whether the draft wins among `drafts`, or, if it does not end, a continuation of it.

    Two cases are excluded. Drafts whose beginning a verifier encodes in other tokens than the draft's: for this
    verifier they are alternatives. And drafts that equal the draft over the stretch but have another token across its
    border: for one verifier they differ, for others they do not.
    """
    drafts = [d for d in drafts if d == draft or d[1] or all(_joins(v, d[0], draft[0]) for v in verifiers)]
    score = Stretch()
    rows = tables(verifiers, drafts)
    border = score._size(rows[0])
    agree = [text for text, _ in drafts if text[:border] == draft[0][:border]]
    if any(len({_across(v, text, border) for text in agree}) > 1 for v in verifiers):
        return True
    winner = drafts[elect(*rows, weights=weights, score=score).winner]
    return winner == draft or (not draft[1] and winner[0].startswith(draft[0]))


def _across(verifier: Verifier, text: str, border: int) -> str:
    """The text of the tokens that begin within the border."""
    covered = ""
    for token in verifier.encode(text):
        covered += token if len(covered) < border else ""
    return covered


def _joins(verifier: Verifier, text: str, longer: str) -> bool:
    beginning = verifier.encode(text)
    return not longer.startswith(text) or verifier.encode(longer)[: len(beginning)] == beginning


@settings(max_examples=200, deadline=None)
@given(VERIFIERS, WEIGHTS, st.lists(st.sampled_from(CHOICES), min_size=1, max_size=4))
def test_a_draft_with_half_of_the_probability_wins_against_any_rivals(
    verifiers: list[Verifier], raw: list[float], rivals: list[Draft]
) -> None:
    weights = policies.normalised(raw[: len(verifiers)])
    for draft in CHOICES:
        if weighted(verifiers, weights, draft) > 0.5:
            assert survives(draft, list(dict.fromkeys([*rivals, draft])), verifiers, weights)
            assert survives(draft, list(dict.fromkeys([draft, *rivals])), verifiers, weights)


def test_a_draft_with_half_of_the_votes_wins_against_each_of_all_rivals() -> None:
    verifiers, weights, met = [Verifier(3, (*LETTERS, "ab"), 30.0), Verifier(8, ("a", "b"), 30.0)], [0.7, 0.3], 0
    for draft in CHOICES:
        for rival in CHOICES if weighted(verifiers, weights, draft) > 0.5 else ():
            assert survives(draft, list(dict.fromkeys([rival, draft])), verifiers, weights)
            met += 1
    assert met >= 2 * len(CHOICES)


@settings(max_examples=100, deadline=None)
@given(VERIFIERS, DRAFTS, st.sampled_from(["token", "byte"]), st.data())
def test_the_winner_does_not_depend_on_the_order_of_candidates(
    verifiers: list[Verifier], drafts: list[Draft], per: str, data: st.DataObject
) -> None:
    score, moved = Stretch(per), data.draw(st.permutations(drafts))
    for aggregate in (policies.weighted_mean, policies.geometric_mean):
        result = elect(*tables(verifiers, drafts), score=score, aggregate=aggregate)
        again = elect(*tables(verifiers, moved), score=score, aggregate=aggregate)
        assert drafts[result.winner] == moved[again.winner]
        assert all(0 <= vote <= 1 + 1e-9 for vote in result.votes)


class Outsiders:
    """The weighted mean, with these verifiers as outsiders."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __call__(self, scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
        return policies.weighted_mean(scores, weights, drafters)

    def outsiders(self, scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> Sequence[int]:
        return self.numbers


@pytest.mark.parametrize("numbers", [(0, 1, 2), (0, 1), ()], ids=["all verifiers", "all drafters", "none"])
def test_outsiders_stay_if_no_voter_or_candidate_would_remain(numbers: tuple[int, ...]) -> None:
    row = [candidate(("A", 0.2)), candidate(("B", 0.6))]
    result = elections.elect([row] * 3, [[0], [1]], aggregate=Outsiders(*numbers))
    assert (result.winner, result.votes) == (1, pytest.approx([0.2, 0.6]))


def test_outsiders_are_neither_candidates_nor_voters() -> None:
    row = [candidate(("A", 0.2)), candidate(("B", 0.6))]
    result = elections.elect([row] * 3, [[0], [1]], aggregate=Outsiders(1))
    assert (result.winner, result.votes) == (0, pytest.approx([0.2, 0.0]))


def test_each_verifier_divides_one_vote_among_whole_values() -> None:
    """The verifier's probability of text outside the grammar does not reduce its vote."""
    strong = [candidate(("A", 0.2)), candidate(("B", 0.03))]
    weak = [candidate(("A", 0.1)), candidate(("B", 0.5))]
    rows, drafters = [strong, weak], [[0], [1]]
    assert elections.elect(rows, drafters, [0.6, 0.4]).winner == 1
    result = elections.elect(rows, drafters, [0.6, 0.4], whole_values=True)
    assert result.winner == 0
    assert result.scores[0] == pytest.approx([20 / 23, 3 / 23])
    assert result.votes == pytest.approx([0.6 * 20 / 23 + 0.4 / 6, 0.6 * 3 / 23 + 0.4 * 5 / 6])
