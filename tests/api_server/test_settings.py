"""The configuration file: its settings, and the messages about wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from specfuse_shared import ConfigError
from specfuse_shared.api_server.settings import read_config

WHOLE = """
[server]
host = "::1"
port = 9000
max_body_bytes = 1000

[sampling]
max_tokens = 64
temperature = 1
stop = ["END"]

[ensembles.pair]
members = ["org/one", { model = "org/two", name = "second", dtype = "float32", weight = 2 }]
preset = "specem"
segment_tokens = 7
reference = "second"

[ensembles.one]
members = ["org/three"]
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "serve.toml"
    file.write_text(text, "utf-8")
    return file


def test_a_file_can_contain_all_settings(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, WHOLE))
    assert (config.server.host, config.server.port, config.server.max_body_bytes) == ("::1", 9000, 1000)
    assert (config.sampling.max_tokens, config.sampling.temperature, config.sampling.stops) == (64, 1, ("END",))
    pair, one = config.ensembles["pair"], config.ensembles["one"]
    assert pair.names == ("one", "second")
    assert (pair.segment_tokens, pair.feedback, pair.reference_name) == (7, "paper", "second")
    assert pair.member_configs[1].dtype == "float32"
    assert one.names == ("three",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"no ensemble: add \[ensembles\.demo\]"),
        ("x = ", "is no TOML"),
        ("[servers]\nport = 1", "did you mean 'server'"),
        ("server = 5", r"\[server\]"),
        ("[server]\nprot = 1\n[ensembles.a]\nmembers = ['x']", "did you mean 'port'"),
        ("[server]\nport = '1'\n[ensembles.a]\nmembers = ['x']", r"\[server\]\.port must be a whole number, not '1'"),
        ("[server]\nport = 70000\n[ensembles.a]\nmembers = ['x']", "between 0 and 65535, not 70000"),
        ("[server]\nport = true\n[ensembles.a]\nmembers = ['x']", "must be a whole number"),
        ("[sampling]\ntemperature = 'hot'\n[ensembles.a]\nmembers = ['x']", r"\[sampling\]\.temperature"),
        ("[sampling]\ntop_p = 7.0\n[ensembles.a]\nmembers = ['x']", r"\[sampling\]\.top_p must"),
        ("[server]\nstop_seconds = inf\n[ensembles.a]\nmembers = ['x']", r"\[server\]\.stop_seconds must be.*finite"),
        ("[ensembles.a]\nmembers = [{ name = 'x' }]", "has no model"),
        ("[ensembles.a]\nsegment_tokens = 5", r"\[ensembles\.a\] has no members"),
        ("[ensembles.a]\nmembers = 'demos'", r"\[ensembles\.a\].*members"),
        ("[ensembles.a]\nmembers = []", "empty"),
        ("[ensembles.a]\nmembers = ['x']\nsegment_token = 5", "did you mean 'segment_tokens'"),
        ("[ensembles.a]\nmembers = ['x']\nsegment_tokens = 'five'", "segment_tokens"),
        ("[ensembles.a]\nmembers = ['x']\nexit = 'sometimes'", "exit"),
        ("[ensembles.a]\nmembers = ['x']\npreset = 'specfus'", "did you mean 'specfuse'"),
        ("[ensembles.a]\nmembers = [{ model = 'x', dtyp = 'auto' }]", "did you mean 'dtype'"),
        ("[ensembles.a]\nmembers = [5]", "member"),
        ("[ensembles]\na = 5", r"\[ensembles\.a\]"),
    ],
)
def test_a_wrong_setting_is_named_with_its_table_and_the_expected_value(
    tmp_path: Path, text: str, message: str
) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"serve\.toml.*{message}"):
        read_config(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        read_config(tmp_path / "none.toml")
