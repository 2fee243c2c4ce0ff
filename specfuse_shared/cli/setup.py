"""What commands have in common: the ensemble that options describe, and libraries that keep quiet."""

from __future__ import annotations

import logging
import os
import socket
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import typer

from specfuse_shared.errors import ConfigError
from specfuse_shared.loading.config_files import read_ensemble
from specfuse_shared.settings.config import DEMO, EnsembleConfig
from specfuse_shared.settings.member_config import MemberConfig

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
KEY_ENV = "SPECFUSE_SERVER_KEY"
"""The environment variable that may hold the key of the servers that members are behind."""
CHATTY = ("accelerate", "huggingface_hub", "torchao", "torch.utils._pytree")
"""Libraries that warn of compiled parts that a machine has no use for, of offloaded weights, and of each retry."""
_HUB_SECONDS = 3.0


def ensemble_of(
    models: Sequence[str] | None,
    member: Mapping[str, Any],
    preset: str = "default",
    given: Mapping[str, Any] = MappingProxyType({}),
) -> EnsembleConfig:
    """Settings, those that are not None, are checked before the demo models are looked for."""
    if models and list(models) == [DEMO] and not Path(DEMO).exists():
        models = None
    settings = {name: value for name, value in given.items() if value is not None}
    members = [member_of(model, member) for model in models or ["of the demo"]]
    config = EnsembleConfig.preset(preset, members, **settings)
    if models:
        return config
    from specfuse_shared.loading.demo import demo_members

    backend = member.get("backend", "auto")
    if backend == "llama.cpp":
        typer.echo("on llama.cpp the demo runs without its adapters, which are no GGUF files", err=True)
    return replace(config, members=[replace(demo, **member) for demo in demo_members(backend=backend)])


def chosen_ensemble(
    models: Sequence[str] | None,
    file: str | None,
    preset: str = "default",
    member: Mapping[str, Any] = MappingProxyType({}),
    given: Mapping[str, Any] = MappingProxyType({}),
) -> EnsembleConfig:
    """The ensemble of a configuration file, or the one that options describe."""
    if file is None:
        return ensemble_of(models, member, preset, given)
    defaults = {f.name: f.default for f in fields(MemberConfig)}
    said = [name for name, value in {**member, **given}.items() if value not in (None, defaults.get(name))]
    if models or preset != "default" or said:
        also = "".join(f", --{name.replace('_', '-')}" for name in said)
        raise ConfigError(f"--config names the members and how they decide: leave --member, --preset{also} out")
    return read_ensemble(file)


def member_of(model: str, settings: Mapping[str, Any]) -> MemberConfig:
    """A model, or MODEL@http://… for one that a server runs, which says itself in how many bits."""
    name, at, rest = model.partition("@http")
    if not at:
        return MemberConfig(model, **settings)
    return MemberConfig(name, server=f"http{rest}", api_key_env=KEY_ENV if os.environ.get(KEY_ENV) else None)


def configure_logging(verbose: bool) -> None:
    """The libraries' own messages and progress bars belong to `--verbose`."""
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
    """Without a network, let the hub's library use its cache at once: it would try for half a minute.

    Call it before that library is imported. A proxy may reach what this machine cannot, and is left alone.
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
