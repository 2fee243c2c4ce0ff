"""The best member alone at the ensemble's cost: the same compute, or the same number of seconds.

The best member is sampled several times, and its samples vote. The number of samples follows from counts and
measurements: compute is 2 · parameters · tokens that went through a model, and seconds are measured. A prompt counts
once per model, because samples share it.

The choice among a member's samples uses only the member's own output, no references.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from specfuse_shared.comparing.metrics import final_answer, score
from specfuse_shared.comparing.questions import Question
from specfuse_shared.comparing.run.asking import ENSEMBLE, Asker
from specfuse_shared.comparing.run.run_file import Answer
from specfuse_shared.comparing.run.sampling import Sampler, Timed, Wanted
from specfuse_shared.comparing.scores import ALL, Column, flop_of, mains_of
from specfuse_shared.comparing.verdict import FEWEST_ROWS
from specfuse_shared.config import EnsembleConfig

if TYPE_CHECKING:
    from specfuse_shared.comparing.comparison import Comparison


def chosen(question: Question, samples: Sequence[Answer]) -> Answer:
    """The most frequent final answer (letter, number, few words). The highest mean log p per token breaks ties.

    For answers that cannot be counted, the sample with the highest mean log p per token.
    """
    alike: dict[str, list[Answer]] = defaultdict(list)
    for sample in samples:
        if (final := final_answer(question, sample.text)) is not None:
            alike[final].append(sample)
    voted = max(alike.values(), key=lambda same: (len(same), fmean(map(certainty, same))), default=samples)
    return max(voted, key=certainty)


def best_by_references(question: Question, samples: Sequence[Answer]) -> Answer:
    """The sample with the most points: a ceiling, because this choice needs the references."""
    return max(samples, key=lambda sample: next(iter(score(question, sample.text).values())))


def certainty(sample: Answer) -> float:
    """Mean log p per token; minus infinity for an empty answer."""
    return -math.inf if sample.logprob is None else sample.logprob


Choose = Callable[[Question, Sequence[Answer]], Answer]
NO_REFERENCES = "no question has references, so better answers cannot be identified"
NOT_TIMED = "the ensemble and the best member were not timed on the same question (--timed)"
NOT_COUNTED = "an earlier version stored answers in this run's file without counting compute: use another file (--run)"


@dataclass(frozen=True, slots=True)
class EqualCompute:
    """The number of samples of the best member, and its derivation.

    `members`: group of questions → its best member, which was sampled. `paid`: group → samples for the ensemble's
    compute; infinite if a sample needs no tokens after the prompt. `samples`: "compute" and "seconds" → group →
    number of samples: rounded up, at most `most`; 1 is the member's greedy answer. `columns`: "compute", "seconds"
    and "ceiling" → the name of the system in the comparison. `missing`: the same → the reason for a missing one.
    """

    temperature: float
    most: int
    members: Mapping[str, str] = field(default_factory=dict)
    paid: Mapping[str, float] = field(default_factory=dict)
    samples: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self, columns: Mapping[str, Column]) -> dict[str, Any]:
        """The numbers of samples, and the ensemble's differences to them, as plain JSON.

        Args:
            columns: Scores by name, as in `Comparison.columns`.

        Returns:
            The fields, and `differences` by system and column.

        Example:
            ```python
            from specfuse_shared.comparing import EqualCompute

            print(EqualCompute(temperature=0.7, most=32).to_dict({})["samples"])
            ```
        """
        return {
            "temperature": self.temperature,
            "most": self.most,
            "members": dict(self.members),
            "paid": {group: paid if math.isfinite(paid) else None for group, paid in self.paid.items()},
            "samples": {what: dict(counts) for what, counts in self.samples.items()},
            "columns": dict(self.columns),
            "differences": {
                what: {title: column.between(ENSEMBLE, name).to_dict() for title, column in columns.items()}
                for what, name in self.columns.items()
            },
            "missing": dict(self.missing),
        }


def with_equal_compute(comparison: Comparison, config: EnsembleConfig, sampler: Sampler) -> Comparison:
    """The comparison with columns of the best member's samples. `config`: the ensemble's."""
    sampling = sampler.sampling
    if not comparison.columns:
        missing = {"compute": NO_REFERENCES, "seconds": NO_REFERENCES}
        return replace(comparison, equal=EqualCompute(sampling.temperature, sampling.most, missing=missing))
    return _Sampled(comparison, config, sampler).added()


class _Sampled:
    """The questions that can be scored, and the member that is sampled for each: the best one of its group, or of all
    questions if the group is too small."""

    def __init__(self, comparison: Comparison, config: EnsembleConfig, sampler: Sampler) -> None:
        whole = comparison.columns[ALL]
        self._comparison, self._config, self._sampler = comparison, config, sampler
        self._questions = [question for question in comparison.questions if question.scored]
        mains = mains_of(comparison.columns)
        self._members = {g: c.best if len(c.rows) >= FEWEST_ROWS else whole.best for g, c in mains.items()}
        self._samples: dict[str, Mapping[str, int]] = {}
        self._reasons: dict[str, str] = {}

    def added(self) -> Comparison:
        """Count, ask, and add the columns."""
        paid = self._count_by_compute()
        timed = self._timed()
        self._sampler.time(timed)
        self._count_by_seconds(timed)
        self._sampler.ask([self._wanted(question) for question in self._questions])
        columns: dict[str, str] = {}
        answers: dict[str, Mapping[str, Answer]] = {}
        for what, counts, choose in self._columns():
            if missing := self._missing(counts):
                self._reasons[what] = missing
                continue
            columns[what] = self._name(what, counts)
            answers[columns[what]] = self._chosen(counts, choose, timed)
        sampling = self._sampler.sampling
        equal = EqualCompute(
            sampling.temperature, sampling.most, self._members, paid, self._samples, columns, self._reasons
        )
        return self._with(answers, equal)

    def _with(self, answers: Mapping[str, Mapping[str, Answer]], equal: EqualCompute) -> Comparison:
        members = list(dict.fromkeys(self._members.values()))
        alone = self._config.only(members)
        weight = max(self._comparison.weights.get(name, 0) for name in members)
        return replace(
            self._comparison,
            askers=(*self._comparison.askers, *(Asker(name, alone, is_sampled=True) for name in answers)),
            answers={**self._comparison.answers, **answers},
            weights={**self._comparison.weights, **dict.fromkeys(answers, weight)},
            equal=equal,
        )

    # ── how many ─────────────────────────────────────────────────────────────────────────────────

    def _count_by_compute(self) -> dict[str, float]:
        """Group → samples that the ensemble's compute allows; empty if unknown."""
        unknown = [name for name in self._config.names if not self._comparison.sizes.get(name)]
        paid = {} if unknown else {group: self._paid(group) for group in self._members}
        if unknown:
            self._reasons["compute"] = f"the number of parameters of {', '.join(unknown)} is unknown"
        elif any(each is None for each in paid.values()):
            self._reasons["compute"] = NOT_COUNTED
        else:
            measured = {group: each for group, each in paid.items() if each is not None}
            self._samples["compute"] = {group: self._rounded(each) for group, each in measured.items()}
            return measured
        return {}

    def _paid(self, group: str) -> float | None:
        """Compute of the ensemble ÷ compute of one answer, both without the prompt."""
        budget = each = 0.0
        sizes = self._comparison.sizes
        for question in (q for q in self._questions if q.group == group):
            alone = self._greedy(question)
            whole, one = flop_of(self._ours(question), sizes), flop_of(alone, sizes)
            prompt = flop_of(replace(alone, work=tuple((who, read, 0) for who, read, _ in alone.work)), sizes)
            if whole is None or one is None or prompt is None:
                return None
            budget, each = budget + whole - prompt, each + one - prompt
        return budget / each if each else math.inf

    def _timed(self) -> list[Timed]:
        """The questions at which both the ensemble and the member were asked alone."""
        both = [q for q in self._questions if self._ours(q).alone and self._greedy(q).alone]
        counts = self._samples.get("compute", {})
        return [Timed(self._alone(q), q, counts.get(str(q.group), 1), self._ours(q).seconds) for q in both]

    def _count_by_seconds(self, timed: Sequence[Timed]) -> None:
        """The number of concurrent samples that take as long as the ensemble's answer: the mean of timed questions."""
        counts = []
        for row in timed:
            times = self._times(row)
            if len(times) > 1 or self._sampler.sampling.most == 1:
                counts.append(np.interp(row.seconds, np.maximum.accumulate(list(times.values())), list(times)))
        if counts:
            self._samples["seconds"] = dict.fromkeys(self._members, self._rounded(float(np.mean(counts))))
        else:
            self._reasons["seconds"] = "; ".join(self._sampler.failures.values()) or NOT_TIMED

    def _times(self, row: Timed) -> dict[int, float]:
        """Number of samples → their seconds; one is the greedy answer."""
        return {1: self._greedy(row.question).seconds, **self._sampler.times(row)}

    def _rounded(self, paid: float) -> int:
        """The number of samples, rounded up, which favours the member."""
        return max(1, math.ceil(min(paid, self._sampler.sampling.most)))

    # ── columns ──────────────────────────────────────────────────────────────────────────────────

    def _columns(self) -> Iterator[tuple[str, Mapping[str, int], Choose]]:
        for what, counts in self._samples.items():
            yield what, counts, chosen
        counts = next(iter(self._samples.values()), {})
        if any(count > 1 for count in counts.values()):
            yield "ceiling", counts, best_by_references

    def _name(self, what: str, counts: Mapping[str, int]) -> str:
        who = next(iter(self._members.values())) if len(set(self._members.values())) == 1 else "best of each kind"
        low, high = min(counts.values()), max(counts.values())
        many = f"{high} sample{'' if high == 1 else 's'}" if low == high else f"{low} to {high} samples"
        if what == "ceiling":
            return f"{who}, best of {many} (ceiling)"
        same = len(self._samples) > 1 and len(set(map(str, self._samples.values()))) == 1
        return f"{who}, {many} ({'equal compute and seconds' if same else f'equal {what}'})"

    def _chosen(self, counts: Mapping[str, int], choose: Choose, timed: Sequence[Timed]) -> dict[str, Answer]:
        """The answer to each question, with the work of all its samples."""
        times = {row.question.id: self._times(row) for row in timed}
        choices = {}
        for question in self._questions:
            count, samples = counts[str(question.group)], self._of(question, counts)
            seconds_of = times.get(question.id, {})
            seconds = float(np.interp(count, list(seconds_of), list(seconds_of.values()))) if seconds_of else None
            choices[question.id] = _with_work(choose(question, samples), samples, seconds)
        return choices

    def _of(self, question: Question, counts: Mapping[str, int]) -> list[Answer]:
        """A question's samples; a single one is the greedy answer."""
        count = counts[str(question.group)]
        if count == 1:
            return [self._greedy(question)]
        return self._sampler.samples(Wanted(self._alone(question), question, count))

    def _missing(self, counts: Mapping[str, int]) -> str:
        """The number of missing samples and the reason; empty if there are none."""
        expected = sum(counts[str(question.group)] for question in self._questions)
        there = sum(len(self._of(question, counts)) for question in self._questions)
        reason = "; ".join(f"{name}: {why}" for name, why in self._sampler.failures.items())
        return "" if there == expected else f"{expected - there} of {expected} samples failed ({reason})"

    def _wanted(self, question: Question) -> Wanted:
        count = max((counts[str(question.group)] for counts in self._samples.values()), default=1)
        return Wanted(self._alone(question), question, count if count > 1 else 0)

    def _alone(self, question: Question) -> EnsembleConfig:
        return self._config.only([self._members[str(question.group)]])

    def _greedy(self, question: Question) -> Answer:
        return self._comparison.answers[self._members[str(question.group)]][question.id]

    def _ours(self, question: Question) -> Answer:
        return self._comparison.answers[ENSEMBLE][question.id]


def _with_work(answer: Answer, samples: Sequence[Answer], seconds: float | None) -> Answer:
    """A chosen sample with the cost of all samples. Its first words come when the last sample has ended."""
    work = tuple((who, read, sum(s.work[n][2] for s in samples)) for n, (who, read, _) in enumerate(samples[0].work))
    forwards = sum(sample.forwards for sample in samples)
    took = seconds or 0.0
    return replace(answer, forwards=forwards, work=work, alone=seconds is not None, seconds=took, first_seconds=took)
