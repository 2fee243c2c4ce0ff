"""The decisions of a round as pure functions over numbers: score, aggregate, feedback, exit.

They know no tokenizer, no tensor and no framework. Each is a callable that a user may replace by an object of
the same signature. Symbols: n members, verifier j, candidate i, s[j][i] in [0, 1], weights w with Σw = 1.

Sources: SpecFuse (arXiv 2412.07380 v1/v2) for exit, SpecEM (v3, NeurIPS 2025) for feedback. The exit formulas are
a reconstruction: the papers' exact ones could not be read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Matrix = Sequence[Sequence[float]]


class ScorePolicy(Protocol):
    """Turns one verifier's log-probabilities of one candidate into a score in [0, 1]."""

    def __call__(self, logprobs: Sequence[float], token_bytes: Sequence[int]) -> float:
        """`logprobs`: natural log p of each token; `token_bytes`: UTF-8 bytes each token stands for (≥ 1)."""
        ...


class AggregatePolicy(Protocol):
    """Turns all verifiers' scores into one score per candidate."""

    def __call__(self, scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
        """`scores[j][i]` and `weights[j]` (Σ = 1) → S_i ≥ 0; the largest S_i wins, the first of equals.

        `drafters[i]`: the verifiers that wrote candidate i themselves.
        """
        ...


class FeedbackPolicy(Protocol):
    """Learns the verifiers' weights from a finished round."""

    def __call__(self, weights: Sequence[float], scores: Matrix, round_index: int) -> list[float]:
        """`scores[j][i]`: verifier j on member i's candidate (n × n); rounds count from 1. Returns Σ = 1."""
        ...


@dataclass(frozen=True, slots=True)
class ExitDecision:
    """Retention probability of each active member, and the indices of those that leave."""

    retention: tuple[float, ...]
    leavers: tuple[int, ...]


class ExitPolicy(Protocol):
    """Decides after a verified round who leaves the answer."""

    def __call__(self, totals: Sequence[float], round_index: int) -> ExitDecision:
        """`totals[i]` = Σ over rounds of member i's aggregate score. Must leave at least one member."""
        ...


# ── score ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class MeanLogprob:
    """exp(Σ log p / units): the geometric mean probability per token or per byte; per text, that of the whole.

    Means favour long fluent candidates over short decided ones ("Paris." and the end of the turn), the whole favours
    short ones; "root" (units = √tokens, a length penalty of ½ as in beam search) stands between.
    """

    per: Literal["token", "byte", "text", "root"] = "token"

    def __call__(self, logprobs: Sequence[float], token_bytes: Sequence[int]) -> float:
        count = len(logprobs)
        units = {"token": count, "byte": sum(token_bytes), "text": 1, "root": math.sqrt(count)}[self.per]
        return math.exp(math.fsum(logprobs) / units)


@dataclass(frozen=True, slots=True)
class MeanProb:
    """Mean p (the papers' score). Per byte, a token of b bytes counts as b bytes of probability p^(1/b)."""

    per: Literal["token", "byte"] = "token"

    def __call__(self, logprobs: Sequence[float], token_bytes: Sequence[int]) -> float:
        if self.per == "token":
            return math.fsum(math.exp(lp) for lp in logprobs) / len(logprobs)
        spread = (b * math.exp(lp / b) for lp, b in zip(logprobs, token_bytes, strict=True))
        return math.fsum(spread) / sum(token_bytes)


# ── aggregate ────────────────────────────────────────────────────────────────────────────────────


def weighted_mean(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """S_i = Σ_j w_j s_ji (the papers')."""
    return [math.fsum(w * row[i] for w, row in zip(weights, scores, strict=True)) for i in range(len(scores[0]))]


def trimmed_mean(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """The weighted mean without each candidate's highest and lowest vote, where three or more members vote.

    So a member that is sure of its own nonsense cannot carry it, and no single verifier can veto.
    """

    def mean(i: int) -> float:
        votes = sorted((row[i], w) for row, w in zip(scores, weights, strict=True))
        votes = votes[1:-1] if len(votes) > 2 else votes
        return math.fsum(s * w for s, w in votes) / math.fsum(w for _, w in votes)

    return [mean(i) for i in range(len(scores[0]))]


SECOND = 1000.0
"""A candidate is unthinkable to a verifier that finds it less than 1/`SECOND` as likely as another one."""


def seconded_mean(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """The weighted mean, in which, where three or more vote, a candidate of one member needs a second.

    Its author's vote counts at most `SECOND` times the highest other one: a member that is sure of its own nonsense
    cannot carry it, and votes for what anybody else finds thinkable stay as they are. So a member that finds nothing
    likely but its own adds nothing and takes nothing: the others are ranked as without it.
    """

    def counted(j: int, i: int) -> float:
        if len(scores) < 3 or list(drafters[i]) != [j]:
            return scores[j][i]
        second = max(row[i] for k, row in enumerate(scores) if k != j)
        return min(scores[j][i], SECOND * second)

    return weighted_mean([[counted(j, i) for i in range(len(row))] for j, row in enumerate(scores)], weights, drafters)


def geometric_mean(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """S_i = Π_j s_ji^w_j: a candidate that one verifier finds impossible cannot win.

    With equal weights this ranks by regret too: how much less each verifier thinks of a candidate than of its own.
    """

    def mean(i: int) -> float:
        if any(row[i] <= 0 for row in scores):
            return 0.0
        return math.exp(math.fsum(w * math.log(row[i]) for w, row in zip(weights, scores, strict=True)))

    return [mean(i) for i in range(len(scores[0]))]


def others_mean(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """The weighted mean over those that did not write the candidate; over all, where everyone did."""

    def mean(i: int) -> float:
        judges = [j for j in range(len(scores)) if j not in drafters[i]] or range(len(scores))
        return math.fsum(weights[j] * scores[j][i] for j in judges) / math.fsum(weights[j] for j in judges)

    return [mean(i) for i in range(len(scores[0]))]


def share_mean(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """S_i = Σ_j w_j s_ji / Σ_k s_jk: every verifier has one vote to share out, whatever the height of its scores."""
    shares = [[s / (math.fsum(row) or 1.0) for s in row] for row in scores]
    return weighted_mean(shares, weights, drafters)


def rank_mean(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """S_i = Σ_j w_j · share of the rivals that verifier j puts below candidate i (Borda); ties count ½."""

    def beaten(row: Sequence[float], i: int) -> float:
        wins = (1.0 if row[i] > s else 0.5 if row[i] == s else 0.0 for k, s in enumerate(row) if k != i)
        return math.fsum(wins) / (len(row) - 1)

    ranks = [[beaten(row, i) for i in range(len(row))] for row in scores]
    return weighted_mean(ranks, weights, drafters)


# ── feedback ─────────────────────────────────────────────────────────────────────────────────────


def uniform(weights: Sequence[float], scores: Matrix, round_index: int) -> list[float]:
    """Weights stay as they began (SpecFuse)."""
    return list(weights)


def rewards(scores: Matrix, second: float | None = None) -> list[float]:
    """r_i: share of pairwise comparisons that member i's candidate wins in the eyes of third parties; ties count ½.

    A comparison is (i, rival k, verifier j) with j ∉ {i, k}. With `second`, verifiers that find both candidates less
    than 1/`second` as likely as the one they like best have no opinion: they would compare noise. Where no third party
    is left, the rival judges against its own candidate.
    """
    n = len(scores)
    if n < 2:
        return [0.0] * n

    def judges(i: int, k: int) -> list[int]:
        third = [j for j in range(n) if j not in (i, k)]
        if second is not None:
            third = [j for j in third if second * max(scores[j][i], scores[j][k]) >= max(scores[j])]
        return third or [k]

    def share(i: int) -> float:
        duels = [(scores[j][i], scores[j][k]) for k in range(n) if k != i for j in judges(i, k)]
        return sum(1.0 if mine > theirs else 0.5 if mine == theirs else 0.0 for mine, theirs in duels) / len(duels)

    return [share(i) for i in range(n)]


@dataclass(frozen=True, slots=True)
class OnlineFeedback:
    """SpecEM: w_i ← w_i · exp(η_t r_i), normalised.

    Schedules: `constant` η_t = rate, `sqrt_decay` η_t = rate/√t, `paper` η_t = rate·√(1/n)/t. Other than in the paper,
    verifiers to which two candidates are unthinkable do not compare them.
    """

    schedule: Literal["constant", "sqrt_decay", "paper"] = "constant"
    rate: float = 0.5

    def eta(self, n: int, round_index: int) -> float:
        if self.schedule == "paper":
            return self.rate * math.sqrt(1 / n) / round_index
        return self.rate / math.sqrt(round_index) if self.schedule == "sqrt_decay" else self.rate

    def __call__(self, weights: Sequence[float], scores: Matrix, round_index: int) -> list[float]:
        eta = self.eta(len(weights), round_index)
        won = rewards(scores, None if self.schedule == "paper" else SECOND)
        return normalised([w * math.exp(eta * r) for w, r in zip(weights, won, strict=True)])


def normalised(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [w / total for w in weights]


# ── exit ─────────────────────────────────────────────────────────────────────────────────────────


def never(totals: Sequence[float], round_index: int) -> ExitDecision:
    """Nobody leaves (an ablation of the paper)."""
    return ExitDecision((1 / len(totals),) * len(totals), ())


@dataclass(frozen=True, slots=True)
class RetentionExit:
    """SpecFuse exit, reconstructed: p = softmax(Q/τ); a member with p_i < δ = threshold/n leaves.

    `entropy`: τ = H·√t·q, H the normalised entropy of Q/ΣQ in (0, 1] and q = ΣQ/(n·t) the mean score of a round:
    √t because Q grows with t, H so that close races stay soft and clear ones sharpen, q so that only ratios of
    scores matter. Without q, small models (scores about 0.2) would hardly ever part. `fixed`: τ = 1. n counts the
    members still active; the best one always stays.
    """

    temperature: Literal["entropy", "fixed"] = "entropy"
    threshold: float = 0.5

    def __call__(self, totals: Sequence[float], round_index: int) -> ExitDecision:
        n, top = len(totals), max(totals)
        if self.temperature == "entropy":
            # Q/τ = √t · (Q / mean Q) / H
            unit = math.fsum(totals) / n or 1.0
            tau = entropy(totals) / math.sqrt(round_index)
        else:
            unit = tau = 1.0
        retention = normalised([math.exp((q - top) / unit / max(tau, 1e-9)) for q in totals])
        best = retention.index(max(retention))
        leavers = tuple(i for i, p in enumerate(retention) if p < self.threshold / n and i != best)
        return ExitDecision(tuple(retention), leavers)


def entropy(totals: Sequence[float]) -> float:
    """Normalised Shannon entropy of Q/ΣQ in [0, 1]; 1 where nothing can be told apart."""
    mass = math.fsum(totals)
    if len(totals) < 2 or mass <= 0:
        return 1.0
    shares = [q / mass for q in totals]
    return -math.fsum(s * math.log(s) for s in shares if s > 0) / math.log(len(totals))
