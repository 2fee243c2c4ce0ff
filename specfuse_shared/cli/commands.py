"""The command `specfuse-llm`, with `ask` and `doctor`: options, streams and exit codes.

`terminal` draws the output. torch is imported only when a model is needed, so that help, version and usage errors
appear at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from specfuse_shared.cli import terminal
from specfuse_shared.cli.chat import chat
from specfuse_shared.cli.compare import compare
from specfuse_shared.cli.serve import serve
from specfuse_shared.cli.setup import (
    INTERRUPTED,
    MEMBER,
    PROGRAM,
    SAMPLING,
    Answers,
    AsJson,
    BackendOption,
    Context,
    Devices,
    Dtype,
    EnsembleFileOption,
    Exit,
    Explain,
    Feedback,
    MaxTokens,
    MembersOption,
    Planned,
    Preset,
    Quantization,
    QuestionArgument,
    Report,
    Score,
    Seed,
    SegmentTokens,
    Stop,
    System,
    Temperature,
    Verbose,
    check_writable,
    chosen_ensemble,
    configure_logging,
    consoles,
    ensemble_of,
    in_options,
    loaded,
    skip_retries_offline,
    usage_line,
    write_report,
)
from specfuse_shared.config import EnsembleConfig, SamplingParams
from specfuse_shared.errors import ConfigError, RequestError, SpecFuseError
from specfuse_shared.events import EnsembleResult, Event, FinishEvent
from specfuse_shared.loading.sources import check_sources
from specfuse_shared.messages import Message
from specfuse_shared.placement.plan import ANSWERS, CONTEXT

FAILED, MISUSED = 1, 2
UsageError = cast("type[Any]", typer.BadParameter.__mro__[1])

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(serve)
app.command()(compare)
app.command()(chat)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 0, 1 (failed), 2 (misused) or 130 (interrupted)."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if closed
        _write_exactly(cast("Any", stream))
    try:
        code = int(app(args=argv, prog_name=PROGRAM, standalone_mode=False) or 0)
        return _complain("interrupted", code) if code == INTERRUPTED else code  # typer turns Ctrl-C into an exit
    except UsageError as error:
        return _complain(usage_line(error), MISUSED)
    except (ConfigError, RequestError) as error:
        return _complain(in_options(str(error)), MISUSED)
    except SpecFuseError as error:
        return _complain(in_options(str(error)), FAILED)
    except OSError as error:
        return _complain(
            f"{error.filename or 'the output'} cannot be read or written: {error.strerror or error}", FAILED
        )
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", INTERRUPTED)


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
    question: QuestionArgument,
    member: MembersOption = None,
    config: EnsembleFileOption = None,
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
    backend: BackendOption = MEMBER["backend"],
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
    options = {"segment_tokens": segment_tokens, "score": score, "feedback": feedback, "exit": exit}
    member_options = {"backend": backend, "dtype": dtype, "quantization": quantization}
    ensemble = chosen_ensemble(member, config, preset, member_options, options)
    messages = _messages(system, question)
    out, notes = consoles()
    with loaded(ensemble, verbose) as engine:
        events = engine.stream(messages, params)
        result = _result(events) if as_json else terminal.show_answer(events, out, notes)
    if as_json:
        print(json.dumps(result.to_dict(), allow_nan=False))
    if report:
        write_report(report, result.to_html(messages[-1].content))
    if explain and not as_json:
        terminal.show_rounds(result, out)
        terminal.show_differences(result, out)
    if not as_json:
        terminal.show_summary(result, notes)
    return 0


@app.command()
def doctor(
    member: MembersOption = None,
    plan: Planned = False,
    devices: Devices = None,
    answers: Answers = ANSWERS,
    context: Context = CONTEXT,
    backend: BackendOption = MEMBER["backend"],
    dtype: Dtype = MEMBER["dtype"],
    quantization: Quantization = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> int:
    """Load the members and report on each, or plan where they would go."""
    config = ensemble_of(member, {"backend": backend, "dtype": dtype, "quantization": quantization})
    configure_logging(verbose)
    skip_retries_offline()
    if plan or devices:
        check_sources(config)
        return _plan(config, devices, answers, context, as_json)
    with terminal.loading(Console(stderr=True)) as on_progress:
        from specfuse_shared.cli.doctor import examine

        checkup = examine(config, on_progress)
    if as_json:
        print(json.dumps(asdict(checkup)))
    else:
        terminal.show_checkup(checkup, terminal.stdout())
    for problem in checkup.problems:
        _complain(problem, FAILED)
    return FAILED if checkup.problems else 0


def _plan(config: EnsembleConfig, devices: str | None, answers: int, context: int, as_json: bool) -> int:
    from specfuse_shared.cli.doctor import predict_plan

    plan = predict_plan(config, devices, answers, context)
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
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text (byte {error.start})") from error


def _write_exactly(stream: Any) -> None:
    """Write UTF-8 with the answer's line ends to a file or pipe, independent of the system's defaults."""
    stream.reconfigure(errors="backslashreplace")
    if not stream.isatty():
        stream.reconfigure(encoding="utf-8", newline="\n")


def _result(events: Iterable[Event]) -> EnsembleResult:
    return next(event.result for event in events if isinstance(event, FinishEvent))


def _complain(message: str, code: int) -> int:
    """Print one line on stderr, without control characters."""
    print(f"{PROGRAM}: {terminal.visible(' '.join(message.split()))}", file=sys.stderr)
    return code
