"""Code that commands share.

- the ensemble that options describe, and quiet libraries
- error messages with option names
- output files, which are checked before any model is loaded
- the loaded engine, and the consoles
- common options, with the defaults of the settings
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import socket
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_args
from urllib.parse import urlsplit
from urllib.request import getproxies

import typer
from rich.console import Console

from specfuse_shared.cli import terminal
from specfuse_shared.config import (
    DEMO,
    PRESETS,
    BackendName,
    DtypeName,
    EnsembleConfig,
    ExitName,
    FeedbackName,
    MemberConfig,
    QuantizationName,
    SamplingParams,
    ScoreName,
)
from specfuse_shared.errors import ConfigError, SpecFuseError
from specfuse_shared.loading.config_files import read_ensemble
from specfuse_shared.loading.sources import check_sources

if TYPE_CHECKING:
    from specfuse_shared.serving.engine import EnsembleEngine

MembersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--member",
        "--members",
        metavar="MODEL",
        help="Hub id, folder, GGUF file, ollama:NAME, or MODEL@URL of a vLLM server; can be repeated. Unset: the demo.",
    ),
]
EnsembleFileOption = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="FILE", help="TOML file of an ensemble (FILE#NAME picks one of several); not with --member."
    ),
]
MEMBER_KEY_ENV = "SPECFUSE_SERVER_KEY"
"""The environment variable with the key of the members' servers."""
CHATTY = ("accelerate", "huggingface_hub", "torchao", "torch.utils._pytree")
"""Libraries that warn of unused compiled extensions, of offloaded weights, and of each retry."""
_HUB_SECONDS = 3.0


def ensemble_of(
    models: Sequence[str] | None,
    member: Mapping[str, Any],
    preset: str = "default",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> EnsembleConfig:
    """The ensemble that options describe; None means unset. Settings are checked before the demo is looked up."""
    if models and list(models) == [DEMO] and not Path(DEMO).exists():
        models = None
    settings = {name: value for name, value in options.items() if value is not None}
    members = [member_of(model, member) for model in models or ["of the demo"]]
    config = EnsembleConfig.preset(preset, members, **settings)
    if models:
        return config
    from specfuse_shared.loading.demo import demo_members

    backend = member.get("backend", "auto")
    if backend == "llama.cpp":
        typer.echo("on llama.cpp the demo runs without its adapters, because they are not GGUF files", err=True)
    return replace(config, members=[replace(demo, **member) for demo in demo_members(backend=backend)])


def chosen_ensemble(
    models: Sequence[str] | None,
    file: str | None,
    preset: str = "default",
    member: Mapping[str, Any] = MappingProxyType({}),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> EnsembleConfig:
    """The ensemble of a configuration file, or the one that options describe."""
    if file is None:
        return ensemble_of(models, member, preset, options)
    defaults = {f.name: f.default for f in fields(MemberConfig)}
    changed = [name for name, value in {**member, **options}.items() if value not in (None, defaults.get(name))]
    if models or preset != "default" or changed:
        also = "".join(f", --{name.replace('_', '-')}" for name in changed)
        raise ConfigError(f"--config sets the members and their settings: leave --member, --preset{also} out")
    return read_ensemble(file)


def member_of(model: str, settings: Mapping[str, Any]) -> MemberConfig:
    """The member for MODEL, or for MODEL@http://… on a server, which decides the other settings."""
    name, at, rest = model.partition("@http")
    if not at:
        return MemberConfig(model, **settings)
    return MemberConfig(
        name, server=f"http{rest}", api_key_env=MEMBER_KEY_ENV if os.environ.get(MEMBER_KEY_ENV) else None
    )


def configure_logging(verbose: bool) -> None:
    """Show messages and progress bars of libraries only if `verbose`."""
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        return
    warnings.simplefilter("ignore")
    for library in CHATTY:
        logging.getLogger(library).setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")


def skip_retries_offline() -> None:
    """Without a network, make huggingface_hub use its cache at once. Otherwise it retries for half a minute.

    Call this before that library is imported. With a proxy, it does nothing, because the proxy may reach the hub.
    """
    if "HF_HUB_OFFLINE" in os.environ or getproxies():
        return
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname or ""
    lost: list[OSError] = []

    def look_up() -> None:
        try:
            socket.getaddrinfo(host, 443)
        except OSError as error:
            lost.append(error)

    looking = threading.Thread(target=look_up, daemon=True)
    looking.start()
    looking.join(_HUB_SECONDS)
    if lost:
        os.environ["HF_HUB_OFFLINE"] = "1"


PROGRAM = "specfuse-llm"
INTERRUPTED = 130
"""The exit code after Ctrl-C."""
_OPTIONS = (
    *("member", "max_tokens", "temperature", "seed", "stop", "preset", "segment_tokens", "score", "feedback", "exit"),
    *("backend", "dtype", "quantization", "host", "port", "api_key_env"),
)
"""Settings that are also options of a command."""


def usage_line(error: Any) -> str:
    """A usage error as one line."""
    command = error.ctx.command_path if error.ctx else PROGRAM
    option, similar = getattr(error, "option_name", None), getattr(error, "possibilities", None)
    if similar:
        best = difflib.get_close_matches(str(option), similar, 1, 0) or sorted(similar)
        return f"no option {option}: did you mean {best[0]}?"
    message = error.format_message()
    return message if "Did you mean" in message else f"{message.rstrip('.')} (see {command} --help)"


def in_options(message: str) -> str:
    """The message with names of options: `--max-tokens` for `SamplingParams.max_tokens`."""

    def option(match: re.Match[str]) -> str:
        name = {"members": "member", "model": "member", "server": "member"}.get(match[1], match[1])
        return "--" + name.replace("_", "-") if name in _OPTIONS else match[0]

    if "[ensembles." in message:  # a file has no options
        return message
    return re.sub(r"\b(?:EnsembleConfig|MemberConfig|SamplingParams|ServerSettings)\.(\w+)", option, message)


def check_writable(path: Path, option: str) -> None:
    """Raises `ConfigError` if the file cannot be written. Leaves files unchanged."""
    try:
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        hint = "name a file in a folder that exists and that you may write to"
        raise ConfigError(f"{option} cannot be written to {path} ({error.strerror}): {hint}") from error


def write_report(path: Path, html: str, what: str = "report") -> None:
    """Write the file and print its name. Raises `SpecFuseError` if that fails."""
    try:
        path.write_text(html, "utf-8", errors="xmlcharrefreplace")
    except OSError as error:
        raise SpecFuseError(f"the {what} was not written to {path}: {error.strerror}") from error
    print(f"{what}: {terminal.visible(str(path))}", file=sys.stderr)


@contextmanager
def loaded(config: EnsembleConfig, verbose: bool) -> Iterator[EnsembleEngine]:
    configure_logging(verbose)
    check_sources(config)
    skip_retries_offline()
    errors = Console(stderr=True)
    with ExitStack() as stack:
        with terminal.loading(errors) as on_progress:
            from specfuse_shared.serving.engine import (
                EnsembleEngine,
            )  # importing torch takes seconds, under the spinner

            engine = stack.enter_context(EnsembleEngine(config))
            engine.load(on_progress)
        if verbose:
            terminal.show_members(engine.describe(), errors)
        yield engine


def consoles() -> tuple[Console, Console]:
    """The consoles of the answer (stdout) and of messages (stdout if it is a terminal, else stderr)."""
    out = terminal.stdout()
    return out, out if out.is_terminal else terminal.stderr()


def _names(literal: Any) -> str:
    return " | ".join(get_args(literal))


MEMBER: dict[str, Any] = {f.name: f.default for f in fields(MemberConfig)}
SAMPLING = SamplingParams()

QuestionArgument = Annotated[str, typer.Argument(metavar="QUESTION", help='The question; "-" reads standard input.')]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", help="The most tokens of an answer.")]
Temperature = Annotated[float, typer.Option("--temperature", metavar="T", help="0 is greedy decoding.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="S", help="Makes a sampled answer reproducible.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="A string that ends the answer; can be repeated.")
]
Preset = Annotated[str, typer.Option("--preset", metavar="NAME", help=f"Settings: {' | '.join(PRESETS)}")]
SegmentTokens = Annotated[
    int | None, typer.Option("--segment-tokens", metavar="L", help="The most tokens that a member drafts in a round.")
]
Score = Annotated[
    str | None, typer.Option("--score", metavar="NAME", help=f"Score of a candidate: {_names(ScoreName)}")
]
Feedback = Annotated[
    str | None, typer.Option("--feedback", metavar="NAME", help=f"How weights learn: {_names(FeedbackName)}")
]
Exit = Annotated[
    str | None, typer.Option("--exit", metavar="NAME", help=f"When members leave an answer: {_names(ExitName)}")
]
Dtype = Annotated[str, typer.Option("--dtype", metavar="NAME", help=f"Number format: {_names(DtypeName)}")]
Quantization = Annotated[
    str | None, typer.Option("--quantization", metavar="NAME", help=f"Quantised weights: {_names(QuantizationName)}")
]
BackendOption = Annotated[str, typer.Option("--backend", metavar="NAME", help=f"Runtime: {_names(BackendName)}")]
Planned = Annotated[bool, typer.Option("--plan", help="Show where the members would go, without loading them.")]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices", metavar="LIST", help='Plan for other hardware: "80GB", "4x24GB", "24GB,cpu:64GB"; GB is 10⁹ bytes.'
    ),
]
Answers = Annotated[int, typer.Option("--answers", metavar="B", help="Number of concurrent answers to plan for.")]
Context = Annotated[int, typer.Option("--context", metavar="C", help="Tokens of context per answer, in the plan.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Explain = Annotated[
    bool, typer.Option("--explain", help="After the answer, show every round and where members differ.")
]
Report = Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write an HTML report of the answer.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show members and library messages on stderr.")]
LibrariesVerbose = Annotated[bool, typer.Option("--verbose", help="Show messages of the libraries on stderr.")]
