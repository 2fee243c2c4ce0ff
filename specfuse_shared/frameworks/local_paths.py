"""Local folders and files in what leaves the process: dictionaries, dumps and traces tell a name, never a path.

What reads them in the same process finds the path again; elsewhere the members have to be given anew.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

from specfuse_shared.errors import ConfigError

_SETTINGS = ("model", "tokenizer", "adapter")
"""Settings of a member that may be paths."""
_MARK = "local:"
_PATHS: dict[str, str] = {}


def without_paths(told: Any) -> Any:
    """A member, an ensemble or several of them as plain JSON, with names in place of paths."""
    if isinstance(told, Mapping):
        return {k: hidden(v) if k in _SETTINGS and isinstance(v, str) else without_paths(v) for k, v in told.items()}
    if isinstance(told, list):
        return [hidden(each) if isinstance(each, str) else without_paths(each) for each in told]
    return told


def hidden(value: str) -> str:
    """The name that stands for a path; a hub id stays as it is. Different paths have different names."""
    if value.startswith(_MARK) or not _is_local(value):
        return value
    digest = hashlib.sha256(os.path.abspath(os.path.expanduser(value)).encode()).hexdigest()[:12]
    name = f"{_MARK}{_path(value).name}#{digest}"
    _PATHS[name] = value
    return name


def found(value: str) -> str:
    """What `hidden` was given. Raises `ConfigError` for a path of another process."""
    if not value.startswith(_MARK):
        return value
    if value not in _PATHS:
        raise ConfigError(f"{value!r} is a folder or file that another process knew: give its path in members=[…]")
    return _PATHS[value]


def _is_local(value: str) -> bool:
    """Also a path of Windows, wherever it is read, and of a folder that is not there now: no hub id looks like one."""
    if value.startswith(("/", "~", "./", "../")) or "\\" in value or PureWindowsPath(value).drive:
        return True
    return os.path.exists(value)


def _path(value: str) -> PurePath:
    return PureWindowsPath(value) if "\\" in value or PureWindowsPath(value).drive else Path(value)
