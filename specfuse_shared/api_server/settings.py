"""The server's settings and its configuration file (TOML).

Its tables are `[server]`, `[sampling]`, `[ensembles.NAME]` and `[clients.NAME]`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from specfuse_shared.addresses import is_loopback
from specfuse_shared.client.engine import KEY_ENV
from specfuse_shared.config import EnsembleConfig, SamplingParams
from specfuse_shared.errors import ConfigError
from specfuse_shared.loading.config_files import ensembles_of, of_table, read_toml, tables_of
from specfuse_shared.validation import Settings, check, validated


@validated
class ServerSettings(Settings):
    """Address, key and limits of the server."""

    host: str = "127.0.0.1"
    """Address to listen at. An address that other machines can reach needs a key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen at; 0 picks a free one."""
    api_key_env: str = KEY_ENV
    """Name of the environment variable that holds the key; clients send it as `Authorization: Bearer …`."""
    max_body_bytes: Annotated[int, Field(ge=1)] = 4 * 2**20
    """Maximum size of a request body."""
    max_prompt_characters: Annotated[int, Field(ge=1)] = 1_000_000
    """Maximum length of a conversation, tools and schema included."""
    max_choices: Annotated[int, Field(ge=1)] = 8
    """Maximum number of answers to one request (`n`, and the prompts of a completion)."""
    max_requests: Annotated[int, Field(ge=1)] = 256
    """Maximum number of concurrent requests. Clients with their own keys have their own limits."""
    max_connections: Annotated[int, Field(ge=1)] = 512
    """Maximum number of open connections. A further one replaces the one that has been silent for longest."""
    connection_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Time for a client to send the head of a request, to send its body, and to read pending data."""
    stop_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Time for answers to finish after the stop signal."""

    def __post_init__(self) -> None:
        check(bool(self.host.strip()), "ServerSettings.host is empty: give an address such as 127.0.0.1")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    def api_key(self, others: bool = False) -> str | None:
        """The key from the environment. Raises `ConfigError` if it is missing, but required or named.

        `others`: there are clients with their own keys.
        """
        key = os.environ.get(self.api_key_env, "").strip()
        named = self.api_key_env != KEY_ENV
        check(
            bool(key) or ((self.is_loopback or others) and not named),
            f"the environment variable {self.api_key_env} holds no key"
            + ("" if named else f", and other machines can reach {self.host}")
            + f": set it, such as {self.api_key_env}=$(openssl rand -hex 24), or listen at 127.0.0.1 without a key",
        )
        return key or None


@validated
class ClientSettings(Settings):
    """A client with its own key and limits."""

    api_key_env: str = ""
    """Name of the environment variable that holds its key."""
    max_requests: Annotated[int, Field(ge=1)] = 64
    """Maximum number of its concurrent requests; more are refused."""
    max_answers: Annotated[int | None, Field(ge=1)] = None
    """Maximum number of its concurrent answers, over all its requests (`n`); more wait. No limit if unset."""
    requests_per_minute: Annotated[int | None, Field(ge=1)] = None
    """Maximum number of requests that it may begin in a minute. No limit if unset."""

    def api_key(self, name: str) -> str:
        """The key from the environment. Raises `ConfigError` if it is missing."""
        key = os.environ.get(self.api_key_env, "").strip()
        where = f"the environment variable {self.api_key_env} holds no key" if self.api_key_env else "no api_key_env"
        check(bool(key), f"[clients.{name}]: {where}: name the variable that holds the key of this client")
        return key


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """The complete configuration of `specfuse-llm serve`. `sampling`: defaults of a request."""

    ensembles: Mapping[str, EnsembleConfig]
    server: ServerSettings = field(default_factory=ServerSettings)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    clients: Mapping[str, ClientSettings] = field(default_factory=dict)

    def api_key(self) -> str | None:
        """The server's own key. Raises `ConfigError` if a key, also of a client, is missing."""
        for name, client in self.clients.items():
            client.api_key(name)
        return self.server.api_key(others=bool(self.clients))


def read_config(path: Path) -> ServeConfig:
    """Read a TOML file. Raises `ConfigError`, which names the file, the table and the expected value."""
    data = read_toml(path)
    try:
        return _parsed(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _parsed(data: Mapping[str, Any]) -> ServeConfig:
    tables = tables_of(data)
    return ServeConfig(
        server=of_table(ServerSettings, "server", tables["server"]),
        sampling=of_table(SamplingParams, "sampling", tables["sampling"]),
        ensembles=ensembles_of(tables),
        clients={name: of_table(ClientSettings, f"clients.{name}", t) for name, t in tables["clients"].items()},
    )
