"""`specfuse-llm compare`: is the ensemble better than its best member, on these questions?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table
from rich.text import Text

from specfuse_shared.cli import terminal
from specfuse_shared.cli.setup import (
    AsJson,
    EnsembleFileOption,
    LibrariesVerbose,
    MembersOption,
    Preset,
    check_writable,
    chosen_ensemble,
    configure_logging,
    write_report,
)
from specfuse_shared.config import EnsembleConfig
from specfuse_shared.errors import ConfigError, SpecFuseError
from specfuse_shared.validation import check_choice

if TYPE_CHECKING:
    from specfuse_shared.comparing import Comparison, OnProgress, Progress, QuestionSet, Sampling, Suggestion, Tuned

TENTHS = 10

Questions = Annotated[
    Path | None,
    typer.Option(
        "--questions",
        metavar="FILE",
        help="Questions: .txt (one per line), .csv, .tsv or .jsonl.  [default: included questions]",
    ),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write an HTML report.")]
RunOption = Annotated[
    Path,
    typer.Option(
        "--run", metavar="FILE", help="File that stores the answers; a repeated run asks only what is missing."
    ),
]
LeaveOneOut = Annotated[
    bool, typer.Option("--leave-one-out", help="Also ask the ensemble without each of its members.")
]
Vote = Annotated[
    Path | None, typer.Option("--vote", metavar="FILE", help="Write a page for a blind vote on the answers.")
]
Against = Annotated[
    str | None,
    typer.Option(
        "--against", metavar="NAME", help="Member that the vote compares with the ensemble.  [default: the best one]"
    ),
]
Cast = Annotated[Path | None, typer.Option("--votes", metavar="FILE", help="Count the votes in a saved voting page.")]
AnswerTokens = Annotated[
    int | None, typer.Option("--max-tokens", metavar="N", min=1, help="The most tokens of an answer.")
]
Timed = Annotated[
    int, typer.Option("--timed", metavar="N", help="How many questions to ask one at a time, to measure time.")
]
Tune = Annotated[
    str | None,
    typer.Option(
        "--tune",
        metavar="FILE",
        help="Choose weights on half of the questions and confirm them on the other half; if they gain, write the "
        "ensemble to a TOML file (FILE#NAME; NAME is 'tuned' if unset).",
    ),
]
EqualComputeOption = Annotated[
    bool,
    typer.Option(
        "--equal-compute",
        help="Also ask the best member several times: as often as the ensemble's compute, and its time, allow.",
    ),
]
SampleTemperature = Annotated[
    float | None,
    typer.Option(
        "--sample-temperature", metavar="T", help="Temperature of the samples of --equal-compute.  [default: 0.7]"
    ),
]
MostSamples = Annotated[
    int | None,
    typer.Option(
        "--most-samples", metavar="N", help="The most samples of --equal-compute for a question.  [default: 32]"
    ),
]
SuggestOption = Annotated[
    bool,
    typer.Option("--suggest", help="Ask the members alone, and suggest pairs and trios."),
]
Judge = Annotated[
    str | None, typer.Option("--judge", metavar="WHO", help='"members": the members rate each other\'s answers.')
]


def compare(
    member: MembersOption = None,
    config: EnsembleFileOption = None,
    questions: Questions = None,
    out: Out = None,
    run: RunOption = Path("compare.jsonl"),
    leave_one_out: LeaveOneOut = False,
    equal_compute: EqualComputeOption = False,
    sample_temperature: SampleTemperature = None,
    most_samples: MostSamples = None,
    suggest: SuggestOption = False,
    vote: Vote = None,
    against: Against = None,
    votes: Cast = None,
    tune: Tune = None,
    judge: Judge = None,
    preset: Preset = "default",
    max_tokens: AnswerTokens = None,
    timed: Timed = 3,
    as_json: AsJson = False,
    verbose: LibrariesVerbose = False,
) -> int:
    """Compare the ensemble with its best member on your questions."""
    from specfuse_shared import comparing
    from specfuse_shared.comparing.libraries import check_libraries

    check_libraries()
    if suggest:
        _check_alone(
            {"--out": out, "--leave-one-out": leave_one_out, "--equal-compute": equal_compute, "--vote": vote}
            | {"--votes": votes, "--against": against, "--tune": tune, "--judge": judge}
        )
    sampling = _sampling(equal_compute, sample_temperature, most_samples)
    pages = _Pages.checked(out, vote, votes, against)
    question_set = comparing.read_questions(questions) if questions is not None else comparing.own_questions()
    ensemble = chosen_ensemble(member, config, preset)
    if against is not None:
        check_choice("--against", against, ensemble.names)
    more = _More.checked(ensemble, question_set, tune, judge)
    configure_logging(verbose)
    how: dict[str, Any] = {"run": run, "max_tokens": max_tokens}
    if suggest:
        return _suggest(ensemble, question_set, {**how, "timed": timed}, as_json)
    with _progress(terminal.stderr()) as on_progress:
        comparison = comparing.compare(
            ensemble,
            question_set,
            **how,
            leave_one_out=leave_one_out,
            equal_compute=sampling,
            timed=timed,
            on_progress=on_progress,
        )
        comparison = more.add(comparison, ensemble, question_set, how, on_progress)
    comparison = comparison if pages.cast is None else comparison.with_votes(pages.cast)
    if as_json:
        print(json.dumps(comparison.to_dict(), allow_nan=False))
    else:
        show_comparison(comparison, terminal.stdout())
    pages.write(comparison)
    more.write(comparison)
    print(f"answers: {terminal.visible(str(run))}", file=sys.stderr)
    return 0


def _check_alone(options: Mapping[str, object]) -> None:
    """Raises `ConfigError` for options that need an ensemble's answers."""
    conflicting = [name for name, value in options.items() if value]
    if conflicting:
        raise ConfigError(f"--suggest asks no ensemble: leave {', '.join(conflicting)} out")


def _sampling(equal_compute: bool, temperature: float | None, max_samples: int | None) -> Sampling | bool:
    """The settings of the samples, or False. Raises `ConfigError`."""
    from specfuse_shared.comparing import Sampling

    chosen = {name: value for name, value in (("temperature", temperature), ("most", max_samples)) if value is not None}
    if chosen and not equal_compute:
        raise ConfigError("--sample-temperature and --most-samples belong to --equal-compute: add it")
    return Sampling(**chosen) if equal_compute else False  # type: ignore[arg-type]


def _suggest(ensemble: EnsembleConfig, questions: QuestionSet, how: Mapping[str, Any], as_json: bool) -> int:
    from specfuse_shared import comparing

    with _progress(terminal.stderr()) as on_progress:
        suggestion = comparing.suggest(ensemble, questions, **how, on_progress=on_progress)
    if as_json:
        print(json.dumps(suggestion.to_dict(), allow_nan=False))
    else:
        show_suggestion(suggestion, terminal.stdout())
    print(f"answers: {terminal.visible(str(how['run']))}", file=sys.stderr)
    return 0


@dataclass(frozen=True, slots=True)
class _Pages:
    """The files to write, and votes from saved pages. `cast` votes count; `earlier` ones only stay on the page."""

    out: Path | None
    vote: Path | None
    against: str | None
    cast: Mapping[str, str] | None
    earlier: Mapping[str, str]

    @classmethod
    def checked(cls, out: Path | None, vote: Path | None, votes: Path | None, against: str | None) -> Self:
        """Raises `ConfigError` for a file that cannot be written or is no voting page."""
        from specfuse_shared.comparing import votes_on

        earlier = votes_on(vote) if vote is not None and vote.exists() else {}
        for file, option in ((out, "--out"), (vote, "--vote")):
            if file is not None:
                check_writable(file, option)
        return cls(out, vote, against, votes_on(votes) if votes is not None else None, earlier)

    def write(self, comparison: Comparison) -> None:
        if self.out is not None:
            write_report(self.out, comparison.to_html())
        if self.vote is not None:
            page = comparison.to_voting_page(self.against, {**self.earlier, **(self.cast or {})})
            write_report(self.vote, page, "voting page")


@dataclass(slots=True)
class _More:
    """Additional measurements. A failure is reported after the verdict, which it does not affect."""

    file: Path | None
    name: str
    judges: bool
    tuned: Tuned | None = None
    failure: SpecFuseError | None = None

    @classmethod
    def checked(cls, ensemble: EnsembleConfig, questions: QuestionSet, tune: str | None, judge: str | None) -> Self:
        """`tune`: FILE, or FILE#NAME. Raises `ConfigError` before any question is asked."""
        from specfuse_shared.comparing.tuning import check_config_file, tunable

        if judge is not None:
            check_choice("--judge", judge, ("members",))
        place, _, name = (tune or "").partition("#")
        if place:
            check_config_file(Path(place))
            check_writable(Path(place), "--tune")
            tunable(ensemble, questions)
        return cls(Path(place) if place else None, name or "tuned", judge is not None)

    def add(
        self,
        comparison: Comparison,
        ensemble: EnsembleConfig,
        questions: QuestionSet,
        how: Mapping[str, Any],
        on_progress: OnProgress,
    ) -> Comparison:
        """The comparison with the results of tuned weights and judges."""
        from specfuse_shared.comparing import rate, tune

        try:
            if self.judges:
                ratings = rate(comparison, ensemble, run=how["run"], on_progress=on_progress)
                comparison = replace(comparison, notes=(*comparison.notes, ratings.point))
            if self.file is not None:
                self.tuned = tune(ensemble, questions, **how, on_progress=on_progress)
                comparison = replace(comparison, notes=(*comparison.notes, self.tuned.point))
        except SpecFuseError as error:
            self.failure = error
        return comparison

    def write(self, comparison: Comparison) -> None:
        """Write the tuned ensemble if it gained. Raises the error of an earlier failure."""
        from specfuse_shared.comparing import write_ensemble

        if self.failure is not None:
            raise self.failure
        if self.file is not None and self.tuned is not None and self.tuned.gained:
            write_ensemble(
                self.file, self.name, self.tuned.config, [comparison.verdict.headline, self.tuned.point.text]
            )
            print(f"ensemble: {terminal.visible(str(self.file))} [ensembles.{self.name}]", file=sys.stderr)


@contextmanager
def _progress(console: Console) -> Iterator[OnProgress]:
    """A bar with the remaining time; without a terminal, a line for each stage and each tenth."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    if not console.is_terminal:
        last = ("", -1)

        def line(progress: Progress) -> None:
            nonlocal last
            now = (progress.stage, TENTHS * progress.done // max(1, progress.total))
            if now != last:
                print(terminal.visible(f"{progress.done}/{progress.total} {progress.stage}"), file=sys.stderr)
            last = now

        yield line
        return
    with ProgressBar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("answers", total=None)

        def show(progress: Progress) -> None:
            stage = terminal.visible(progress.stage)
            bar.update(task, description=stage, completed=progress.done, total=progress.total)

        yield show


def show_comparison(comparison: Comparison, out: Console) -> None:
    """The verdict, then its numbers."""
    verdict = comparison.verdict
    out.print(Text(terminal.visible(verdict.headline), style="bold"))
    for point in verdict.points:
        out.print(Text.assemble((f"{point.title}: ", "bold"), terminal.visible(point.text)))
    if verdict.limits:
        out.print(Text("Limits of this comparison:", style="dim bold"))
    for limit in verdict.limits:
        out.print(Text(f"  {terminal.visible(limit)}", style="dim"))
    for remark in comparison.remarks:
        out.print(Text(f"  {terminal.visible(remark)}", style="yellow"))
    out.print()
    out.print(_table(comparison))


def _table(comparison: Comparison) -> Table:
    """A column for the ensemble and each member."""
    from specfuse_shared.comparing.metrics import LABELS
    from specfuse_shared.comparing.scores import flop_text

    table = Table("", box=None, pad_edge=False, header_style="dim")
    names = [asker.name for asker in comparison.askers]
    for name in names:
        table.add_column(Text(terminal.visible(name)), justify="right", overflow="fold")
    for column in comparison.columns.values():
        title = f"{column.group}, {LABELS[column.metric]}" if column.metric else "all questions"
        points = [f"{column.means[name]:.1f}" for name in names]
        table.add_row(Text(terminal.visible(title)), *points)
    habits, costs = [comparison.habits[n] for n in names], [comparison.costs[n] for n in names]
    table.add_row("words", *(f"{each.words:.0f}" for each in habits))
    table.add_row("repetitive", *(f"{each.looping:.0f} %" for each in habits))
    table.add_row("seconds", *(terminal.duration(each.seconds) for each in costs))
    table.add_row("first words", *(terminal.duration(each.first_seconds) for each in costs))
    if comparison.equal is not None:
        table.add_row("forward passes", *("–" if each.forwards is None else f"{each.forwards:.0f}" for each in costs))
        table.add_row("compute", *(flop_text(each.flop) for each in costs))
    return table


SUGGESTED_LIMITS = (
    "No ensemble was asked. The prediction adds to the members' mean a third of the distance to the best answer of "
    "each question; the intervals do not include the error of this rule.",
    "The first of many sets was chosen on these questions, which favours it.",
)


def show_suggestion(suggestion: Suggestion, out: Console) -> None:
    """The recommendation, the warnings, and a line for each set of members."""
    out.print(Text(terminal.visible(suggestion.headline), style="bold"))
    means = ", ".join(f"{name} {mean:.1f}" for name, mean in sorted(suggestion.means.items(), key=lambda m: -m[1]))
    out.print(Text.assemble(("Alone: ", "bold"), terminal.visible(f"{means} points.")))
    for warning in suggestion.warnings:
        out.print(Text.assemble(("Too far apart: ", "bold"), terminal.visible(f"{warning}.")))
    out.print(Text("Limits of this comparison:", style="dim bold"))
    for limit in SUGGESTED_LIMITS:
        out.print(Text(f"  {limit}", style="dim"))
    for remark in suggestion.remarks:
        out.print(Text(f"  {terminal.visible(remark)}", style="yellow"))
    out.print()
    out.print(_sets(suggestion))
    if len(suggestion.combinations) < suggestion.sets:
        out.print(f"the first {len(suggestion.combinations)} of {suggestion.sets} sets")


def _sets(suggestion: Suggestion) -> Table:
    table = Table("", box=None, pad_edge=False, header_style="dim")
    for title in ("best", "gap", "only others right", "best contradicted", f"predicted, to {suggestion.best}"):
        table.add_column(Text(terminal.visible(title)), justify="right", overflow="fold")
    for each in suggestion.combinations:
        parts = (each.gap.mean, each.added.mean, each.contradicted.mean)
        table.add_row(
            Text(terminal.visible(" + ".join(each.members))),
            Text(terminal.visible(each.best)),
            *(f"{part:.1f}" for part in parts),
            Text(str(each.to_best), no_wrap=True),
        )
    return table
