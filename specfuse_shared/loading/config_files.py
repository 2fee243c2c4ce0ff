"""Configurations as plain values, and the TOML files that hold them in tables `[ensembles.NAME]`.

The same file serves `specfuse-llm serve`, `ask` and `compare`, and `config=` of both chat models.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from specfuse_shared.config import BACKSLASHES, DEMO, EnsembleConfig, MemberConfig
from specfuse_shared.errors import ConfigError
from specfuse_shared.loading.ensembles import members_of
from specfuse_shared.validation import S, check, check_choice, unknown_setting

TABLES = ("server", "sampling", "ensembles", "clients")
_SETTINGS = tuple(f.name for f in fields(EnsembleConfig))
_OF_BACKSLASHES = ("Unescaped '", "Invalid hex value", "not a Unicode scalar")
"""The library's error for "C:\\models" and "C:\\Users" in double quotes."""


def read_ensemble(source: str | Path) -> EnsembleConfig:
    """The ensemble of a TOML file: FILE where it holds one, FILE#NAME where it holds several. Raises `ConfigError`."""
    file, mark, name = str(source), "", ""
    if not Path(file).exists():
        file, mark, name = file.rpartition("#") if "#" in file else (file, "", "")
    data = read_toml(Path(file))
    try:
        ensembles = tables_of(data)["ensembles"]
        if mark:
            check_choice("the ensemble", name, tuple(ensembles))
        else:
            check(len(ensembles) == 1, f"it has several ensembles: name one, such as {file}#{next(iter(ensembles))}")
            name = next(iter(ensembles))
        return ensemble_of_table(name, ensembles[name])
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def read_toml(path: Path) -> Mapping[str, Any]:
    """Raises `ConfigError` for a file that cannot be read or is no TOML. A byte order mark is none of its text."""
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = f"; {BACKSLASHES}" if any(words in str(error) for words in _OF_BACKSLASHES) else ""
        raise ConfigError(f"{path} is no TOML: {error}{hint}") from error


def tables_of(data: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The tables of a file, of which one at least is an ensemble. Raises `ConfigError`."""
    for name in data:
        if name in _SETTINGS:
            raise ConfigError(f"{name} is outside every table: write [ensembles.demo] on a line above it")
        if name not in TABLES:
            raise unknown_setting("the file", name, TABLES)
    tables = {name: table_of(name, data.get(name, {})) for name in TABLES}
    check(bool(tables["ensembles"]), 'there is no ensemble: add [ensembles.demo] with members = "demo"')
    return tables


def ensembles_of(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, EnsembleConfig]:
    return {name: ensemble_of_table(name, table) for name, table in tables["ensembles"].items()}


def ensemble_of_table(name: str, table: Any) -> EnsembleConfig:
    """The configuration in `[ensembles.NAME]`. Raises `ConfigError` that names the table and the expected value."""
    where = f"[ensembles.{name}]"
    settings = dict(table_of(f"ensembles.{name}", table))
    for key in settings:
        if key not in (names := (*_SETTINGS, "preset")):
            raise unknown_setting(where, key, names)
    members, preset = settings.pop("members", None), settings.pop("preset", "default")
    check(members is not None, f'{where} has no members: add members = "demo", or a list of models')
    try:
        return EnsembleConfig.preset(preset, _members(members), **settings)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _members(value: Any) -> Sequence[MemberConfig | str]:
    if value == DEMO:
        return members_of(DEMO)
    check(isinstance(value, list), f'members is {value!r}: give "demo", or a list of models')
    return [MemberConfig.from_dict(member) if isinstance(member, Mapping) else member for member in value]


def table_of(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a table, [{name}], not {value!r}")
    return value


def of_table(kind: type[S], name: str, table: Any) -> S:
    """The settings in the table `[NAME]`. Raises `ConfigError` that names the table and the expected value."""
    try:
        return kind.from_dict(table_of(name, table))
    except ConfigError as error:
        raise ConfigError(str(error).replace(kind.__name__, f"[{name}]", 1)) from error


def plain_config(config: EnsembleConfig | MemberConfig, *, changed: bool = True) -> dict[str, Any]:
    """The settings (those that differ from their defaults) as plain JSON; a policy object appears as its repr."""
    chosen = [f.name for f in fields(config) if not changed or getattr(config, f.name) != f.default]
    return {name: plain(getattr(config, name), changed) for name in chosen}


def plain(value: Any, changed: bool = True) -> Any:
    if isinstance(value, (EnsembleConfig, MemberConfig)):
        return plain_config(value, changed=changed)
    if isinstance(value, Mapping):
        return {str(k): plain(v, changed) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(v, changed) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
