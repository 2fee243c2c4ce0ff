"""An ensemble written into a configuration file (TOML), beside what is there, with why in a comment."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specfuse_shared.comparing.libraries import library
from specfuse_shared.errors import ConfigError, SpecFuseError
from specfuse_shared.loading.config_files import ensemble_of_table, plain_config, read_toml, tables_of
from specfuse_shared.settings.config import EnsembleConfig
from specfuse_shared.settings.member_config import MemberConfig

_POLICIES = ("score", "aggregate", "feedback", "exit")


def check_writable_config(config: EnsembleConfig) -> None:
    """Raises `ConfigError` for an ensemble that no file can hold."""
    for name in _POLICIES:
        if not isinstance(getattr(config, name), str):
            raise ConfigError(f"EnsembleConfig.{name} is an object, which no file can hold: set it by name")


def check_config_file(file: Path) -> None:
    """Raises `ConfigError` for a file of something else, which is not touched."""
    if file.exists():
        try:
            tables_of({"ensembles": {"": {}}, **read_toml(file)})
        except ConfigError as error:
            raise ConfigError(f"{file} is no configuration file: {error}") from error
        toml = library("tomlkit")
        if isinstance(toml.parse(file.read_text("utf-8-sig")).get("ensembles"), toml.items.InlineTable):
            raise ConfigError(f"{file} has its ensembles in one line: write a table [ensembles.NAME] for each")


def write_ensemble(file: Path, name: str, config: EnsembleConfig, why: Sequence[str] = ()) -> None:
    """Write `[ensembles.NAME]` into a TOML file, in place of an older one; the rest stays. `why`: lines of a comment.

    Raises `ConfigError` for an ensemble or file that cannot be used, `SpecFuseError` if the file cannot be written.
    """
    check_writable_config(config)
    check_config_file(file)
    if config.first_segment_tokens is None:  # TOML has no None, and this is what it means
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
        raise ConfigError(f"the ensemble {name!r} reads back as another one: write it by hand")
    _replace(file, text)


def table_of_ensemble(config: EnsembleConfig) -> dict[str, Any]:
    """The settings that differ from their defaults, as a table of a file has them."""
    settings = plain_config(config)
    if "feedback_limit" in settings and settings["feedback_limit"] is None:
        settings["feedback_limit"] = math.inf  # TOML has no None, and reads this as one
    settings["members"] = [_table_of_member(member) for member in config.member_configs]
    return settings


def _table_of_member(member: MemberConfig) -> Mapping[str, Any]:
    usual, own = plain_config(MemberConfig(member.model), changed=False), plain_config(member, changed=False)
    return {"model": member.model, **{key: value for key, value in own.items() if value != usual[key]}}


def _replace(file: Path, text: str) -> None:
    """Written whole or not at all."""
    name = None
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as fresh:
            name = fresh.name
            fresh.write(text)
        os.chmod(name, file.stat().st_mode if file.exists() else 0o644)
        os.replace(name, file)  # on Windows an editor that has it open keeps it
    except OSError as error:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        raise SpecFuseError(f"{file} cannot be written ({error.strerror})") from error
