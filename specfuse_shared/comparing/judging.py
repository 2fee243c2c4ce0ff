"""Members rate each other's answers, for questions without references.

r_j(i) = Σ s·p_j(s | question, answers) / Σ p_j(s) for the marks s = 1 … 5, after LLM-PeerReview (arXiv 2512.23213). A
judge reads all answers in both orders. Nothing is generated: only the probabilities of the marks are computed. Marks
are standardised by judge. No member rates its own answer.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from specfuse_shared.comparing.comparison import Comparison
from specfuse_shared.comparing.intervals import Interval, difference, share
from specfuse_shared.comparing.questions import LETTERS, Question
from specfuse_shared.comparing.run.asking import (
    ENSEMBLE,
    MakeEngine,
    OnProgress,
    Progress,
    asked_together,
    new_engine,
    size_of,
)
from specfuse_shared.comparing.run.run_file import RunFile, key_of
from specfuse_shared.comparing.scores import ALL
from specfuse_shared.comparing.verdict import FEWEST_ROWS, Point
from specfuse_shared.config import EnsembleConfig
from specfuse_shared.errors import EngineClosedError, SpecFuseError

MARKS = ("1", "2", "3", "4", "5")
SMALL = 6.5e9
"""Below this number of parameters, marks are not known to help: gains were published at 7 to 8 billion, and at 0.1 to
0.3 billion marks carried no information (docs/experiments.md)."""


@dataclass(frozen=True, slots=True)
class Rating:
    """A judge's mark of one answer: the mean of both orders, standardised over all marks of the judge."""

    judge: str
    question: str
    asker: str
    mark: float


@dataclass(frozen=True, slots=True)
class Ratings:
    """Marks that members give to answers of others.

    `to`: the member that the ensemble is compared with. `gap`: the ensemble's advantage in the marks of judges of both,
    in standard deviations. `agreed`: among pairs of answers that references rank, the number in which the better
    answer has the higher mark, and the number of pairs. `small`: judges that are too small to be reliable."""

    ratings: tuple[Rating, ...]
    to: str
    gap: Interval
    agreed: tuple[int, int]
    small: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def point(self) -> Point:
        """The ratings as a point of the verdict."""
        gap = f"{self.gap.mean:+.2f} [{self.gap.low:+.2f}, {self.gap.high:+.2f}]"
        parts = [f"the ensemble's answers are marked {gap} standard deviations higher than {self.to}'s"]
        if self.gap.rows < FEWEST_ROWS:
            parts[0] = f"too few questions to say ({self.gap.rows})"
        if self.agreed[1]:
            agreement = share(*self.agreed)
            share_text = f"{agreement.mean:.0f} % [{agreement.low:.0f}, {agreement.high:.0f}] of {agreement.rows} pairs"
            useless = "" if agreement.low > 50 else ": no better than chance, on these pairs"
            parts.append(f"marks agree with references on {share_text}, 50 % is chance{useless}")
        if self.small:
            names = ", ".join(self.small)
            parts.append(f"such marks are known to help from about 7 billion parameters on; smaller: {names}")
        return Point("Rated by members", "; ".join([*parts, *self.failures]) + ".")


@dataclass(frozen=True, slots=True)
class _Marking:
    """A judge reads a question and its answers in one order. `texts`: the different answers."""

    judge: EnsembleConfig
    question: Question
    texts: tuple[str, ...]
    place: int

    @property
    def prompt(self) -> str:
        listed = "\n\n".join(f"Answer {letter}:\n{text}" for letter, text in zip(LETTERS, self.texts, strict=False))
        return (
            f"{self.question.prompt}\n\n---\nAbove is a question. Here are answers to it.\n\n{listed}\n\n---\n"
            f"How good is answer {LETTERS[self.place]}? Mark it from 1 (wrong or useless) to 5 (right and helpful). "
            "Reply with the mark alone."
        )

    @property
    def key(self) -> str:
        return key_of(self.judge, ["mark", self.prompt])


@dataclass(slots=True)
class _Judging:
    """One run of readings. Those in the run's file are not repeated."""

    run: RunFile
    config: EnsembleConfig
    on_progress: OnProgress
    make_engine: MakeEngine
    failures: dict[str, str] = field(default_factory=dict)

    def read(self, readings: Sequence[_Marking]) -> None:
        todo = [reading for reading in readings if reading.key not in self.run]
        done, total = len(readings) - len(todo), len(readings)
        self.on_progress(Progress("members rate answers", done, total))
        if not todo:
            return
        with self.make_engine(self.config) as engine:
            engine.load()

            def ask(reading: _Marking) -> tuple[float, ...]:
                judge = reading.judge.names[0]
                return engine.log_probabilities(reading.prompt, MARKS, members=[judge])[judge]

            for reading, outcome in asked_together(engine, iter(todo), ask):
                self._keep(reading, outcome.result)
                done += 1
                self.on_progress(Progress("members rate answers", done, total))

    def _keep(self, reading: _Marking, read: Callable[[], Sequence[float]]) -> None:
        judge = reading.judge.names[0]
        try:
            logprobs = read()
        except EngineClosedError:
            raise
        except SpecFuseError as error:
            self.failures.setdefault(judge, str(error))
            return
        self.run.add(reading.key, {"judge": judge, "mark": mark_of(logprobs)})


def mark_of(logprobs: Sequence[float]) -> float:
    """The mean of the marks, weighted by their relative probabilities."""
    highest = max(logprobs)
    weights = [math.exp(value - highest) for value in logprobs]
    return sum(int(mark) * weight for mark, weight in zip(MARKS, weights, strict=True)) / sum(weights)


def rate(
    comparison: Comparison,
    config: EnsembleConfig,
    *,
    run: str | Path | None = None,
    on_progress: OnProgress = lambda progress: None,
    make_engine: MakeEngine = new_engine,
) -> Ratings:
    """Let the members rate each other's answers of a comparison.

    Args:
        comparison: Answers to rate.
        config: The ensemble whose members judge.
        run: A file that stores answers and marks.
        on_progress: Called after each mark.
        make_engine: Makes the engines.

    Returns:
        Marks, and how often they agree with references.

    Example:
        ```python
        from specfuse_shared import EnsembleConfig, demo_members
        from specfuse_shared.comparing import compare, rate

        asked = [{"text": "Name the capital of France.", "references": ["Paris"]}]
        comparison = compare("demo", asked, run="run.jsonl", max_tokens=8, timed=0)
        print(rate(comparison, EnsembleConfig(demo_members()), run="run.jsonl").point.text)
        ```
    """
    judges = {name: config.only([name]) for name in config.names}
    with RunFile(run) as file:
        judging = _Judging(file, config, on_progress, make_engine)
        readings = [
            r for q in comparison.questions for judge in judges.values() for r in _readings(comparison, q, judge)
        ]
        judging.read(readings)
        ratings = tuple(_standardised(_marks(comparison, judges, file)))
        small = tuple(name for name, judge in judges.items() if 0 < size_of(file, judge, "parameters") < SMALL)
    to = comparison.columns[ALL].best if comparison.columns else comparison.members[0]
    failures = tuple(f"{name} could not rate everything: {why}" for name, why in judging.failures.items())
    return Ratings(ratings, to, _gap(ratings, to), _agreed(comparison, ratings), small, failures)


def _texts(comparison: Comparison, question: Question) -> list[str]:
    """The different answers of members and the ensemble."""
    names = [name for name in comparison.answers if name in (*comparison.members, ENSEMBLE)]
    return list(dict.fromkeys(comparison.answers[name][question.id].text for name in names))


def _readings(comparison: Comparison, question: Question, judge: EnsembleConfig) -> Iterator[_Marking]:
    """Readings of every answer that is not the judge's own, in both orders."""
    texts = _texts(comparison, question)
    judges_answer = comparison.answers.get(judge.names[0], {}).get(question.id)
    for text in texts if len(texts) > 1 else ():
        if judges_answer is None or text != judges_answer.text:
            for order in (tuple(texts), tuple(reversed(texts))):
                yield _Marking(judge, question, order, order.index(text))


def _marks(comparison: Comparison, judges: Mapping[str, EnsembleConfig], run: RunFile) -> Iterator[Rating]:
    for question in comparison.questions:
        for name, judge in judges.items():
            marks: dict[str, list[float]] = defaultdict(list)
            for reading in _readings(comparison, question, judge):
                if (stored := run.get(reading.key)) is not None:
                    marks[reading.texts[reading.place]].append(float(stored["mark"]))
            for asker in (*comparison.members, ENSEMBLE):
                both = marks.get(comparison.answers[asker][question.id].text, [])
                if len(both) == 2:
                    yield Rating(name, question.id, asker, statistics.mean(both))


def _standardised(ratings: Iterator[Rating]) -> Iterator[Rating]:
    by_judge: dict[str, list[Rating]] = defaultdict(list)
    for rating in ratings:
        by_judge[rating.judge].append(rating)
    for judge, marks_of_judge in by_judge.items():
        middle = statistics.mean(rating.mark for rating in marks_of_judge)
        spread = statistics.pstdev(rating.mark for rating in marks_of_judge) or 1.0
        for rating in marks_of_judge:
            yield Rating(judge, rating.question, rating.asker, (rating.mark - middle) / spread)


def _by_question(ratings: Sequence[Rating]) -> dict[str, dict[str, dict[str, float]]]:
    """Question → judge → asker → mark."""
    by_question: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for rating in ratings:
        by_question[rating.question][rating.judge][rating.asker] = rating.mark
    return by_question


def _gap(ratings: Sequence[Rating], to: str) -> Interval:
    """The ensemble's advantage in marks over a member, by judges of both; a question is a row."""
    gaps = []
    for judges in _by_question(ratings).values():
        both = [marks[ENSEMBLE] - marks[to] for marks in judges.values() if ENSEMBLE in marks and to in marks]
        if both:
            gaps.append(statistics.mean(both))
    return difference(gaps, [0.0] * len(gaps))


def _agreed(comparison: Comparison, ratings: Sequence[Rating]) -> tuple[int, int]:
    """The number of pairs in which the better answer has the higher mark, and of pairs with different points and
    marks."""
    if not comparison.columns:
        return 0, 0
    whole, agreed, pairs = comparison.columns[ALL], 0, 0
    points = {row: {name: each[n] for name, each in whole.points.items()} for n, row in enumerate(whole.rows)}
    for row, judges in _by_question(ratings).items():
        for marks in judges.values():
            for one, two in combinations(marks, 2):
                better = points[row][one] - points[row][two] if row in points else 0.0
                if better and (higher := marks[one] - marks[two]):
                    pairs += 1
                    agreed += (better > 0) == (higher > 0)
    return agreed, pairs
