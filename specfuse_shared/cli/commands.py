"""The command `specfuse-llm`: ask the ensemble, or look at its members.

Knows options, streams and exit codes. What is shown is drawn by `terminal`; torch is imported only when a model is
needed, so that help, version and mistakes answer at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from specfuse_shared.cli import terminal
from specfuse_shared.cli.compare import compare
from specfuse_shared.cli.complaints import PROGRAM, in_options, usage_line
from specfuse_shared.cli.files import check_writable, write_report
from specfuse_shared.cli.serve import serve
from specfuse_shared.cli.setup import ConfigFile, Members, calm, chosen_ensemble, ensemble_of
from specfuse_shared.config import EXITS, FEEDBACKS, PRESETS, SCORES, EnsembleConfig
from specfuse_shared.errors import ConfigError, RequestError, SpecFuseError
from specfuse_shared.events import Event, FinishEvent
from specfuse_shared.member_config import DTYPES, QUANTIZATIONS, MemberConfig
from specfuse_shared.messages import Message
from specfuse_shared.placement.plan import ANSWERS, CONTEXT
from specfuse_shared.results import EnsembleResult
from specfuse_shared.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specfuse_shared.serving.engine import EnsembleEngine

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
UsageError = cast("type[Any]", typer.BadParameter.__mro__[1])
MEMBER: dict[str, Any] = {f.name: f.default for f in fields(MemberConfig)}
SAMPLING = SamplingParams()

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(serve)
app.command()(compare)

Question = Annotated[str, typer.Argument(metavar="QUESTION", help='What to ask; "-" reads standard input.')]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", help="Most tokens to answer with.")]
Temperature = Annotated[float, typer.Option("--temperature", metavar="T", help="0 is greedy.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="S", help="Makes a sampled answer repeatable.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="Ends the answer; repeatable.")]
Preset = Annotated[str, typer.Option("--preset", metavar="NAME", help=" | ".join(PRESETS))]
SegmentTokens = Annotated[
    int | None, typer.Option("--segment-tokens", metavar="L", help="Most tokens a member drafts a round.")
]
Score = Annotated[str | None, typer.Option("--score", metavar="NAME", help=" | ".join(SCORES))]
Feedback = Annotated[str | None, typer.Option("--feedback", metavar="NAME", help=" | ".join(FEEDBACKS))]
Exit = Annotated[str | None, typer.Option("--exit", metavar="NAME", help=" | ".join(EXITS))]
Dtype = Annotated[str, typer.Option("--dtype", metavar="NAME", help=" | ".join(DTYPES))]
Quantization = Annotated[str | None, typer.Option("--quantization", metavar="NAME", help=" | ".join(QUANTIZATIONS))]
Planned = Annotated[bool, typer.Option("--plan", help="Show where the members would go, without loading them.")]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices", metavar="LIST", help='Plan for other hardware: "80GB", "4x24GB", "24GB,cpu:64GB"; GB is 10⁹ bytes.'
    ),
]
Answers = Annotated[int, typer.Option("--answers", metavar="B", help="Answers at once that the plan makes room for.")]
Context = Annotated[int, typer.Option("--context", metavar="C", help="Tokens of context of each, in the plan.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Explain = Annotated[bool, typer.Option("--explain", help="Show every round after the answer.")]
Report = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Write the answer, explained, to an HTML file.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show members and library messages on stderr.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 0, 1 (failed), 2 (misused) or 130 (interrupted)."""
    for stream in (sys.stdout, sys.stderr):
        cast("Any", stream).reconfigure(errors="backslashreplace")
    try:
        return int(app(args=argv, prog_name=PROGRAM, standalone_mode=False) or 0)
    except UsageError as error:
        return _complain(usage_line(error), MISUSED)
    except (ConfigError, RequestError) as error:
        return _complain(in_options(str(error)), MISUSED)
    except SpecFuseError as error:
        return _complain(str(error), FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context, show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Several local language models answer together, segment by segment."""
    if show_version:
        print(PROGRAM, version("specfuse-llm"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def ask(
    question: Question,
    member: Members = None,
    config: ConfigFile = None,
    system: System = None,
    max_tokens: MaxTokens = SAMPLING.max_tokens,
    temperature: Temperature = SAMPLING.temperature,
    seed: Seed = None,
    stop: Stop = None,
    preset: Preset = "default",
    segment_tokens: SegmentTokens = None,
    score: Score = None,
    feedback: Feedback = None,
    exit: Exit = None,
    dtype: Dtype = MEMBER["dtype"],
    quantization: Quantization = None,
    as_json: AsJson = False,
    explain: Explain = False,
    report: Report = None,
    verbose: Verbose = False,
) -> int:
    """Answer a question, each segment in the colour of its author."""
    if report:
        check_writable(report, "--report")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, stop=tuple(stop or ()))
    given = {"segment_tokens": segment_tokens, "score": score, "feedback": feedback, "exit": exit}
    ensemble = chosen_ensemble(member, config, preset, {"dtype": dtype, "quantization": quantization}, given)
    messages = _messages(system, question)
    out, notes = _consoles()
    with _loaded(ensemble, verbose) as engine:
        events = engine.stream(messages, params)
        result = _result(events) if as_json else terminal.show_answer(events, out, notes)
    if as_json:
        print(json.dumps(result.to_dict(), allow_nan=False))
    if report:
        write_report(report, result.to_html(messages[-1].content))
    if explain and not as_json:
        terminal.show_rounds(result, out)
    if not as_json:
        terminal.show_summary(result, notes)
    return 0


@app.command()
def doctor(
    member: Members = None,
    plan: Planned = False,
    devices: Devices = None,
    answers: Answers = ANSWERS,
    context: Context = CONTEXT,
    dtype: Dtype = MEMBER["dtype"],
    quantization: Quantization = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> int:
    """Load the members and show what they turned out to be, or plan where they would go."""
    config = ensemble_of(member, {"dtype": dtype, "quantization": quantization})
    calm(verbose)
    if plan or devices:
        return _plan(config, devices, answers, context, as_json)
    from specfuse_shared.cli.doctor import examine

    with terminal.loading(Console(stderr=True)) as on_progress:
        checkup = examine(config, on_progress)
    if as_json:
        print(json.dumps(asdict(checkup)))
    else:
        terminal.show_checkup(checkup, terminal.stdout())
    for problem in checkup.problems:
        _complain(problem, FAILED)
    return FAILED if checkup.problems else 0


def _plan(config: EnsembleConfig, devices: str | None, answers: int, context: int, as_json: bool) -> int:
    from specfuse_shared.cli.doctor import foresee

    plan = foresee(config, devices, answers, context)
    if as_json:
        print(json.dumps(plan.to_dict()))
    else:
        terminal.show_plan(plan, terminal.stdout())
    return 0 if plan.problem is None else _complain(plan.problem, FAILED)


def _messages(system: str | None, question: str) -> list[Message]:
    text = _standard_input() if question == "-" else question
    if not text.strip():
        raise RequestError("the question is empty")
    return [*([Message("system", system)] if system else []), Message("user", text)]


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text (byte {error.start})") from error


@contextmanager
def _loaded(config: EnsembleConfig, verbose: bool) -> Iterator[EnsembleEngine]:
    calm(verbose)
    from specfuse_shared.serving.engine import EnsembleEngine

    errors = Console(stderr=True)
    with EnsembleEngine(config) as engine:
        with terminal.loading(errors) as on_progress:
            engine.load(on_progress)
        if verbose:
            terminal.show_members(engine.describe(), errors)
        yield engine


def _consoles() -> tuple[Console, Console]:
    """The answer goes to stdout; what is said about it joins it on a terminal, else stderr."""
    out = terminal.stdout()
    return out, out if out.is_terminal else terminal.stderr()


def _result(events: Iterable[Event]) -> EnsembleResult:
    return next(event.result for event in events if isinstance(event, FinishEvent))


def _complain(message: str, code: int) -> int:
    """One line on stderr, whatever the message holds."""
    print(f"{PROGRAM}: {terminal.visible(' '.join(message.split()))}", file=sys.stderr)
    return code
