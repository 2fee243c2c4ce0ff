"""Scores, elections, feedback and exits of a round, in numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specfuse_shared import policies
from specfuse_shared.config import AGGREGATES, PER, SCORES, EnsembleConfig
from specfuse_shared.policies import (
    CandidateLogprobs,
    MeanLogprob,
    MeanProb,
    OnlineFeedback,
    RetentionExit,
    ScorePolicy,
    Stretch,
    rewards,
)

LOGPROBS = st.lists(st.floats(-20, 0), min_size=1, max_size=12)
SQUARE = st.integers(2, 5).flatmap(
    lambda n: st.lists(st.lists(st.floats(0, 1), min_size=n, max_size=n), min_size=n, max_size=n)
)


def score(policy: ScorePolicy, logprobs: Sequence[float], sizes: Sequence[int]) -> float:
    """The score of a single candidate that continues."""
    return policy([CandidateLogprobs("x" * sum(sizes), False, logprobs, sizes)])[0]


@given(LOGPROBS)
def test_scores_lie_between_zero_and_one(logprobs: list[float]) -> None:
    sizes = [1 + i % 3 for i in range(len(logprobs))]
    for name, choices in PER.items():
        for per in choices:
            assert 0 <= score(SCORES[name](per=per), logprobs, sizes) <= 1 + 1e-9


def test_mean_logprob_is_the_geometric_mean_and_mean_prob_the_arithmetic() -> None:
    logprobs = [math.log(0.9), math.log(0.1)]
    assert score(MeanLogprob(), logprobs, [1, 1]) == pytest.approx(0.3)
    assert score(MeanProb(), logprobs, [1, 1]) == pytest.approx(0.5)


def test_per_text_is_the_probability_of_the_whole() -> None:
    assert score(MeanLogprob("text"), [math.log(0.5), math.log(0.25)], [3, 1]) == pytest.approx(0.125)


def test_per_root_is_between_the_mean_and_the_whole() -> None:
    logprobs = [math.log(0.5)] * 4
    assert score(MeanLogprob("root"), logprobs, [1] * 4) == pytest.approx(0.25)
    short, long = ([math.log(0.5)] * 2, [1] * 2), ([math.log(0.55)] * 9, [1] * 9)
    assert score(MeanLogprob("token"), *long) > score(MeanLogprob("token"), *short)
    assert score(MeanLogprob("root"), *long) < score(MeanLogprob("root"), *short)


def test_per_byte_does_not_favour_long_tokens() -> None:
    long_token, short_tokens = ([math.log(0.25)], [2]), ([math.log(0.5), math.log(0.5)], [1, 1])
    assert score(MeanLogprob("token"), *long_token) < score(MeanLogprob("token"), *short_tokens)
    assert score(MeanLogprob("byte"), *long_token) == pytest.approx(score(MeanLogprob("byte"), *short_tokens))
    assert score(MeanProb("byte"), *long_token) == pytest.approx(score(MeanProb("byte"), *short_tokens))


def test_each_score_setting_gives_the_policy_of_its_name() -> None:
    made = {
        (name, per): EnsembleConfig(["a/b"], score=name, per=per).score_policy()
        for name, choices in PER.items()
        for per in (None, *choices)
    }
    assert made[("mean_logprob", None)] == made[("mean_logprob", "text")] == MeanLogprob("text")
    assert made[("mean_prob", None)] == made[("mean_prob", "token")] == MeanProb("token")
    assert made[("stretch", None)] == made[("stretch", "token")] == Stretch("token")
    assert made[("stretch", "byte")] == Stretch("byte")
    assert made[("mean_logprob", "root")] == MeanLogprob("root")


OWN = [[0], [1]]
"""Two candidates, each written by the verifier of its number."""


def test_weighted_mean() -> None:
    assert policies.weighted_mean([[1.0, 0.0], [0.0, 0.5]], [0.75, 0.25], OWN) == pytest.approx([0.75, 0.125])


def test_seconded_mean_needs_a_second_for_a_candidate() -> None:
    babbled = [[0.3, 0.0, 0.0], [0.001, 0.2, 0.0], [0.0, 0.0, 0.9]]
    alone = [row[:2] for row in babbled[:2]]
    means = policies.SecondedMean()(babbled, [1 / 3] * 3, [[0], [1], [2]])
    assert means == pytest.approx([0.301 / 3, 0.0, 0.0])  # no other member finds the second and the third plausible
    assert policies.SecondedMean()(alone, [0.5, 0.5], OWN) == policies.weighted_mean(alone, [0.5, 0.5], OWN)
    shared = policies.SecondedMean()([[0.9], [0.9], [0.0]], [1 / 3] * 3, [[0, 1]])
    assert shared == pytest.approx([0.6])  # two authors second each other


def test_geometric_mean_lets_no_candidate_win_that_a_verifier_finds_impossible() -> None:
    assert policies.geometric_mean([[1.0, 0.25], [0.0, 0.25]], [0.5, 0.5], OWN) == pytest.approx([0.0, 0.25])
    assert policies.geometric_mean([[0.5, 1.0], [0.125, 1.0]], [0.5, 0.5], OWN) == pytest.approx([0.25, 1.0])


@given(SQUARE, st.sampled_from(sorted(AGGREGATES)), st.data())
def test_aggregates_do_not_depend_on_the_order_of_members(
    scores: list[list[float]], name: str, data: st.DataObject
) -> None:
    n = len(scores)
    order = data.draw(st.permutations(range(n)))
    weights = policies.normalised([1.0 + j for j in range(n)])
    plain = AGGREGATES[name](scores, weights, [[i] for i in range(n)])
    moved = AGGREGATES[name](
        [[scores[j][i] for i in order] for j in order], [weights[j] for j in order], [[k] for k in range(n)]
    )
    assert moved == pytest.approx([plain[i] for i in order])
    assert all(0 <= s <= 1 + 1e-9 for s in plain)


def test_rewards_exclude_the_authors_of_the_compared_drafts() -> None:
    scores = [[1.0, 0.2, 0.1], [0.9, 0.1, 0.3], [0.5, 0.4, 1.0]]
    # for member 0: rival 1 as scored by 2, rival 2 as scored by 1; member 0 beats both
    assert rewards(scores) == pytest.approx([1.0, 0.5, 0.0])


def test_a_verifier_has_no_opinion_on_implausible_candidates() -> None:
    babbled = [[0.3, 0.02, 0.0], [0.4, 0.2, 0.0], [1e-9, 1e-7, 0.9]]
    assert rewards(babbled) == pytest.approx([0.5, 1.0, 0.0])  # the member with noise decides between the others
    assert rewards(babbled, 1000) == pytest.approx([1.0, 0.5, 0.0])  # the rival decides, as without it
    assert rewards([row[:2] for row in babbled[:2]]) == pytest.approx([1.0, 0.0])


def test_with_two_members_the_rival_compares_with_its_own_candidate() -> None:
    assert rewards([[0.9, 0.1], [0.6, 0.5]]) == pytest.approx([1.0, 0.0])


@given(SQUARE, st.sampled_from(["constant", "sqrt_decay", "paper"]), st.integers(1, 50))
def test_feedback_keeps_a_distribution(scores: list[list[float]], schedule: str, t: int) -> None:
    weights = OnlineFeedback(schedule, 0.7)([1 / len(scores)] * len(scores), scores, t)
    assert sum(weights) == pytest.approx(1)
    assert min(weights) > 0


def test_schedules() -> None:
    assert OnlineFeedback("constant", 0.5).eta(4, 9) == 0.5
    assert OnlineFeedback("sqrt_decay", 0.6).eta(4, 9) == pytest.approx(0.2)
    assert OnlineFeedback("paper", 0.6).eta(4, 3) == pytest.approx(0.1)


@given(
    st.lists(st.floats(0, 50), min_size=1, max_size=6),
    st.integers(1, 40),
    st.sampled_from(["entropy", "fixed"]),
    st.integers(1, 4),
)
def test_the_best_members_never_exit(totals: list[float], t: int, temperature: str, min_active: int) -> None:
    decision = RetentionExit(temperature, min_active=min_active)(totals, t)
    assert sum(decision.retention) == pytest.approx(1)
    stay = [q for i, q in enumerate(totals) if i not in decision.leavers]
    assert len(stay) >= min(min_active, len(totals))
    assert all(totals[i] <= min(stay) for i in decision.leavers)
    one = RetentionExit(temperature)(totals, t)
    assert set(decision.leavers) <= set(one.leavers)
    assert decision.retention == one.retention


def test_a_hopeless_member_exits_and_a_close_one_stays() -> None:
    decision = RetentionExit()([5.0, 4.8, 0.1], 8)
    assert decision.leavers == (2,)
    assert policies.never([5.0, 0.1], 8).leavers == ()
    assert RetentionExit(min_active=2)([0.2, 4.8, 0.1], 8).leavers == (2,), "of two with low totals the better stays"
    assert RetentionExit()([0.2, 4.8, 0.1], 8).leavers == (0, 2)


def test_clear_races_sharpen_the_entropy_temperature() -> None:
    close, clear = policies.entropy([1.0, 1.0, 1.0]), policies.entropy([1.0, 0.01, 0.01])
    assert close == pytest.approx(1)
    assert clear < 0.2


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6), st.integers(1, 40), st.floats(0.05, 1))
def test_the_entropy_exit_sees_only_ratios_of_scores(means: list[float], t: int, scale: float) -> None:
    decide, totals = RetentionExit(), [t * mean for mean in means]
    scaled = decide([scale * q for q in totals], t)
    assert scaled.retention == pytest.approx(decide(totals, t).retention, abs=1e-9)


def test_the_entropy_exit_removes_a_member_that_was_weaker_for_long() -> None:
    decide, means = RetentionExit(), (0.30, 0.20)
    assert [decide([t * mean for mean in means], t).leavers for t in (1, 4, 16, 64)] == [(), (), (1,), (1,)]


def test_the_fast_preset_is_the_default_with_exit_and_a_short_first_segment() -> None:
    default, fast = (EnsembleConfig.preset(name, ["a/a", "b/b"]) for name in ("default", "fast"))
    assert (default.exit, fast.exit) == ("never", "entropy")
    assert (default.first_segment_tokens, fast.first_segment_tokens) == (20, 5)
    assert replace(fast, exit="never", first_segment_tokens=20) == default


@pytest.mark.parametrize(
    ("settings", "stay"),
    [
        ({}, 3),
        ({"exit": "entropy"}, 1),
        ({"exit": "entropy", "min_active": 2}, 2),
        ({"exit": "entropy", "min_active": 3}, 3),
        ({"exit": "entropy", "exit_threshold": 1e-30}, 3),
        ({"exit": "fixed"}, 1),
        ({"exit": "fixed", "min_active": 2}, 2),
    ],
)
def test_the_configured_number_of_members_stays(settings: dict[str, Any], stay: int) -> None:
    decide = EnsembleConfig(["a/a", "b/b", "c/c"], **settings).exit_policy()
    assert 3 - len(decide([9.0, 1.0, 0.1], 20).leavers) == stay
