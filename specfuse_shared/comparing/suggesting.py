"""Ask each member alone, and suggest which of them to combine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specfuse_shared.comparing.combinations import Suggestion, suggestion_of
from specfuse_shared.comparing.comparison import beforehand_of, enough_answers, question_set, rows_of_all
from specfuse_shared.comparing.libraries import check_libraries
from specfuse_shared.comparing.question_files import QuestionSet
from specfuse_shared.comparing.questions import Question
from specfuse_shared.comparing.run.asking import EvalRun, MakeEngine, OnProgress, systems_of
from specfuse_shared.comparing.run.run_file import RunFile
from specfuse_shared.comparing.scores import ALL, columns_of
from specfuse_shared.config import EnsembleConfig
from specfuse_shared.errors import SpecFuseError
from specfuse_shared.loading.ensembles import Models, config_of
from specfuse_shared.validation import check


def suggest(
    members: EnsembleConfig | Models,
    questions: QuestionSet | Sequence[Question | str | Mapping[str, Any]] | str | Path | None = None,
    *,
    run: str | Path | None = None,
    timed: int = 3,
    max_tokens: int | None = None,
    on_progress: OnProgress = lambda progress: None,
    make_engine: MakeEngine | None = None,
) -> Suggestion:
    """Rank pairs and trios of members by their answers alone; no ensemble runs.

    Members are loaded one after another. `compare` can resume the same `run`.

    Args:
        members: The candidates, their configuration, or "demo".
        questions: Questions with references, as in `compare`.
        run: A file that stores the answers.
        timed: Number of questions to ask one at a time.
        max_tokens: Limit of every answer, instead of its kind's default.
        on_progress: Called after each answer.
        make_engine: Makes the engines.

    Returns:
        The most promising combinations, with intervals.

    Raises:
        ConfigError: No question has references.

    Example:
        ```python
        from specfuse_shared.comparing import suggest

        asked = [{"text": "Name the capital of France.", "references": ["Paris"]}]
        print(suggest("demo", asked, run="run.jsonl", max_tokens=8, timed=0).headline)
        ```
    """
    check_libraries()
    config, question_list = config_of(members), question_set(questions)
    check(len(config.names) > 1, "a suggestion takes two members or more")
    scored = [question for question in question_list.questions if question.scored]
    check(bool(scored), "a suggestion needs questions with references: otherwise right answers are unknown")
    with RunFile(run) as file:
        asking = EvalRun(
            [asker for asker in systems_of(config) if asker.is_member],
            scored,
            file,
            max_tokens=max_tokens,
            timed=timed,
            make_engine=make_engine,
            on_progress=on_progress,
        )
        asking.ask_all()
    answers, complete, notes = enough_answers(asking)
    remarks = [*question_list.remarks, *notes]
    if len(complete) < 2:
        raise SpecFuseError(f"too few answers for a suggestion: {'; '.join(remarks)}")
    rows = rows_of_all(asking, answers, complete, remarks)
    names = [asker.name for asker in complete]
    column = columns_of(rows, {name: answers[name] for name in names}, names)[ALL]
    by_id = {question.id: question for question in rows}
    beforehand = beforehand_of(config, asking.sizes(), [by_id[row] for row in column.rows])
    return suggestion_of(column.points, remarks, beforehand)
