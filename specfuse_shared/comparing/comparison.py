"""A comparison: answers of all askers to the same questions, their scores, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from specfuse_shared.comparing.combinations import Beforehand, combination_of
from specfuse_shared.comparing.equal_compute import EqualCompute, with_equal_compute
from specfuse_shared.comparing.libraries import check_libraries
from specfuse_shared.comparing.pages.voting import Votes, counted, voting_page
from specfuse_shared.comparing.question_files import QuestionSet, own_questions, read_questions
from specfuse_shared.comparing.questions import Question
from specfuse_shared.comparing.run.asking import ENSEMBLE, Asker, EvalRun, MakeEngine, OnProgress, systems_of
from specfuse_shared.comparing.run.run_file import Answer, RunFile
from specfuse_shared.comparing.run.sampling import Sampler, Sampling
from specfuse_shared.comparing.scores import Column, Cost, Habits, agreement_of, columns_of, cost_of, habits_of
from specfuse_shared.comparing.verdict import Point, Verdict, verdict_on
from specfuse_shared.config import EnsembleConfig
from specfuse_shared.errors import SpecFuseError
from specfuse_shared.loading.ensembles import Models, config_of
from specfuse_shared.policies import first_weights
from specfuse_shared.validation import check

LEAST_ANSWERED = 0.5
"""A system that has answered less than this share of the questions is left out, so that the others keep theirs."""


@dataclass(frozen=True)
class Comparison:
    """The answers of all systems, and the conclusions from them.

    `answers`: by system and question, for questions that all answered. `weights`: bytes of each system's models, 0 if
    unknown. `remarks`: exclusions and their reasons. `own`: the questions came with this package. `votes`: people's
    votes (`with_votes`). `notes`: further points of the verdict. `in_half`: members that compute in half precision.
    `sizes`: member → parameters, 0 if unknown. `equal`: the samples of the best member, if it was sampled.
    """

    questions: tuple[Question, ...]
    askers: tuple[Asker, ...]
    answers: Mapping[str, Mapping[str, Answer]]
    weights: Mapping[str, int]
    remarks: tuple[str, ...] = ()
    own: bool = False
    votes: Votes | None = None
    notes: tuple[Point, ...] = ()
    in_half: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    equal: EqualCompute | None = None

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the members that answered alone."""
        return tuple(asker.name for asker in self.askers if asker.is_member)

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Name → scores by group and metric; the first is over all questions. Empty if nothing can be scored."""
        return columns_of(self.questions, self.answers, self.members)

    @cached_property
    def habits(self) -> dict[str, Habits]:
        return {name: habits_of(answers) for name, answers in self.answers.items()}

    @cached_property
    def costs(self) -> dict[str, Cost]:
        return {name: cost_of(answers, self.weights.get(name, 0), self.sizes) for name, answers in self.answers.items()}

    @cached_property
    def agreement(self) -> dict[str, float]:
        """Question → overlap of the members' answers, 0 to 100."""
        return agreement_of(self.answers, self.members)

    @cached_property
    def verdict(self) -> Verdict:
        """The conclusions with their intervals, and the limits of the rows."""
        return verdict_on(self)

    def _suggested(self, column: Column) -> dict[str, Any] | None:
        """Statistics of the members' answers alone; None for a single member."""
        points = {name: column.points[name] for name in self.members}
        if len(points) < 2:
            return None
        config = next(asker.config for asker in self.askers if asker.name == ENSEMBLE)
        by_id = {question.id: question for question in self.questions}
        beforehand = beforehand_of(config, self.sizes, [by_id[row] for row in column.rows])
        return combination_of(points, beforehand=beforehand).to_dict()

    def without(self, member: str) -> str | None:
        """The ensemble without a member, if `compare(…, leave_one_out=True)` asked it; of two members, the other one.

        Args:
            member: Name of the member.

        Returns:
            The name of that system, or None if it was not asked.

        Example:
            ```python
            from specfuse_shared.comparing import compare

            asked = [{"text": "Name the capital of France.", "references": ["Paris"]}]
            comparison = compare("demo", asked, run="run.jsonl", max_tokens=8, timed=0)
            print(comparison.without(comparison.members[0]))
            ```
        """
        rest = [name for name in self.members if name != member]
        if len(self.members) == 2:
            return rest[0]
        return next((asker.name for asker in self.askers if asker.without == member), None)

    def to_html(self) -> str:
        """The report as one HTML file, which needs neither a network nor scripts.

        Returns:
            The HTML.

        Example:
            ```python
            from pathlib import Path

            from specfuse_shared.comparing import compare

            asked = [{"text": "Name the capital of France.", "references": ["Paris"]}]
            comparison = compare("demo", asked, run="run.jsonl", max_tokens=8, timed=0)
            Path("comparison.html").write_text(comparison.to_html(), "utf-8")
            ```
        """
        from specfuse_shared.comparing.pages.comparison_page import document

        return document(self)

    def to_voting_page(self, against: str | None = None, votes: Mapping[str, str] | None = None) -> str:
        """A page for a blind vote of people between the ensemble and a member.

        Args:
            against: Name of the member; the best one if unset.
            votes: Earlier votes, from `votes_on` a saved page.

        Returns:
            The HTML.

        Raises:
            ConfigError: All answers of the two are equal.

        Example:
            ```python
            from pathlib import Path

            from specfuse_shared import ConfigError

            from specfuse_shared.comparing import compare

            asked = [{"text": "Name the capital of France.", "references": ["Paris"]}]
            comparison = compare("demo", asked, run="run.jsonl", max_tokens=8, timed=0)
            try:
                print(Path("vote.html").write_text(comparison.to_voting_page(), "utf-8"), "characters")
            except ConfigError as error:
                print(error)
            ```
        """
        return voting_page(self, against, votes)

    def with_votes(self, votes: Mapping[str, str]) -> Comparison:
        """The comparison with votes of people, as a further point of the verdict.

        Args:
            votes: Key of a pair of answers → "left", "right" or "equal" (see `votes_on`).

        Returns:
            A new comparison. Votes on other answers do not count; a remark says so.

        Example:
            ```python
            from specfuse_shared.comparing import compare

            asked = [{"text": "Name the capital of France.", "references": ["Paris"]}]
            comparison = compare("demo", asked, run="run.jsonl", max_tokens=8, timed=0)
            print(comparison.with_votes({}).votes)
            ```
        """
        tally, remaining = counted(self, votes)
        remark = f"{remaining} of {len(votes)} votes are on other answers and do not count"
        return replace(self, votes=tally, remarks=(*self.remarks, remark) if remaining else self.remarks)

    def to_dict(self) -> dict[str, Any]:
        """The verdict, means, differences, habits and costs as plain JSON. The answers are in the run's file.

        Returns:
            The numbers, by name.

        Example:
            ```python
            from specfuse_shared.comparing import compare

            asked = [{"text": "Name the capital of France.", "references": ["Paris"]}]
            comparison = compare("demo", asked, run="run.jsonl", max_tokens=8, timed=0)
            print(comparison.to_dict()["verdict"]["headline"])
            ```
        """
        return {
            "verdict": asdict(self.verdict),
            "questions": len(self.questions),
            "columns": {
                name: {
                    "rows": len(column.rows),
                    "best": column.best,
                    "means": column.means,
                    "differences": {who: gap.to_dict() for who, gap in column.differences.items()},
                    "suggested": self._suggested(column),
                }
                for name, column in self.columns.items()
            },
            "habits": {name: asdict(each) for name, each in self.habits.items()},
            "costs": {name: asdict(each) for name, each in self.costs.items()},
            "equal": None if self.equal is None else self.equal.to_dict(self.columns),
            "votes": None if self.votes is None else {**asdict(self.votes), "share": self.votes.share.to_dict()},
            "remarks": list(self.remarks),
        }


def compare(
    members: EnsembleConfig | Models,
    questions: QuestionSet | Sequence[Question | str | Mapping[str, Any]] | str | Path | None = None,
    *,
    run: str | Path | None = None,
    leave_one_out: bool = False,
    equal_compute: Sampling | bool = False,
    timed: int = 3,
    max_tokens: int | None = None,
    on_progress: OnProgress = lambda progress: None,
    make_engine: MakeEngine | None = None,
) -> Comparison:
    """Compare an ensemble with its members on questions. Answers are greedy, samples are not.

    Args:
        members: The ensemble, its members, or "demo".
        questions: A file (see `read_questions`), a list of questions, or None for this package's questions.
        run: A file that stores the answers, so that a run can be resumed.
        leave_one_out: Also ask the ensemble without each of its members.
        equal_compute: Also sample the best member for the ensemble's compute, and for its seconds (`EqualCompute`).
        timed: Number of questions to ask one at a time, to measure time.
        max_tokens: Limit of every answer, instead of its kind's default.
        on_progress: Called after each answer.
        make_engine: Makes the engines.

    Returns:
        Answers, scores with 95 % intervals, and a verdict.

    Raises:
        ConfigError: The questions cannot be asked.
        MissingExtraError: The extra "compare" is not installed.
        MemberLoadError: A member cannot be loaded.

    Example:
        ```python
        from specfuse_shared.comparing import compare

        asked = [{"text": "Name the capital of France.", "references": ["Paris"]}]
        print(compare("demo", asked, max_tokens=8, timed=0).verdict.headline)
        ```
    """
    check_libraries()
    config = config_of(members)
    check(len(config.names) > 1, "a comparison takes two members or more: an ensemble of one is that member")
    check(timed >= 0, f"timed must be 0 or more, not {timed!r}")
    is_valid = isinstance(equal_compute, (bool, Sampling))
    check(is_valid, f"equal_compute must be True, False or a Sampling, not {equal_compute!r}")
    sampling = Sampling() if equal_compute is True else equal_compute or None
    question_list = question_set(questions)
    with RunFile(run) as file:
        asking = EvalRun(
            systems_of(config, leave_one_out),
            question_list.questions,
            file,
            max_tokens=max_tokens,
            timed=timed,
            make_engine=make_engine,
            on_progress=on_progress,
        )
        asking.ask_all()
        comparison = compared(asking, question_list)
        if sampling is None:
            return comparison
        sampler = Sampler(file, sampling, max_tokens=max_tokens, make_engine=make_engine, on_progress=on_progress)
        return with_equal_compute(comparison, config, sampler)


def beforehand_of(config: EnsembleConfig, sizes: Mapping[str, int], questions: Sequence[Question]) -> Beforehand:
    """The votes of the members (`sizes`: parameters, 0 if unknown), and the points of a guess to each question."""
    members = config.member_configs
    weights = first_weights(
        [member.weight for member in members],
        [sizes.get(member.label, 0) for member in members],
        config.first_weights == "size",
    )
    guessed = [100.0 / len(question.choices) if question.choices else 0.0 for question in questions]
    return Beforehand(dict(zip(config.names, weights, strict=True)), guessed)


def question_set(
    questions: QuestionSet | Sequence[Question | str | Mapping[str, Any]] | str | Path | None,
) -> QuestionSet:
    """The questions of a file, of the argument, or of this package. Raises `ConfigError`."""
    if questions is None:
        return own_questions()
    if isinstance(questions, QuestionSet):
        return questions
    if isinstance(questions, (str, Path)):
        return read_questions(questions)
    return QuestionSet.of(list(questions))


def compared(asking: EvalRun, questions: QuestionSet) -> Comparison:
    """The result of a run. Raises `SpecFuseError` if too few answers are left to compare."""
    answers, complete, missing = enough_answers(asking)
    remarks = [*questions.remarks, *missing]
    if ENSEMBLE not in (a.name for a in complete) or not any(a.is_member for a in complete):
        raise SpecFuseError(f"too few answers to compare: {'; '.join(remarks)}")
    rows = rows_of_all(asking, answers, complete, remarks)
    return Comparison(
        questions=tuple(rows),
        askers=tuple(complete),
        answers={a.name: {q.id: answers[a.name][q.id] for q in rows} for a in complete},
        weights={a.name: asking.weight_bytes(a) for a in complete},
        remarks=(*remarks, *_faults(answers)),
        own=questions.own,
        in_half=asking.in_half(),
        sizes=asking.sizes(),
    )


def enough_answers(asking: EvalRun) -> tuple[dict[str, dict[str, Answer]], list[Asker], list[str]]:
    """All answers, the systems that answered enough questions, and remarks about missing answers."""
    answers = asking.answers()
    minimum = LEAST_ANSWERED * len(asking.questions)
    complete = [asker for asker in asking.askers if len(answers[asker.name]) >= max(1, minimum)]
    return answers, complete, _missing(asking, answers, complete)


def rows_of_all(
    asking: EvalRun, answers: Mapping[str, Mapping[str, Answer]], complete: Sequence[Asker], remarks: list[str]
) -> list[Question]:
    """The questions that all systems have answered. Others add a remark. Raises `SpecFuseError` if there are none."""
    rows = [q for q in asking.questions if all(q.id in answers[asker.name] for asker in complete)]
    if not rows:
        raise SpecFuseError(f"there is no question that all have answered: {'; '.join(remarks)}")
    if len(rows) < len(asking.questions):
        remarks.append(f"{len(asking.questions) - len(rows)} of {len(asking.questions)} questions are left out")
    return rows


def _missing(asking: EvalRun, answers: Mapping[str, Mapping[str, Answer]], complete: Sequence[Asker]) -> list[str]:
    """A remark for each system without all answers, with the first reason."""
    remarks = []
    for asker in asking.askers:
        missing = len(asking.questions) - len(answers[asker.name])
        reason = next((why for (name, _), why in asking.failures.items() if name == asker.name), "")
        if missing:
            out = "" if asker in complete else ", and is left out"
            remarks.append(
                f"{asker.name} has no answer to {missing} of {len(asking.questions)} questions{out}: {reason}"
            )
    return remarks


def _faults(answers: Mapping[str, Mapping[str, Answer]]) -> list[str]:
    """A remark for each member that failed and left answers of an ensemble to the others."""
    remarks = []
    for name, of_asker in answers.items():
        failed = [member for answer in of_asker.values() for member in answer.faults]
        for member in dict.fromkeys(failed):
            remarks.append(
                f"{member} failed in {failed.count(member)} of {len(of_asker)} answers of {name} and left them"
            )
    return remarks
