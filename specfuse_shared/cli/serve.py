"""`specfuse-llm serve`: the server's options, which override its configuration file."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specfuse_shared.cli.setup import LibrariesVerbose, MembersOption, configure_logging, ensemble_of
from specfuse_shared.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from specfuse_shared.api_server.settings import ServeConfig

NEEDED = ("starlette", "uvicorn", "prometheus_client", "httpx", "tenacity", "anyio")

ServerFileOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="TOML file of ensembles and server settings; not with --member."),
]
ServerPreset = Annotated[str, typer.Option("--preset", metavar="NAME", help="Preset of the ensemble.")]
Host = Annotated[
    str | None, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.  [default: 127.0.0.1]")
]
Port = Annotated[
    int | None, typer.Option("--port", metavar="N", help="Port to listen on; 0 picks a free one.  [default: 8000]")
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(
        "--api-key-env", metavar="NAME", help="Environment variable that holds the key.  [default: SPECFUSE_API_KEY]"
    ),
]


def serve(
    member: MembersOption = None,
    config: ServerFileOption = None,
    preset: ServerPreset = "default",
    host: Host = None,
    port: Port = None,
    api_key_env: ApiKeyEnv = None,
    verbose: LibrariesVerbose = False,
) -> int:
    """Serve the ensemble over OpenAI's API, with a chat page."""
    options: dict[str, Any] = {"host": host, "port": port, "api_key_env": api_key_env}
    with _needed():
        from specfuse_shared.api_server.run import serve as run
    chosen = _chosen(member, config, preset)
    chosen = replace(chosen, server=replace(chosen.server, **{k: v for k, v in options.items() if v is not None}))
    chosen.api_key()
    configure_logging(verbose)
    _log(verbose)
    run(chosen, lambda address: print(f"listening at {address}", file=sys.stderr, flush=True))
    return 0


def _chosen(member: list[str] | None, config: Path | None, preset: str) -> ServeConfig:
    from specfuse_shared.api_server.settings import ServeConfig, read_config

    if config is not None and (member or preset != "default"):
        raise ConfigError("--config sets the members and their preset: leave --member and --preset out")
    if config is not None:
        return read_config(config)
    ensemble = ensemble_of(member, {}, preset)
    return ServeConfig({"+".join(ensemble.names) if member else "demo": ensemble})


@contextmanager
def _needed() -> Iterator[None]:
    """Raises `MissingExtraError` if a library of the server is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in NEEDED:
            raise
        raise MissingExtraError("specfuse-llm serve", "serve") from error


def _log(verbose: bool) -> None:
    """Log requests and progress to stderr, and only warnings of other libraries."""
    if not verbose:
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
        logging.getLogger("specfuse_shared.api_server").setLevel(logging.INFO)
