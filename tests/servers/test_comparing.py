"""A comparison of a member on a server and a local one equals one of local members, also after the server stops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specfuse_shared import MemberConfig, ServerUnreachableError
from specfuse_shared.comparing import ENSEMBLE, compare
from tests.servers.model_server import Ways, model_server

QUESTIONS = [{"text": f"Name {n} things of the sea.", "references": ["the tide"]} for n in range(6)]
KEY = "a-key-that-nobody-may-see"


@pytest.mark.slow
def test_a_member_on_a_server_is_compared_like_a_local_one(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_TESTS", KEY)
    here = [MemberConfig(str(folder), name=name) for name, folder in folders.items()]
    run = tmp_path / "run.jsonl"
    with model_server(folders["chat"], Ways(key=KEY)) as (url, _):
        served = MemberConfig(str(folders["chat"]), name="chat", server=url, api_key_env="KEY_OF_TESTS")
        result = compare([served, here[1]], QUESTIONS, run=run, timed=1, max_tokens=12)
    local = compare(here, QUESTIONS, timed=1, max_tokens=12)
    for name in ("chat", "base", ENSEMBLE):
        assert [a.text for a in result.answers[name].values()] == [a.text for a in local.answers[name].values()]
    assert result.weights["base"] > 0
    assert result.weights["chat"] == result.weights[ENSEMBLE] == 0, "the server does not report it"
    assert KEY not in run.read_text("utf-8")
    assert KEY not in result.to_html()
    gone = replace(served, server="http://127.0.0.1:9/v1", server_timeout=1.0)
    with pytest.raises(ServerUnreachableError):
        compare([gone, here[1]], QUESTIONS, run=run, timed=0, max_tokens=12)
