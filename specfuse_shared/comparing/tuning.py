"""Chooses vote weights and `exit` on half of the questions, and confirms them on the other half.

The tuned ensemble is added to a configuration file (TOML), with the reason in a comment.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specfuse_shared.comparing.comparison import question_set
from specfuse_shared.comparing.intervals import Interval, difference
from specfuse_shared.comparing.libraries import check_libraries, library
from specfuse_shared.comparing.metrics import score
from specfuse_shared.comparing.question_files import QuestionSet
from specfuse_shared.comparing.questions import Question
from specfuse_shared.comparing.run.asking import ENSEMBLE, Asker, EvalRun, MakeEngine, OnProgress, systems_of
from specfuse_shared.comparing.run.run_file import RunFile
from specfuse_shared.comparing.verdict import FEWEST_ROWS, Point
from specfuse_shared.config import EnsembleConfig, MemberConfig
from specfuse_shared.errors import ConfigError, SpecFuseError
from specfuse_shared.loading.config_files import ensemble_of_table, plain_config, read_toml, tables_of
from specfuse_shared.loading.ensembles import Models, config_of
from specfuse_shared.validation import check

_POLICIES = ("score", "aggregate", "feedback", "exit")


def check_writable_config(config: EnsembleConfig) -> None:
    """Raises `ConfigError` for an ensemble that cannot be written to a file."""
    for name in _POLICIES:
        if not isinstance(getattr(config, name), str):
            raise ConfigError(f"EnsembleConfig.{name} is an object, which a file cannot contain: set it by name")


def check_config_file(file: Path) -> None:
    """Raises `ConfigError` for an existing file that is not a configuration. Leaves it unchanged."""
    if file.exists():
        try:
            tables_of({"ensembles": {"": {}}, **read_toml(file)})
        except ConfigError as error:
            raise ConfigError(f"{file} is no configuration file: {error}") from error
        toml = library("tomlkit")
        if isinstance(toml.parse(file.read_text("utf-8-sig")).get("ensembles"), toml.items.InlineTable):
            raise ConfigError(f"{file} has `ensembles` as an inline table: write a table [ensembles.NAME] for each")


def write_ensemble(file: Path, name: str, config: EnsembleConfig, why: Sequence[str] = ()) -> None:
    """Add `[ensembles.NAME]` to a TOML file, or replace it, and keep the rest.

    Args:
        file: The file; it is created if it does not exist.
        name: The ensemble's name.
        config: The ensemble.
        why: Lines of a comment above the settings.

    Raises:
        ConfigError: The ensemble has objects that TOML cannot express, or the file is not a configuration.
        SpecFuseError: The file cannot be written.

    Example:
        ```python
        from pathlib import Path

        from specfuse_shared import EnsembleConfig, demo_members
        from specfuse_shared.comparing import write_ensemble

        write_ensemble(Path("specfuse.toml"), "small", EnsembleConfig(demo_members()), ["for short answers"])
        ```
    """
    check_writable_config(config)
    check_config_file(file)
    if config.first_segment_tokens is None:  # TOML has no None; 0 means the same
        config = replace(config, first_segment_tokens=config.segment_tokens)
    toml = library("tomlkit")
    document = toml.parse(file.read_text("utf-8-sig")) if file.exists() else toml.document()
    ensembles = document.setdefault("ensembles", toml.table(is_super_table=True))
    table = toml.table()
    for line in why:
        table.add(toml.comment(" ".join(line.split())))
    for key, value in table_of_ensemble(config).items():
        table.add(key, value)
    ensembles[name] = table
    text = toml.dumps(document)
    if ensemble_of_table(name, toml.parse(text).unwrap()["ensembles"][name]) != config:
        raise ConfigError(f"the ensemble {name!r} would not read back the same: write it by hand")
    _replace(file, text)


def table_of_ensemble(config: EnsembleConfig) -> dict[str, Any]:
    """The settings that differ from their defaults, as a TOML table."""
    settings = plain_config(config)
    if "feedback_limit" in settings and settings["feedback_limit"] is None:
        settings["feedback_limit"] = math.inf  # TOML has no None, and reads this as one
    settings["members"] = [_table_of_member(member) for member in config.member_configs]
    return settings


def _table_of_member(member: MemberConfig) -> Mapping[str, Any]:
    usual, settings = plain_config(MemberConfig(member.model), changed=False), plain_config(member, changed=False)
    return {"model": member.model, **{key: value for key, value in settings.items() if value != usual[key]}}


def _replace(file: Path, text: str) -> None:
    """Write the file atomically."""
    name = None
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as fresh:
            name = fresh.name
            fresh.write(text)
        os.chmod(name, file.stat().st_mode if file.exists() else 0o644)
        os.replace(name, file)  # fails on Windows while an editor has the file open
    except OSError as error:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        raise SpecFuseError(f"{file} cannot be written ({error.strerror})") from error


STEPS = (2.0, 8.0)
"""Factors for each member's weight. The next one is tried if the first improves nothing. After an improvement, the
weight is doubled as long as the result improves, up to the last factor."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best settings of the choosing half, and their gain on the confirming half.

    `change`: the change in words. `chosen`: the gain on the half that chose them, which is too optimistic. `gain`: the
    gain on the other half. `best`: the best member of the choosing half. `to_best`: difference of the tuned ensemble to
    that member.
    """

    config: EnsembleConfig
    change: str
    tried: int
    chosen: Interval
    gain: Interval
    best: str
    to_best: Interval

    @property
    def gained(self) -> bool:
        """Whether the confirming half shows a gain: the interval is above zero, and there are enough rows."""
        return self.gain.above and self.gain.rows >= FEWEST_ROWS

    @property
    def point(self) -> Point:
        """The result as a point of the verdict."""
        if not self.change:
            return Point("Tuned", f"none of {self.tried} settings is better than the current ones.")
        sentence = f"{self.change} gives {self.gain} points on the {self.gain.rows} questions that did not choose it"
        chosen = f"{self.chosen.mean:+.1f} on the {self.chosen.rows} that did, of {self.tried} settings tried"
        caveat = "" if self.gained else ": no gain is shown"
        return Point("Tuned", f"{sentence} ({chosen}){caveat}; to {self.best} alone {self.to_best}.")


def tune(
    members: EnsembleConfig | Models,
    questions: QuestionSet | Sequence[Question | str | Mapping[str, Any]] | str | Path | None = None,
    *,
    run: str | Path | None = None,
    max_tokens: int | None = None,
    on_progress: OnProgress = lambda progress: None,
    make_engine: MakeEngine | None = None,
) -> Tuned:
    """Choose weights and `exit` on half of the questions with references; confirm them on the other half.

    Args:
        members: The ensemble, its members, or "demo".
        questions: Questions with references, as in `compare`.
        run: A file that stores the answers.
        max_tokens: Limit of every answer, instead of its kind's default.
        on_progress: Called after each answer.
        make_engine: Makes the engines.

    Returns:
        The settings, and their gain on both halves.

    Raises:
        ConfigError: There are too few questions, or the ensemble cannot be written to a file; no model was loaded.

    Example:
        ```python
        from specfuse_shared import ConfigError
        from specfuse_shared.comparing import tune

        try:
            print(tune("demo", "questions.csv", run="run.jsonl").config.names)
        except ConfigError as error:
            print(error)
        ```
    """
    check_libraries()
    config, question_list = config_of(members), question_set(questions)
    choosing, confirming = tunable(config, question_list)
    with RunFile(run) as file:
        tuning = _Tuning(file, max_tokens, on_progress, make_engine)
        best, tried = _search(config, choosing, tuning)
        return _confirmed(config, best, tried, choosing, confirming, tuning)


def tunable(config: EnsembleConfig, asked: QuestionSet) -> tuple[list[Question], list[Question]]:
    """The halves of the questions that can be scored. Raises `ConfigError` if they are too few to confirm anything, or
    if the ensemble cannot be written to a file."""
    check(len(config.names) > 1, "tuning takes two members or more")
    check_writable_config(config)
    scored = [question for question in asked.questions if question.scored]
    choosing, confirming = halves(scored)
    check(
        len(confirming) >= FEWEST_ROWS,
        f"tuning takes {2 * FEWEST_ROWS} questions with references or more, half of them to confirm what the other "
        f"half chose: there are {len(scored)}",
    )
    return choosing, confirming


def halves(questions: Sequence[Question]) -> tuple[list[Question], list[Question]]:
    """Two halves with similar groups. Questions on the same passage are in the same half."""
    clusters: dict[tuple[str, str], list[Question]] = defaultdict(list)
    for question in questions:
        clusters[question.group or "", question.passage or question.id].append(question)
    sides: dict[str, tuple[list[Question], list[Question]]] = defaultdict(lambda: ([], []))
    both: tuple[list[Question], list[Question]] = ([], [])
    for (group, _), cluster in clusters.items():
        first, second = sides[group]
        first_is_smaller = (len(first), len(both[0])) <= (len(second), len(both[1]))
        (first if first_is_smaller else second).extend(cluster)
        both[not first_is_smaller].extend(cluster)
    return both


@dataclass(frozen=True, slots=True)
class _Tuning:
    """The points of settings, with answers stored in the run's file."""

    run: RunFile
    max_tokens: int | None
    on_progress: OnProgress
    make_engine: MakeEngine | None

    def points(self, askers: Sequence[Asker], questions: Sequence[Question]) -> dict[str, dict[str, float]]:
        """Asker → question → points by the main metric. Failed answers are missing."""
        asking = EvalRun(
            askers,
            questions,
            self.run,
            max_tokens=self.max_tokens,
            timed=0,
            make_engine=self.make_engine,
            on_progress=self.on_progress,
        )
        asking.ask_all()
        by_id = {question.id: question for question in questions}
        return {
            name: {row: next(iter(score(by_id[row], answer.text).values())) for row, answer in of_asker.items()}
            for name, of_asker in asking.answers().items()
        }


def _search(config: EnsembleConfig, questions: Sequence[Question], tuning: _Tuning) -> tuple[EnsembleConfig, int]:
    """The best settings on these questions: tries equal votes, then a heavier vote for each member, then `exit`."""
    best, mean, tried = config, _mean(config, questions, tuning), 1

    def attempt(candidate: EnsembleConfig) -> bool:
        nonlocal best, mean, tried
        score = _mean(candidate, questions, tuning)
        tried += 1
        better = score > mean
        if better:
            best, mean = candidate, score
        return better

    if config.first_weights != "equal":  # a better small member may need more than the factors below
        attempt(replace(config, first_weights="equal"))
    base, better = best, list[str]()
    for step in STEPS:
        better = better or [name for name in config.names if attempt(_heavier(base, name, step))]
    while better and _spread(best) < STEPS[-1]:  # continue with the last improvement, which is in `best`
        if not attempt(_heavier(best, better[-1], STEPS[0])):
            break
    if best.exit == "never":
        attempt(replace(best, exit="entropy"))
    return best, tried


def _heavier(config: EnsembleConfig, name: str, step: float) -> EnsembleConfig:
    """A member with its weight multiplied by this factor."""
    members = [replace(m, weight=m.weight * step) if m.label == name else m for m in config.member_configs]
    return replace(config, members=members)


def _spread(config: EnsembleConfig) -> float:
    weights = [member.weight for member in config.member_configs]
    return max(weights) / min(weights)


def _mean(config: EnsembleConfig, questions: Sequence[Question], tuning: _Tuning) -> float:
    points = tuning.points([Asker(ENSEMBLE, config)], questions)[ENSEMBLE]
    if len(points) < len(questions):
        missing = len(questions) - len(points)
        raise SpecFuseError(f"{missing} of {len(questions)} questions were not answered: run it again to continue")
    return statistics.mean(points.values())


def _confirmed(
    config: EnsembleConfig,
    best: EnsembleConfig,
    tried: int,
    choosing: Sequence[Question],
    confirming: Sequence[Question],
    tuning: _Tuning,
) -> Tuned:
    """The best settings against the original ones, on both halves; and against the best member of the choosing half."""
    members = [asker for asker in systems_of(config) if asker.is_member]
    askers = [Asker("before", config), Asker("after", best), *members]
    ours, theirs = tuning.points(askers, choosing), tuning.points(askers, confirming)
    rival = max(members, key=lambda m: statistics.mean(ours[m.name].values() or [0.0])).name
    return Tuned(
        config=best,
        change=_change_text(config, best),
        tried=tried,
        chosen=_gap(ours, "after", "before"),
        gain=_gap(theirs, "after", "before"),
        best=rival,
        to_best=_gap(theirs, "after", rival),
    )


def _gap(points: Mapping[str, Mapping[str, float]], ours: str, theirs: str) -> Interval:
    rows = [row for row in points[ours] if row in points[theirs]]
    return difference([points[ours][row] for row in rows], [points[theirs][row] for row in rows])


def _change_text(before: EnsembleConfig, after: EnsembleConfig) -> str:
    """The change in words; empty if there is none."""
    parts = []
    if before.first_weights != after.first_weights:
        parts.append("equal votes")
    if before.member_configs != after.member_configs:
        changed = [new for old, new in zip(before.member_configs, after.member_configs, strict=True) if old != new]
        parts.append("weight " + ", ".join(f"{m.weight:g} for {m.label}" for m in changed))
    if before.exit != after.exit:
        parts.append(f'exit = "{after.exit}"')
    return " and ".join(parts)
