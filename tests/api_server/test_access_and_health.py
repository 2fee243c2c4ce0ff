"""Keys and origins, logs and metrics, and the status while members load."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path

import httpx
import pytest

from specfuse_shared import ConfigError, EnsembleConfig, EnsembleEngine, MemberConfig, MemberLoadError
from specfuse_shared.api_server import run
from specfuse_shared.api_server.access.clients import Clients
from specfuse_shared.api_server.app import Service, build_app
from specfuse_shared.api_server.models import Models
from specfuse_shared.api_server.settings import ServeConfig, ServerSettings
from specfuse_shared.errors import EngineClosedError
from specfuse_shared.members.stages import Fault
from tests.support.fake_engine import FakeEngine, two
from tests.support.serving import QUESTION, ready, serving, until

KEY = "a secret key"
CHAT = {"model": "tiny", "messages": QUESTION, "max_tokens": 4}


def test_a_key_is_needed_where_there_is_one(tiny: EnsembleEngine) -> None:
    with serving({"tiny": tiny}, key=KEY) as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        for header in ("", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", KEY, "Bearer ключ".encode()):
            answer = client.post("/v1/chat/completions", json=CHAT, headers={b"Authorization": header})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        open_to_all = {
            "/": 200,
            "/health": 200,
            "/live": 200,
            "/page.js": 200,
            "/each.js": 200,
            "/metrics": 401,
            "/v1/models": 401,
            "/nothing": 401,
        }
        assert {p: client.get(p, headers={"Authorization": "x"}).status_code for p in open_to_all} == open_to_all


def test_pages_of_other_sites_may_not_ask(client: httpx.Client) -> None:
    own_origin = {"Origin": str(client.base_url).rstrip("/")}
    assert client.post("/v1/chat/completions", json=CHAT, headers=own_origin).status_code == 200
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Host": "rebound.example"}):
        answer = client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert answer.status_code == 403
        assert answer.json()["error"]["message"]
    assert client.get("/health", headers={"Host": "localhost:1"}).status_code == 200


def test_a_request_is_logged_under_its_id_without_its_content(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "specfuse_shared.api_server")
    named = client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-ID": "my-id.7"})
    assert named.headers["x-request-id"] == "my-id.7"
    forged = client.post(
        "/v1/chat/completions?secret=1", json={**CHAT, "stream": True}, headers={"X-Request-ID": "a b"}
    )
    assert re.fullmatch(r"req-[0-9a-f]{16}", forged.headers["x-request-id"])
    client.get("/secret/path")
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("guard")]
    tokens = r"model=tiny prompt_tokens=\d+ completion_tokens=\d+ total_tokens=\d+"
    assert re.fullmatch(rf"POST /v1/chat/completions 200 \d+\.\d+s id=my-id\.7 {tokens}", lines[0])
    assert re.fullmatch(rf"POST /v1/chat/completions 200 \d+\.\d+s id=req-[0-9a-f]+ {tokens}", lines[1])
    assert lines[2].startswith("GET other 404")
    assert "secret" not in "".join(lines)
    assert "salty" not in "".join(lines)


def test_an_internal_failure_is_reported_without_its_content(
    tiny: EnsembleEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Models) -> list[object]:
        raise RuntimeError(KEY)

    monkeypatch.setattr(Models, "all", broken)
    with serving({"tiny": tiny}) as client:
        answer = client.get("/v1/models")
        assert client.get("/health").status_code == 200
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert KEY not in answer.text + caplog.text
    assert "RuntimeError" in caplog.text
    assert "raise RuntimeError" not in answer.text


def test_metrics_count_requests_and_answers(client: httpx.Client) -> None:
    def counted(name: str) -> float:
        (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.M)
        return float(value)

    finished, rounds = (
        'specfuse_requests_total{end="finished",ensemble="tiny"}',
        'specfuse_rounds_total{ensemble="tiny"}',
    )
    before = counted(finished), counted(rounds)
    client.post("/v1/chat/completions", json=CHAT)
    assert counted(finished) == before[0] + 1
    assert counted(rounds) > before[1]
    assert counted("specfuse_http_open") == 1
    assert counted('specfuse_http_requests_total{path="/v1/chat/completions",status="200"}') >= 1


def test_health_reports_loading_progress(tiny_members: list[MemberConfig]) -> None:
    with EnsembleEngine(EnsembleConfig(tiny_members)) as engine:
        models, recorded, on = Models({"tiny": engine}), list[tuple[int, dict[str, str]]](), threading.Event()
        from starlette.testclient import TestClient

        with TestClient(build_app(Service(models)), base_url="http://127.0.0.1") as client:
            request = client.post("/v1/chat/completions", json=CHAT)
            assert request.status_code == 503
            assert request.json()["error"]["code"] == "models_loading"
            assert int(request.headers["retry-after"]) > 0
            assert client.get("/v1/models").status_code == 200

            def observe(ensemble: str, progress: object, reported: object = models._observe) -> None:
                reported(ensemble, progress)  # type: ignore[operator]
                answer = client.get("/health")
                recorded.append((answer.status_code, answer.json()))
                on.set()

            models._observe = observe  # type: ignore[method-assign]
            models.load()
            assert client.get("/health").json() == {"status": "ok", "stage": "ready"}
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert on.is_set()
    assert {(code, reported["status"]) for code, reported in recorded} == {(503, "loading")}
    assert any("chat" in reported["stage"] and "weights" in reported["stage"] for _, reported in recorded)


def test_members_that_cannot_be_loaded_are_reported(tmp_path: Path) -> None:
    with EnsembleEngine([str(tmp_path / "nobody")]) as engine:
        models = Models({"bad": engine})
        with pytest.raises(MemberLoadError):
            models.load()
        from starlette.testclient import TestClient

        with TestClient(build_app(Service(models)), base_url="http://127.0.0.1") as client:
            assert client.get("/health").json()["status"] == "failed"
            assert client.post("/v1/chat/completions", json={**CHAT, "model": "bad"}).status_code == 503


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_this_machine_alone_needs_no_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECFUSE_API_KEY", raising=False)
    assert ServerSettings(host=host).api_key() is None
    monkeypatch.setenv("SPECFUSE_API_KEY", f" {KEY} ")
    assert ServerSettings(host=host).api_key() == KEY


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_elsewhere_a_key_must_be_set(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECFUSE_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"SPECFUSE_API_KEY holds no key.*127\.0\.0\.1"):
        ServerSettings(host=host).api_key()
    monkeypatch.setenv("OTHER_KEY", KEY)
    assert ServerSettings(host=host, api_key_env="OTHER_KEY").api_key() == KEY


def test_a_configured_key_must_exist() -> None:
    with pytest.raises(ConfigError, match="NO_SUCH_KEY holds no key"):
        ServerSettings(api_key_env="NO_SUCH_KEY").api_key()


def health(client: httpx.Client, path: str = "/health", **headers: str) -> tuple[int, dict[str, str]]:
    answer = client.get(path, headers=headers)
    return answer.status_code, answer.json()


def test_health_fails_with_an_engine_or_lane_and_liveness_only_with_fatal_failures() -> None:
    first, second = two()
    with FakeEngine(first, second) as engine, serving({"pair": engine}) as client:
        assert health(client) == (200, {"status": "ok", "stage": "ready"})
        second.fault = Fault("EOFError", "gone")
        assert health(client) == (200, {"status": "degraded", "stage": "without pair/b"})
        assert health(client, "/live") == (200, {"status": "ok"})
        second.fault = Fault("SystemExit", "killed", is_fatal=True)
        assert health(client) == (503, {"status": "failed", "stage": "failed: pair"})
        assert health(client, "/live") == (503, {"status": "failed"})
        refused = client.post("/v1/chat/completions", json={**CHAT, "model": "pair"})
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "the engine of this model failed: the server's log says why"


def test_health_without_a_key_names_no_model() -> None:
    first, second = two()
    second.fault = Fault("EOFError", "gone")
    with FakeEngine(first, second) as engine, serving({"pair": engine}, key=KEY) as client:
        assert health(client, Authorization="") == (200, {"status": "degraded"})
        assert health(client, "/live", Authorization="") == (200, {"status": "ok"})
        assert health(client)[1]["stage"] == "without pair/b"


def test_a_loading_server_is_live_and_not_ready() -> None:
    from starlette.testclient import TestClient

    models = Models({"one": FakeEngine(*two())})
    with TestClient(build_app(Service(models)), base_url="http://127.0.0.1") as client:
        assert client.get("/live").status_code == 200
        assert client.get("/health").status_code == 503


def test_a_server_whose_engine_breaks_stops_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = two()
    monkeypatch.setattr(run, "EnsembleEngine", lambda config: FakeEngine(*lanes))
    monkeypatch.setattr(run, "WATCH_SECONDS", 0.05)

    def destroy(address: str) -> None:
        until(lambda: httpx.get(f"{address}/live").status_code == 200 and ready(address))
        lanes[1].fault = Fault("SystemExit", "killed", is_fatal=True)

    def listening(address: str) -> None:
        threading.Thread(target=destroy, args=(address,), daemon=True).start()

    config = ServeConfig({"pair": EnsembleConfig(["a", "b"])}, ServerSettings(port=0))
    with pytest.raises(EngineClosedError, match="'pair' failed, so the server has stopped"):
        run.serve(config, listening)


def test_an_ensemble_must_not_have_the_name_of_a_member_of_another_ensemble() -> None:
    with pytest.raises(ConfigError, match="'t/a' is an ensemble and a member of another one"):
        Models({"t": FakeEngine(*two()), "t/a": FakeEngine(*two())})


def test_a_key_in_any_alphabet_is_accepted() -> None:
    clients = Clients(ServerSettings(), "schlüssel-钥匙")
    assert clients.find("Bearer schlüssel-钥匙".encode().decode("latin-1")) is not None
    assert clients.find("Bearer schlussel") is None
