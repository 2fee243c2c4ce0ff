"""Limits of a client: concurrent requests, requests a minute, and limits of a key."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from specfuse_shared import ConfigError, EnsembleEngine
from specfuse_shared.api_server.access.clients import Clients
from specfuse_shared.api_server.models import Models
from specfuse_shared.api_server.settings import ClientSettings, ServerSettings, read_config
from specfuse_shared.events import Event
from tests.support.serving import QUESTION, serving, until

CHAT: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_tokens": 4}
LONG: dict[str, Any] = {**CHAT, "max_tokens": 3000, "ignore_eos": True}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> dict[str, ClientSettings]:
    monkeypatch.setenv("ANNS_KEY", "ann's")
    monkeypatch.setenv("BOBS_KEY", "bob's")
    return {
        "ann": ClientSettings(api_key_env="ANNS_KEY", max_requests=1),
        "bob": ClientSettings(api_key_env="BOBS_KEY", requests_per_minute=3),
    }


@pytest.mark.parametrize("server_key", ["ann's", None])
def test_a_key_belongs_to_one_client(
    clients: dict[str, ClientSettings], monkeypatch: pytest.MonkeyPatch, server_key: str | None
) -> None:
    monkeypatch.setenv("BOBS_KEY", "ann's")
    with pytest.raises(ConfigError, match=r"\[clients\.ann\] has the key of another client"):
        Clients(ServerSettings(), server_key, clients)


def test_every_client_has_its_own_key_and_limits(tiny: EnsembleEngine, clients: dict[str, ClientSettings]) -> None:
    with serving({"tiny": tiny}, clients=clients) as client:

        def ask(key: str, body: dict[str, Any] = CHAT) -> httpx.Response:
            return client.post("/v1/chat/completions", json=body, headers=bearer(key))

        assert ask("nobody's").status_code == 401
        assert client.get("/v1/models").status_code == 401, "with named clients, no request is anonymous"
        with client.stream(
            "POST", "/v1/chat/completions", json={**LONG, "stream": True}, headers=bearer("ann's")
        ) as stream:
            lines = stream.iter_lines()  # the reference keeps the stream open
            next(lines)
            refused = ask("ann's")
            assert refused.status_code == 429
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert client.get("/v1/models", headers=bearer("ann's")).status_code == 200, "questions cost nothing"
            assert [ask("bob's").status_code for _ in range(4)] == [200, 200, 200, 429]
            assert 1 <= int(ask("bob's").headers["retry-after"]) <= 20
        until(lambda: tiny.metrics().running == 0)
        assert ask("ann's").status_code == 200


def test_concurrent_requests_beyond_the_limit_are_refused(tiny: EnsembleEngine) -> None:
    with serving({"tiny": tiny}, ServerSettings(max_requests=2)) as client:
        statuses: list[int] = []

        def ask() -> None:
            statuses.append(client.post("/v1/chat/completions", json={**LONG, "timeout": 2}).status_code)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: tiny.metrics().running == 2)
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 429
        for thread in threads:
            thread.join()
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_answers_beyond_a_clients_limit_wait(tiny: EnsembleEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANNS_KEY", "ann's")
    monkeypatch.setenv("BOBS_KEY", "bob's")
    clients = {
        "ann": ClientSettings(api_key_env="ANNS_KEY", max_answers=2),
        "bob": ClientSettings(api_key_env="BOBS_KEY"),
    }
    with serving({"tiny": tiny}, clients=clients) as client:
        many = {**CHAT, "n": 5, "temperature": 1.0, "seed": 1}
        free, limited = (
            client.post("/v1/chat/completions", json=many, headers=bearer(key)) for key in ("bob's", "ann's")
        )
        assert [c["message"] for c in limited.json()["choices"]] == [c["message"] for c in free.json()["choices"]]

        counts: list[int] = []
        over = threading.Event()

        def look() -> None:
            while not over.wait(0.005):
                now = tiny.metrics()
                counts.append(now.running + now.waiting)

        looking = threading.Thread(target=look)
        looking.start()
        body = {**LONG, "n": 6, "timeout": 1.0}
        refused = client.post("/v1/chat/completions", json=body, headers=bearer("ann's"))
        over.set()
        looking.join()
        assert refused.status_code == 504
        assert max(counts) == 2
        assert client.post("/v1/chat/completions", json=CHAT, headers=bearer("ann's")).status_code == 200


def test_a_timeout_includes_the_time_in_the_queue(tiny: EnsembleEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANNS_KEY", "ann's")
    timeouts: list[float] = []
    plainly = tiny.astream

    def spied(*args: Any, timeout: float, **options: Any) -> AsyncIterator[Event]:
        timeouts.append(timeout)
        return plainly(*args, timeout=timeout, **options)

    monkeypatch.setattr(tiny, "astream", spied)
    clients = {"ann": ClientSettings(api_key_env="ANNS_KEY", max_answers=1)}
    with serving({"tiny": tiny}, clients=clients) as client:
        body = {**CHAT, "max_tokens": 200, "ignore_eos": True, "n": 3, "timeout": 60}
        answered = client.post("/v1/chat/completions", json=body, headers=bearer("ann's"))
    assert answered.status_code == 200
    assert 60 >= timeouts[0] > timeouts[1] + 0.01 > timeouts[2] + 0.02


def test_large_bodies_of_a_client_wait_only_for_its_other_large_bodies(
    tiny: EnsembleEngine, clients: dict[str, ClientSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = 3.0
    monkeypatch.setattr("specfuse_shared.api_server.access.clients.REFUSED_REST", rest)
    more = {**clients, "ann": ClientSettings(api_key_env="ANNS_KEY")}
    with serving({"tiny": tiny}, clients=more) as client:

        def ask(key: str, **more: Any) -> tuple[int, float]:
            response = client.post("/v1/chat/completions", json={**CHAT, **more}, headers=bearer(key))
            return response.status_code, response.elapsed.total_seconds()

        wrong = {"stop": ["~" * 9] * 10_000}
        statuses, seconds = zip(*(ask("ann's", **wrong) for _ in range(2)), strict=True)
        assert statuses == (400, 400)
        assert seconds[0] < 0.9 * rest < seconds[1]
        assert ask("bob's", **wrong)[1] < 0.9 * rest, "another client does not wait for them"
        status, taken = ask("ann's")
        assert (status, taken < 0.9 * rest) == (200, True), "nor does a small request"


def test_a_conversation_has_a_limit(tiny: EnsembleEngine) -> None:
    with serving({"tiny": tiny}) as client:
        for path, name in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
            body = {"model": "tiny", name: [{"role": "user", "content": "a"}] * 10_001}
            refused = client.post(path, json=body)
            assert refused.status_code == 400
            assert re.search("10000|9999", refused.json()["error"]["message"])


def test_a_server_is_ready_for_grammars_before_it_answers(tiny: EnsembleEngine) -> None:
    with EnsembleEngine(tiny.config) as engine:
        Models({"tiny": engine}).load()
        assert all("vocabulary" in vars(member.text) for member in engine._members)


def test_the_file_names_clients(tmp_path: Path, clients: dict[str, ClientSettings]) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        '[ensembles.demo]\nmembers = "demo"\n'
        '[clients.ann]\napi_key_env = "ANNS_KEY"\nmax_requests = 1\n'
        '[clients.bob]\napi_key_env = "BOBS_KEY"\nrequests_per_minute = 3\n'
    )
    config = read_config(file)
    assert config.clients == clients
    assert config.api_key() is None, "their keys are enough"


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ('api_key_env = "NO_SUCH_KEY"', "NO_SUCH_KEY holds no key"),
        ("max_requests = 5", "no api_key_env"),
        ("max_requests = 0", "max_requests must be at least 1"),
        ("max_answers = 0", "max_answers must be at least 1"),
        ("requests_per_minute = -1", "requests_per_minute must be at least 1"),
        ("speed = 1", "no setting 'speed'"),
        ('max_requests = "many"', "must be a whole number"),
    ],
)
def test_an_invalid_client_is_named(tmp_path: Path, table: str, says: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f'[ensembles.demo]\nmembers = "demo"\n[clients.ann]\n{table}\n')
    with pytest.raises(ConfigError, match=says):
        read_config(file).api_key()
