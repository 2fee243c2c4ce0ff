"""Three real vLLM servers on one machine, started one after another, with TLS and a key: they answer together."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specfuse_shared import (
    EnsembleConfig,
    EnsembleEngine,
    EnsembleResult,
    MemberConfig,
    SamplingParams,
    demo_members,
)
from specfuse_shared.addresses import trusted
from specfuse_shared.errors import MemberLoadError, ServerKeyError
from specfuse_shared.loading.gguf import converted, gguf_file
from tests.servers import vllm_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not vllm_server.COMMAND, reason="$SPECFUSE_VLLM names no vllm command"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate"),
]
KEY = "of-the-tests"
NAMES = ("one", "two", "three")
PARAMS = SamplingParams(max_tokens=32)
QUESTIONS = ("Why is the sky blue?", "What do bees make?", "List the colours of the rainbow.")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate of this machine, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    prompt = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    files = ("-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem"))
    subprocess.run(["openssl", *prompt.split(), *files], check=True, capture_output=True)
    return folder / "certificate.pem"


@pytest.fixture(scope="module")
def here() -> list[MemberConfig]:
    """The local members; SmolLM2 is there twice."""
    smol, gemma = (replace(m, adapter=None, dtype="float32", backend="transformers") for m in demo_members())
    return [replace(whole(m), name=name) for m, name in zip((smol, gemma, smol), NAMES, strict=True)]


def whole(member: MemberConfig) -> MemberConfig:
    """The member with unquantised weights, as a folder."""
    file = gguf_file(member)
    assert file is not None
    return replace(member, model=str(converted(file, None, lambda stage: None)))


@pytest.fixture(scope="module")
def expected(here: list[MemberConfig]) -> list[EnsembleResult]:
    """The members' answers here; the members leave memory before the servers start."""
    with EnsembleEngine(EnsembleConfig(here)) as engine:
        return [engine.generate(question, PARAMS) for question in QUESTIONS]


@pytest.fixture(scope="module")
def there(here: list[MemberConfig], expected: list[EnsembleResult], certificate: Path) -> Iterator[list[MemberConfig]]:
    tls = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(certificate.with_name("key.pem")))
    flags = ("--api-key", KEY, "--block-size", "32", "--enable-scale-out", *vllm_server.GUIDANCE, *tls)
    with ExitStack() as stop, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEY_OF_TESTS", KEY)
        members = []
        for member in here:
            port = vllm_server.free_port()
            stop.callback(vllm_server.stop, vllm_server.start(member.model, port, "float32", *flags))
            url = f"https://127.0.0.1:{port}/v1"
            there: dict[str, Any] = {"server": url, "api_key_env": "KEY_OF_TESTS", "weight": member.weight}
            members.append(MemberConfig(member.model, name=member.name, **there))
        yield members


@pytest.fixture(autouse=True)
def _trust_is_read_anew() -> None:
    trusted.cache_clear()


def test_three_servers_answer_like_three_local_members(
    there: list[MemberConfig],
    expected: list[EnsembleResult],
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with EnsembleEngine(EnsembleConfig(there)) as servers:
        for question, required in zip(QUESTIONS, expected, strict=True):
            result = servers.generate(question, PARAMS)
            assert result.warnings == ()
            assert (result.text, [r.winner for r in result.rounds]) == (
                required.text,
                [r.winner for r in required.rounds],
            )
            assert all(result.usage.members[name].drafted for name in NAMES)


def test_an_untrusted_certificate_is_named(there: list[MemberConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with EnsembleEngine(EnsembleConfig(there)) as engine, pytest.raises(MemberLoadError, match="certificate"):
        engine.load()


def test_the_key_is_required_over_tls(
    there: list[MemberConfig], certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("KEY_OF_TESTS", "another")
    with EnsembleEngine(EnsembleConfig(there)) as engine, pytest.raises(ServerKeyError):
        engine.load()
