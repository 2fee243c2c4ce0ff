"""The decisions of a round as pure functions over numbers: score, aggregate, elect, feedback, exit.

They use no tokenizer, tensor or framework. Protocols define the signatures, and users can pass their own functions.

- A score turns one verifier's log-probabilities of a candidate into a number in [0, 1].
- An aggregate combines all verifiers' scores of a candidate into a vote.
- An election removes the candidate with the lowest vote until one is left.
- Feedback changes the verifiers' weights after a round (SpecEM, arXiv 2412.07380 v3, NeurIPS 2025).
- An exit policy decides which members leave the answer (SpecFuse, arXiv 2412.07380 v1/v2). Its formulas are a
  reconstruction: the papers' exact ones could not be read.

Symbols: n members, verifier j, candidate i, s[j][i] in [0, 1], weights w with Σw = 1, vote S_i, verified round t, and
Q_i, the sum of the votes for member i's candidates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

from specfuse_shared.candidate import CandidateLogprobs, RoundCandidate

Schedule = Literal["constant", "sqrt_decay", "paper"]
Temperature = Literal["entropy", "fixed"]
Unit = Literal["token", "byte"]

Matrix = Sequence[Sequence[float]]
"""`[j][i]`: verifier j's value for candidate i."""
ROUNDING = 0.3
"""Tolerance in nats. A log-probability further above 0 is invalid. In half precision, two computations of one
log-probability differ by less."""


@runtime_checkable
class ScorePolicy(Protocol):
    """Turns one verifier's log-probabilities of all candidates of a round into a score in [0, 1] for each."""

    def __call__(self, candidates: Sequence[CandidateLogprobs]) -> list[float]:
        """Gets at least one candidate, each with at least one token, no two with equal text and end.

        Called again in the same round for the candidates that are left, as long as there are at least two.
        """
        ...


@runtime_checkable
class AggregatePolicy(Protocol):
    """Turns all verifiers' scores of each candidate into one vote."""

    def __call__(self, scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
        """Gets `scores[j][i]` and `weights[j]` (Σ = 1). Returns each candidate's vote, which is 0 or more.

        `drafters[i]`: the verifiers that wrote candidate i. A policy can have a method
        `outsiders(scores, weights, drafters)`, which is called with three or more verifiers. It returns the verifiers
        whose scores and drafts this round ignores. If no voter or no candidate would be left, there are no outsiders.
        """
        ...


@runtime_checkable
class FeedbackPolicy(Protocol):
    """Learns the verifiers' weights from a finished round."""

    def __call__(self, weights: Sequence[float], scores: Matrix, round_index: int) -> list[float]:
        """Gets verifier j's score of member i's candidate, `scores[j][i]` (n × n; 0 if it has none).

        `round_index`: number of verified rounds, from 1. Returns new weights, whose sum is 1.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExitDecision:
    """The retention probability of each present member (empty if none is computed), and who leaves, by index."""

    retention: tuple[float, ...]
    leavers: tuple[int, ...]


@runtime_checkable
class ExitPolicy(Protocol):
    """Decides after a verified round which members leave the answer."""

    def __call__(self, totals: Sequence[float], round_index: int) -> ExitDecision:
        """`totals[i]`: sum of the votes for member i's candidates in verified rounds. At least one member stays."""
        ...


def weighted_mean(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """S_i = Σ_j w_j s_ji (the papers')."""
    return [math.fsum(w * row[i] for w, row in zip(weights, scores, strict=True)) for i in range(len(scores[0]))]


PLAUSIBILITY_FACTOR = 1000.0
"""A verifier finds a candidate plausible unless its score of another one is more than this many times as high."""
MAJORITY = 0.5
"""A member with a larger share of the weight outvotes all others together."""
CONTINUE_PROBABILITY = 0.5
"""Of equal candidates, a longer one wins if its further tokens have at least this mean probability."""


@dataclass(frozen=True, slots=True)
class SecondedMean:
    """The weighted mean. Among three or more members, it limits an author's score of its own candidate.

    The author's score counts at most `PLAUSIBILITY_FACTOR` times the highest other score. So a member that is sure of
    its own nonsense needs a second member that finds it possible. The scores and drafts of `outsiders` are ignored. A
    member with over half of the weight is exempt, because weaker members may not know what it knows.
    """

    def __call__(self, scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
        def counted(j: int, i: int) -> float:
            if len(scores) < 3 or list(drafters[i]) != [j] or weights[j] > MAJORITY:
                return scores[j][i]
            second = max(row[i] for k, row in enumerate(scores) if k != j)
            return min(scores[j][i], PLAUSIBILITY_FACTOR * second)

        return weighted_mean(
            [[counted(j, i) for i in range(len(row))] for j, row in enumerate(scores)], weights, drafters
        )

    def outsiders(self, scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[int]:
        """Verifiers to whom only their own draft is plausible, if it is plausible to no other verifier.

        If that is true of all verifiers, there are none.
        """
        trusted = [
            (j, i)
            for j, row in enumerate(scores)
            for i, score in enumerate(row)
            if list(drafters[i]) != [j] and PLAUSIBILITY_FACTOR * score >= max(row)
        ]
        insiders = {j for j, _ in trusted} | {drafters[i][0] for _, i in trusted if len(drafters[i]) == 1}
        insiders |= {j for j, weight in enumerate(weights) if weight > MAJORITY} if insiders else set()
        return [j for j in range(len(scores)) if j not in insiders] if insiders else []


def geometric_mean(scores: Matrix, weights: Sequence[float], drafters: Sequence[Sequence[int]]) -> list[float]:
    """S_i = Π_j s_ji^w_j: a candidate that one verifier finds impossible cannot win.

    With equal weights, the order is the order by mean regret: by how much each verifier's log score of a candidate is
    below the one of its own candidate.
    """

    def mean(i: int) -> float:
        if any(row[i] <= 0 for row in scores):
            return 0.0
        return math.exp(math.fsum(w * math.log(row[i]) for w, row in zip(weights, scores, strict=True)))

    return [mean(i) for i in range(len(scores[0]))]


def uniform(weights: Sequence[float], scores: Matrix, round_index: int) -> list[float]:
    """Weights keep their initial values (SpecFuse)."""
    return list(weights)


def rewards(scores: Matrix, plausibility_factor: float | None = None) -> list[float]:
    """r_i: the share of pairwise comparisons that member i's candidate wins, judged by third members. A tie counts ½.

    In a comparison (i, k, j), verifier j compares i's candidate with k's; j is neither i nor k. With
    `plausibility_factor`, a verifier has no opinion if another candidate is more than that many times as likely to it
    as both, because it would compare noise. If no third verifier has an opinion, k is the verifier.
    """
    n = len(scores)
    if n < 2:
        return [0.0] * n

    def judges(i: int, k: int) -> list[int]:
        third = [j for j in range(n) if j not in (i, k)]
        if plausibility_factor is not None:
            third = [j for j in third if plausibility_factor * max(scores[j][i], scores[j][k]) >= max(scores[j])]
        return third or [k]

    def share(i: int) -> float:
        duels = [(scores[j][i], scores[j][k]) for k in range(n) if k != i for j in judges(i, k)]
        return sum(1.0 if mine > theirs else 0.5 if mine == theirs else 0.0 for mine, theirs in duels) / len(duels)

    return [share(i) for i in range(n)]


@dataclass(frozen=True, slots=True)
class OnlineFeedback:
    """SpecEM: w_i ← w_i · exp(η_t r_i), normalised.

    Schedules: `constant` η_t = rate, `sqrt_decay` η_t = rate/√t, `paper` η_t = rate·√(1/n)/t. Except with
    `paper`, verifiers do not compare two candidates that are both implausible to them (`PLAUSIBILITY_FACTOR`).
    """

    schedule: Schedule = "constant"
    rate: float = 0.5

    def eta(self, n: int, round_index: int) -> float:
        """The learning rate η_t.

        Args:
            n: Number of members.
            round_index: Verified rounds so far, this one included; ≥ 1.

        Returns:
            The rate by the schedule.

        Example:
            ```python
            from specfuse_shared.policies import OnlineFeedback

            print(OnlineFeedback("sqrt_decay", 0.5).eta(3, 4))
            ```
        """
        if self.schedule == "paper":
            return self.rate * math.sqrt(1 / n) / round_index
        return self.rate / math.sqrt(round_index) if self.schedule == "sqrt_decay" else self.rate

    def __call__(self, weights: Sequence[float], scores: Matrix, round_index: int) -> list[float]:
        eta = self.eta(len(weights), round_index)
        won = rewards(scores, None if self.schedule == "paper" else PLAUSIBILITY_FACTOR)
        return normalised([w * math.exp(eta * r) for w, r in zip(weights, won, strict=True)])


def normalised(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [w / total for w in weights]


_SIZE_POWER = 1.5
"""Exponent of a member's parameters. With 1, two members may outvote one that is far better. With 2, the largest
decides alone."""


def first_weights(configured: Sequence[float], sizes: Sequence[int], by_size: bool) -> list[float]:
    """Weights of the members' votes (Σ = 1) before any round.

    Args:
        configured: `MemberConfig.weight` of each.
        sizes: Parameters of each; 0 if unknown.
        by_size: Multiply by parameters^1.5, if all are known.
    """
    shares = [size**_SIZE_POWER if by_size and all(sizes) else 1.0 for size in sizes]
    return normalised([weight * share for weight, share in zip(configured, shares, strict=True)])


def never(totals: Sequence[float], round_index: int) -> ExitDecision:
    """No member leaves (an ablation of the paper), and no retention is computed."""
    return ExitDecision((), ())


@dataclass(frozen=True, slots=True)
class RetentionExit:
    """SpecFuse exit, reconstructed: p = softmax(Q/τ); a member with p_i < δ = threshold/n leaves.

    `entropy`: τ = H·√t·q, H the normalised entropy of Q/ΣQ in [0, 1] and q = ΣQ/(n·t) the mean score of a round:
    √t because Q grows with t, H so that p is flat for close totals and sharp for others, q so that only ratios of
    scores matter. Without q, small models (scores about 0.2) would hardly ever leave. `fixed`: τ = 1. n counts the
    members still active; the best `min_active` of them always stay.
    """

    temperature: Temperature = "entropy"
    threshold: float = 0.5
    min_active: int = 1

    def __call__(self, totals: Sequence[float], round_index: int) -> ExitDecision:
        n, top = len(totals), max(totals)
        if self.temperature == "entropy":
            # Q/τ = √t · (Q / mean Q) / H
            unit = math.fsum(totals) / n or 1.0
            tau = entropy(totals) / math.sqrt(round_index)
        else:
            unit = tau = 1.0
        retention = normalised([math.exp((q - top) / unit / max(tau, 1e-9)) for q in totals])
        best = sorted(range(n), key=lambda i: -totals[i])[: self.min_active]
        leavers = tuple(i for i, p in enumerate(retention) if p < self.threshold / n and i not in best)
        return ExitDecision(tuple(retention), leavers)


def entropy(totals: Sequence[float]) -> float:
    """Normalised Shannon entropy of Q/ΣQ in [0, 1]; 1 if the values are equal."""
    mass = math.fsum(totals)
    if len(totals) < 2 or mass <= 0:
        return 1.0
    shares = [q / mass for q in totals]
    return -math.fsum(s * math.log(s) for s in shares if s > 0) / math.log(len(totals))


@dataclass(frozen=True, slots=True)
class MeanLogprob:
    """exp(Σ log p / units): the geometric mean probability per token or per byte; per text, the total probability.

    Means favour long fluent candidates over short certain ones ("Paris." and the end of the turn); "text" favours
    short ones; "root" (units = √tokens, a length penalty of ½ as in beam search) lies between.
    """

    per: Literal["token", "byte", "text", "root"] = "token"

    def __call__(self, candidates: Sequence[CandidateLogprobs]) -> list[float]:
        return [math.exp(math.fsum(c.logprobs) / self._units(c)) for c in candidates]

    def _units(self, candidate: CandidateLogprobs) -> float:
        if self.per == "byte":
            return sum(candidate.token_bytes)
        count = len(candidate.logprobs)
        return {"token": count, "root": math.sqrt(count), "text": 1}[self.per]


@dataclass(frozen=True, slots=True)
class MeanProb:
    """Mean p (the papers' score). Per byte, a token of b bytes counts as b bytes of probability p^(1/b)."""

    per: Unit = "token"

    def __call__(self, candidates: Sequence[CandidateLogprobs]) -> list[float]:
        return [self._mean(c.logprobs, c.token_bytes) for c in candidates]

    def _mean(self, logprobs: Sequence[float], token_bytes: Sequence[int]) -> float:
        if self.per == "token":
            return math.fsum(math.exp(lp) for lp in logprobs) / len(logprobs)
        spread = (b * math.exp(lp / b) for lp, b in zip(logprobs, token_bytes, strict=True))
        return math.fsum(spread) / sum(token_bytes)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Probability of each candidate's beginning, up to the size of the shortest one: the stretch.

    B: bytes of the shortest candidate. ℓ_i = log p of the first B bytes of candidate i: tokens within them, and the
    one across the border whole (`per` "token") or in proportion to its bytes (`per` "byte"). The score is exp ℓ_i.
    If all candidates end the turn, they are complete, and B is the size of the longest: answers are scored in full.

    The end of the turn is a separate event. A candidate that ends within the stretch adds log p(end of turn). If a
    candidate continues the text of one that ends, only that text counts. If one of its tokens begins at that point,
    log(1 − p(end of turn)) is added. So "end here" is compared with "continue", for continuations of any length.

    With whole tokens, the scores of candidates that differ within the stretch are probabilities of events that exclude
    each other (Σ ≤ 1). So under a weighted mean, a draft whose text has half of the probability wins against all
    drafts that differ within the stretch. It also wins against its own beginnings, if they are encoded as its first
    tokens. A longer draft that begins with it may win instead.
    """

    per: Unit = "token"

    def __call__(self, candidates: Sequence[CandidateLogprobs]) -> list[float]:
        ending = sorted((c for c in candidates if c.ends), key=lambda c: c.size)
        shorter = [next((e for e in ending if _continues(c, e)), None) for c in candidates]
        size = self._size(candidates)
        return [math.exp(self._logprob(c, e, size)) for c, e in zip(candidates, shorter, strict=True)]

    def _size(self, candidates: Sequence[CandidateLogprobs]) -> int:
        """B in bytes."""
        sizes = [c.size for c in candidates]
        return max(sizes) if all(c.ends for c in candidates) else min(sizes)

    def _logprob(self, candidate: CandidateLogprobs, shorter: CandidateLogprobs | None, size: int) -> float:
        """ℓ_i; `shorter`: the shortest candidate that ends and that this one continues."""
        reach = size if shorter is None else min(size, shorter.size)
        logprob, read = log_beginning(candidate, reach, self.per)
        if candidate.ends and candidate.size <= reach:
            return logprob + candidate.logprobs[-1]
        if shorter is not None and read == reach == shorter.size:
            return logprob + _log_not(shorter.logprobs[-1])
        return logprob


def call_or_text_scores(candidates: Sequence[CandidateLogprobs]) -> list[float] | None:
    """Scores that separate tool calls from text: p of the tag that opens a call, and 1 − p. None: all are of one kind.

    Like the end of the turn, a call is a separate event. Compared by `Stretch`, calls would win too often: the grammar
    forces most of a call, while the probability of a text answer is spread over many first words.
    """
    calls = [c for c in candidates if c.call_bytes]
    if not 0 < len(calls) < len(candidates):
        return None
    call = max(calls, key=lambda c: c.call_bytes)
    p = min(1.0, math.exp(log_beginning(call, call.call_bytes)[0]))
    return [p if c.call_bytes else 1 - p for c in candidates]


def log_beginning(candidate: CandidateLogprobs, reach: int, per: Unit = "token") -> tuple[float, int]:
    """log p of the first `reach` bytes, and the byte of the candidate at which the counted tokens end."""
    count = len(candidate.logprobs) - candidate.ends
    # an encoding may reach back into the answer: bytes before the candidate have negative positions
    at, beginnings = min(0, candidate.size - sum(candidate.token_bytes[:count])), []
    for logprob, size in zip(candidate.logprobs[:count], candidate.token_bytes, strict=False):
        if at >= reach:
            break
        share = 1.0 if per == "token" else min(1.0, (reach - at) / size)
        beginnings.append(share * logprob)
        at += size
    return math.fsum(beginnings), at


def mean_after(candidate: CandidateLogprobs, size: int) -> float:
    """Geometric mean probability per token after the first `size` bytes, the end of the turn included.

    1 where no token begins there; 0 for a candidate without log-probabilities.
    """
    if not candidate.logprobs:
        return 0.0
    sizes = candidate.token_bytes
    begins = itertools.accumulate(sizes[:-1], initial=candidate.size + candidate.ends - sum(sizes))
    tail = [logprob for logprob, begin in zip(candidate.logprobs, begins, strict=True) if begin >= size]
    return math.exp(math.fsum(tail) / len(tail)) if tail else 1.0


def _continues(candidate: CandidateLogprobs, ending: CandidateLogprobs) -> bool:
    """Whether the candidate continues after the text of `ending`, which ends the turn."""
    return candidate.text.startswith(ending.text) and (not candidate.ends or candidate.text != ending.text)


def _log_not(logprob: float) -> float:
    """log(1 − p), from log p."""
    rest = -math.expm1(min(0.0, logprob))
    return math.log(rest) if rest > 0 else -math.inf


_EQUAL = 1e-6


@dataclass(frozen=True, slots=True)
class Election:
    """`scores[j][i]` of verifier j for candidate i, the vote on each candidate, and which one won."""

    scores: Matrix
    votes: Sequence[float]
    winner: int

    def is_clear(self, margin: float) -> bool:
        """Whether the vote for the winner is at least `margin` times the vote for every other candidate."""
        rest = [vote for i, vote in enumerate(self.votes) if i != self.winner]
        return self.votes[self.winner] > 0 and self.votes[self.winner] >= margin * max(rest, default=0.0)


@dataclass(frozen=True, slots=True)
class Electorate:
    """How candidates are compared: the `weights` of the verifiers by name (Σ = 1), and the two policies.

    `whole_values`: all candidates are whole values of a grammar. Then the scores of a verifier are scaled to the sum 1,
    because text outside of the grammar is no option. (Otherwise, in ARC's multiple-choice questions, a strong member
    loses to weak ones.)
    """

    score: ScorePolicy
    aggregate: AggregatePolicy
    weights: Mapping[str, float]
    whole_values: bool = False

    def elect(self, candidates: Sequence[RoundCandidate]) -> Election:
        """Compare candidates by the `logprobs` of every verifier.

        The candidate with the lowest vote is removed, and the rest are compared again, until one is left. So the length
        of a removed candidate no longer affects the others. `scores` come from the comparison of all candidates,
        `votes` from the first comparison without `outsiders`. A candidate that `repeats` has vote 0. It loses against
        every other candidate; with three or more voters, only against those with at least 1/1,000 of the highest vote.
        """
        scores, votes = self._compare(candidates)
        inner = self._without(self._outsiders(scores, candidates), candidates)
        if inner is not None:
            return replace(inner, scores=scores)
        winner = self._left(candidates, scores, votes)
        votes = [0.0 if candidate.repeats else vote for candidate, vote in zip(candidates, votes, strict=True)]
        return Election(scores, votes, candidates.index(winner))

    def _left(self, candidates: Sequence[RoundCandidate], scores: Matrix, votes: Sequence[float]) -> RoundCandidate:
        """The candidate that is left after the others have been removed one by one."""
        left = list(candidates)
        if any(candidate.repeats for candidate in candidates):
            threshold = max(votes) / PLAUSIBILITY_FACTOR if len(self.weights) > 2 else 0.0
            voted = zip(candidates, votes, strict=True)
            left = [c for c, vote in voted if not c.repeats and vote >= threshold] or left
        while len(left) > 1:
            if len(left) < len(candidates):
                scores, votes = self._compare(left)
            left.remove(self._last(left, scores, votes))
        return left[0]

    def _outsiders(self, scores: Matrix, candidates: Sequence[RoundCandidate]) -> set[str]:
        """Verifiers that the aggregate excludes as candidates and voters, if it has such a rule."""
        find = getattr(self.aggregate, "outsiders", None)
        if find is None or len(scores) < 3:
            return set()
        numbers = set(find(scores, list(self.weights.values()), self._authors(candidates)) or ())
        return {name for j, name in enumerate(self.weights) if j in numbers}

    def _without(self, outsiders: set[str], candidates: Sequence[RoundCandidate]) -> Election | None:
        """The election without these verifiers, and without what they alone wrote, which gets no vote.

        None if there are no outsiders, or if no voter or no candidate is left without them.
        """
        voters = {name: weight for name, weight in self.weights.items() if name not in outsiders}
        authors = {candidate: self.weights.keys() & candidate.drafters for candidate in candidates}
        left = [candidate for candidate, names in authors.items() if not names or names - outsiders]
        if not outsiders or not voters or not left:
            return None
        mass = math.fsum(voters.values())
        election = replace(self, weights={name: weight / mass for name, weight in voters.items()}).elect(left)
        votes = dict(zip(left, election.votes, strict=True))
        winner = candidates.index(left[election.winner])
        return Election(election.scores, [votes.get(candidate, 0.0) for candidate in candidates], winner)

    def _last(self, candidates: Sequence[RoundCandidate], scores: Matrix, votes: Sequence[float]) -> RoundCandidate:
        """Which of these candidates leaves: the one with the lowest vote; of a tie, the last one.

        Candidates with the same scores from every verifier are compared among themselves. If they stay equal, the
        shortest leaves if the voters give the best continuation at least `CONTINUE_PROBABILITY` per token.
        Otherwise the least probable continuation leaves.
        """
        lowest = max(range(len(candidates)), key=lambda n: (-votes[n], n))
        same = [candidates[n] for n in _same([*scores, votes], lowest)]
        if 1 < len(same) < len(candidates):
            return self._last(same, *self._compare(same))
        shortest = min(same, key=lambda c: (c.size, c.ends))
        longer = [c for c in same if c.size > shortest.size and c.text.startswith(shortest.text)]
        if shortest.ends or not longer:
            return candidates[lowest]
        expected = [self._expected(candidate, shortest.size) for candidate in longer]
        return shortest if max(expected) >= CONTINUE_PROBABILITY else longer[expected.index(min(expected))]

    def _expected(self, candidate: RoundCandidate, size: int) -> float:
        """Weighted mean of the verifiers' probabilities of this candidate after its first `size` bytes."""
        return math.fsum(w * mean_after(candidate.logprobs[name], size) for name, w in self.weights.items())

    def _compare(self, candidates: Sequence[RoundCandidate]) -> tuple[Matrix, list[float]]:
        """Scores and votes of these candidates, as if there were no others."""
        scores: Matrix = [self._scores([c.logprobs[name] for c in candidates]) for name in self.weights]
        if self.whole_values:
            scores = [[score / (math.fsum(row) or 1.0) for score in row] for row in scores]
        return scores, self.aggregate(scores, list(self.weights.values()), self._authors(candidates))

    def _authors(self, candidates: Sequence[RoundCandidate]) -> list[list[int]]:
        """The numbers of the verifiers that wrote each candidate."""
        numbers = {name: j for j, name in enumerate(self.weights)}
        return [[numbers[name] for name in c.drafters if name in numbers] for c in candidates]

    def _scores(self, row: Sequence[CandidateLogprobs]) -> list[float]:
        """One verifier's scores. A candidate has 0 if its log-probabilities are missing or above 0 (beyond `ROUNDING`).

        While both tool calls and text are candidates, only the choice between the two counts.
        """
        is_scored = [bool(candidate.logprobs) and all(p <= ROUNDING for p in candidate.logprobs) for candidate in row]
        scored = [candidate for candidate, is_seen in zip(row, is_scored, strict=True) if is_seen]
        scores = iter((call_or_text_scores(scored) or self.score(scored)) if scored else ())
        return [next(scores) if is_seen else 0.0 for is_seen in is_scored]


def _same(rows: Matrix, one: int) -> list[int]:
    """The candidates that no verifier can separate from this one, including itself."""
    return [i for i in range(len(rows[0])) if all(math.isclose(row[i], row[one], rel_tol=_EQUAL) for row in rows)]


__all__ = [
    "ROUNDING",
    "AggregatePolicy",
    "CandidateLogprobs",
    "Election",
    "Electorate",
    "ExitDecision",
    "ExitPolicy",
    "FeedbackPolicy",
    "Matrix",
    "MeanLogprob",
    "MeanProb",
    "OnlineFeedback",
    "RetentionExit",
    "ScorePolicy",
    "SecondedMean",
    "Stretch",
    "entropy",
    "geometric_mean",
    "never",
    "normalised",
    "rewards",
    "uniform",
    "weighted_mean",
]
