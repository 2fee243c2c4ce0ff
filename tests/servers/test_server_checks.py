"""The checks of a server before its member is used, and settings that a member on a server must not have."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specfuse_shared import ConfigError, EnsembleConfig, EnsembleEngine, MemberConfig, SamplingParams, addresses
from specfuse_shared.api_server.settings import read_config
from specfuse_shared.cli.commands import main
from specfuse_shared.cli.doctor import examine
from specfuse_shared.errors import (
    MemberLoadError,
    ServerKeyError,
    ServerModelError,
    ServerSettingsError,
    ServerUnreachableError,
    SlowVerificationWarning,
    UnsupportedModelError,
)
from specfuse_shared.frameworks import ledger, plain_config
from tests.servers.model_server import Ways, model_server
from tests.support.served import QUESTIONS, WIDE, assert_same, served

KEY = "a-key-that-nobody-may-see"


@pytest.fixture
def chat_ways(folders: dict[str, Path]) -> Iterator[tuple[MemberConfig, Ways]]:
    """A member on a separate server, whose behaviour a test can change."""
    with model_server(folders["chat"]) as (url, ways):
        yield MemberConfig(str(folders["chat"]), name="chat", server=url), ways


def load(member: MemberConfig) -> None:
    with EnsembleEngine([member]) as engine:
        engine.load()


@pytest.mark.parametrize(
    ("ways", "kind", "says"),
    [
        ({"other_vocabulary": True}, ServerModelError, "another vocabulary"),
        ({"prefix_cache": "False"}, ServerSettingsError, "prefix cache .* is off.*--no-enable-prefix-caching"),
        ({"mode": "processed_logprobs"}, ServerSettingsError, "follow the sampling settings.*raw_logprobs"),
        ({"mode": "raw_logits"}, ServerSettingsError, "gives logits.*raw_logprobs"),
        ({"off_by": -0.5}, UnsupportedModelError, "two ways that differ by 0.5 nats"),
        ({"key": KEY}, ServerKeyError, "asks for its key: name it with api_key_env"),
    ],
    ids=lambda value: "" if not isinstance(value, dict) else next(iter(value)),
)
def test_a_server_without_the_required_features_is_refused(
    chat_ways: tuple[MemberConfig, Ways], ways: dict[str, Any], kind: type[MemberLoadError], says: str
) -> None:
    member, server_ways = chat_ways
    for name, value in ways.items():
        setattr(server_ways, name, value)
    with pytest.raises(kind, match=says):
        load(member)


def test_a_missing_model_is_named_with_the_servers_models(
    chat_ways: tuple[MemberConfig, Ways],
) -> None:
    member, _ = chat_ways
    with pytest.raises(
        ServerModelError, match=r"has no model 'another' \(it has '.*chat\d+'\).*server_model="
    ) as caught:
        load(replace(member, server_model="another"))
    assert isinstance(caught.value, MemberLoadError)


def test_an_unreachable_server_is_named_with_a_remedy(folders: dict[str, Path]) -> None:
    with pytest.raises(ServerUnreachableError, match=r"no server answers at http://127\.0\.0\.1:1 .*start it"):
        load(MemberConfig(str(folders["chat"]), server="http://127.0.0.1:1/v1"))


def test_a_server_of_another_size_is_refused(folders: dict[str, Path]) -> None:
    with model_server(folders["base"], Ways(model="m")) as (url, _), pytest.raises(ServerModelError, match="vocabular"):
        load(MemberConfig(str(folders["chat"]), server=url, server_model="m"))


def test_a_model_is_found_by_the_name_that_the_server_gives_it(folders: dict[str, Path]) -> None:
    with model_server(folders["chat"], Ways(model="alias")) as (url, ways):
        member = MemberConfig(str(folders["chat"]), server=url)
        load(member)  # by the source of its weights
        load(replace(member, server_model="alias"))
        assert {body["model"] for body in ways.bodies()} == {"alias"}


def test_a_server_without_scores_of_named_tokens_reads_prompts_again_with_a_warning(
    tiny_engine: EnsembleEngine, folders: dict[str, Path]
) -> None:
    older = Ways(scores_named=False)
    with (
        model_server(folders["chat"], older) as (url, ways),
        EnsembleEngine(served(tiny_engine, url, "chat")) as engine,
    ):
        with pytest.warns(SlowVerificationWarning, match="reads the whole context again for every candidate"):
            engine.load()
        assert engine.describe()[0].verification == "prompt"
        ways.requests.clear()
        for question in QUESTIONS:
            assert_same(engine.generate(question, WIDE), tiny_engine.generate(question, WIDE))
        assert not [body for body in ways.bodies() if "logprob_token_ids" in body]
        assert [body for body in ways.bodies() if "prompt_logprobs" in body]


def test_a_server_that_hides_its_cache_is_used_and_the_report_mentions_it(chat_ways: tuple[MemberConfig, Ways]) -> None:
    member, ways = chat_ways
    ways.has_metrics = False
    with EnsembleEngine([member]) as engine:
        report = engine.describe()[0]
        assert (report.backend, report.attention) == ("vLLM 0.0-tests", "the server's, prefix cache unknown")


def test_doctor_shows_each_server_or_its_problem(
    chat_ways: tuple[MemberConfig, Ways], folders: dict[str, Path]
) -> None:
    member, _ = chat_ways
    lost = MemberConfig(str(folders["base"]), name="base", server="http://127.0.0.1:1")
    checkup = examine(EnsembleConfig([member, lost]))
    [report] = checkup.members
    assert (report.name, report.device, report.verification) == ("chat", member.server, "prefixes")
    assert report.probe_error < 1e-4
    assert report.context == 512
    [problem] = checkup.problems
    assert "no server answers at http://127.0.0.1:1" in problem


def test_the_command_takes_a_member_with_the_address_of_its_server(
    chat_ways: tuple[MemberConfig, Ways], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    member, ways = chat_ways
    ways.key = KEY
    monkeypatch.setenv("SPECFUSE_SERVER_KEY", KEY)
    assert main(["doctor", "--member", f"{member.model}@{member.server}/v1", "--json"]) == 0
    [report] = json.loads(capsys.readouterr().out)["members"]
    assert (report["device"], report["verification"]) == (member.server, "prefixes")
    assert main(["doctor", "--member", f"{member.model}@{member.server}"]) == 0
    output = capsys.readouterr().out
    assert "backend vLLM 0.0-tests" in (reported := " ".join(output.split()))
    assert "the server's, prefix cache on in blocks of 16" in reported
    assert KEY not in output


def test_the_context_limit_is_the_servers_or_a_shorter_one(chat_ways: tuple[MemberConfig, Ways]) -> None:
    member, ways = chat_ways
    ways.context = 200
    for limit, expected in ((None, 200), (100, 100), (400, 200)):
        with EnsembleEngine([replace(member, max_context=limit)]) as engine:
            assert engine.load().context_limit == expected


# ── keys and addresses ───────────────────────────────────────────────────────────────────────────


def test_a_key_is_sent_to_its_server_only(
    chat_ways: tuple[MemberConfig, Ways], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    member, ways = chat_ways
    ways.key = KEY
    member = replace(member, api_key_env="OF_THE_TESTS")
    with pytest.raises(ConfigError, match="OF_THE_TESTS holds no key"):
        load(member)
    monkeypatch.setenv("OF_THE_TESTS", "wrong")
    with pytest.raises(ServerKeyError, match="the one in OF_THE_TESTS is not its own"):
        load(member)
    monkeypatch.setenv("OF_THE_TESTS", KEY)
    ways.keys.clear()
    with caplog.at_level(logging.DEBUG), EnsembleEngine([member]) as engine:
        result = engine.generate(QUESTIONS[0], SamplingParams(max_tokens=8))
        ways.status = 500
        failed = engine.generate_batch([QUESTIONS[0]], return_exceptions=True)
        lane = engine._assembly.lanes[0]
        recorded = [repr(member), repr(engine), repr(lane.served), repr(vars(lane.served["chat"]))]  # type: ignore[attr-defined]
    assert ways.keys == {f"Bearer {KEY}"}
    config = EnsembleConfig([member])
    recorded += [str(plain_config(config)), str(ledger(result)), str(result), pickle.dumps(config).decode("latin1")]
    recorded += [
        str(failed),
        str(getattr(failed[0], "__notes__", "")),
        pickle.dumps(failed).decode("latin1"),
        caplog.text,
    ]
    assert not [text for text in recorded if KEY in text]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"server": "127.0.0.1:8000"}, "give the address of a server"),
        ({"server": "http://user:secret@host/v1"}, "MemberConfig.server is '…'"),
        ({"server": "http://host:8000", "api_key_env": "KEY"}, "could read the key"),
        ({"server": "http://127.0.0.1:8000", "dtype": "float16"}, "dtype is decided by the server"),
        ({"server": "http://127.0.0.1:8000", "adapter": "a"}, "adapter is decided by the server"),
        ({"server": "http://127.0.0.1:8000", "server_timeout": 0}, "server_timeout must be above 0"),
        ({"api_key_env": "KEY"}, "api_key_env is set without server"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "+".join(value),
)
def test_settings_that_cannot_work_or_would_give_a_key_away_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        MemberConfig("a-model", **settings)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("server", ["https://gpu.example/v1", "http://127.0.0.1:8000/v1/", "http://[::1]:8000"])
def test_a_key_is_sent_over_tls_or_to_this_machine(server: str) -> None:
    member = MemberConfig("a-model", server=server, api_key_env="KEY")
    assert member.server == server.rstrip("/").removesuffix("/v1")
    assert MemberConfig.from_dict(plain_config(member)) == member


def test_a_certificate_has_to_be_trusted(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *name]
    subprocess.run([*made, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    files = {"ssl_keyfile": str(key), "ssl_certfile": str(certificate)}
    with model_server(folders["chat"], **files) as (url, _):
        member = MemberConfig(str(folders["chat"]), server=url)
        with pytest.raises(ServerUnreachableError, match="certificate verify failed"):
            load(member)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        addresses.trusted.cache_clear()
        load(member)
    addresses.trusted.cache_clear()


def test_a_file_of_the_server_command_may_name_members_on_servers(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        '[[ensembles.both.members]]\nmodel = "Qwen/Qwen3-8B"\nserver = "http://127.0.0.1:8000/v1"\n'
        'api_key_env = "VLLM_KEY"\nserver_timeout = 30\n\n[[ensembles.both.members]]\nmodel = "gemma"\n'
    )
    [first, second] = read_config(file).ensembles["both"].member_configs
    assert (first.server, first.api_key_env, second.server) == ("http://127.0.0.1:8000", "VLLM_KEY", None)
