"""Useless connections are closed: slow heads, slow bodies, unread answers, and connections beyond the limit."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from specfuse_shared import EnsembleEngine
from specfuse_shared.api_server.replies.formats import line
from specfuse_shared.api_server.replies.growing import GrowingAnswer
from specfuse_shared.api_server.settings import ServerSettings
from specfuse_shared.client.engine import _Lines
from tests.support.serving import QUESTION, serving, until

CHAT: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_tokens": 4}
SECONDS = 0.6
BOUNDED = ServerSettings(connection_seconds=SECONDS, max_connections=20)


@pytest.fixture(scope="module")
def client(tiny: EnsembleEngine) -> Iterator[httpx.Client]:
    with serving({"tiny": tiny}, BOUNDED) as result:
        yield result


def opened(client: httpx.Client, *sent: bytes) -> socket.socket:
    """A connection that has sent only these bytes; uvicorn keeps it open for five more seconds."""
    connection = socket.create_connection((client.base_url.host, client.base_url.port), timeout=20)
    for data in sent:
        connection.sendall(data)
    return connection


def received(connection: socket.socket) -> bytes | None:
    """All bytes until the server closes the connection; None if it does not."""
    data = b""
    try:
        while part := connection.recv(65536):
            data += part
    except TimeoutError:
        return None
    except ConnectionResetError:
        pass
    return data


def head(client: httpx.Client, length: int) -> bytes:
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        f"Host: {client.base_url.netloc.decode()}",
        "Content-Type: application/json",
    )
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def test_silent_connections_and_partial_heads_time_out(client: httpx.Client) -> None:
    for sent in ((), (b"POST /v1/chat",), (b"GET /health HTTP/1.1\r\n",)):
        connection = opened(client, *sent)
        assert received(connection) == b""


def test_a_slow_head_has_no_extra_time(client: httpx.Client) -> None:
    connection, sent = opened(client), 0
    with suppress(ConnectionError):
        while sent < 100:
            sent += connection.send(b"G")
            time.sleep(SECONDS / 10)
    assert 5 < sent < 50


def test_a_partial_body_gets_an_error(client: httpx.Client) -> None:
    answer = received(opened(client, head(client, 100), b"{"))
    assert answer is not None
    assert b" 408 " in answer.split(b"\r\n")[0]
    assert b"did not come within 0.6 seconds" in answer


def test_a_refused_request_is_answered_before_its_body_arrives(tiny: EnsembleEngine) -> None:
    with serving({"tiny": tiny}, BOUNDED, key="k") as client:
        connection = opened(client, head(client, 10_000_000), b"{")
        answer = received(connection)
        assert answer is not None
        assert b" 401 " in answer.split(b"\r\n")[0]


def test_idle_connections_stay_open_between_requests(client: httpx.Client) -> None:
    for _ in range(3):
        assert client.get("/health").status_code == 200
        time.sleep(SECONDS / 2)
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_an_answer_may_take_longer_than_the_idle_timeout(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 900, "ignore_eos": True})
    assert response.elapsed.total_seconds() > SECONDS
    assert response.json()["choices"][0]["finish_reason"] == "length"


def test_silent_connections_lock_no_client_out(tiny: EnsembleEngine) -> None:
    with serving({"tiny": tiny}, ServerSettings(connection_seconds=60, max_connections=20)) as client:
        silent = [opened(client) for _ in range(30)]
        began = time.monotonic()
        assert client.get("/health").status_code == 200
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert received(silent[0]) == b"", "the oldest one is closed"
        assert time.monotonic() < began + 15
        silent[-1].settimeout(0.5)
        assert received(silent[-1]) is None, "the newest one is open"
        for connection in silent:
            connection.close()


def test_a_connection_beyond_the_limit_is_closed_while_the_others_wait_for_answers(tiny: EnsembleEngine) -> None:
    options = {**CHAT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    raw = json.dumps(options).encode()
    with serving({"tiny": tiny}, ServerSettings(connection_seconds=60, max_connections=3)) as client:
        before = tiny.metrics().running
        busy = [opened(client, head(client, len(raw)) + raw) for _ in range(3)]
        until(lambda: tiny.metrics().running == before + 3)
        assert received(opened(client)) == b""
        assert tiny.metrics().running == before + 3
        for connection in busy:
            connection.close()
        until(lambda: _answers(lambda: client.get("/health")))


def test_an_unread_stream_stops_its_answer_without_an_error_report(
    tiny: EnsembleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    plainly = GrowingAnswer.report

    def spied(self: GrowingAnswer) -> dict[str, str]:
        drawn.append(1)
        reported = plainly(self)
        return {**reported, "padding": "x" * 200_000}  # fills the buffers of the operating system quickly

    monkeypatch.setattr(GrowingAnswer, "report", spied)
    options = {**CHAT, "max_tokens": 3000, "ignore_eos": True, "stream": True, "specfuse": {"report": True}}
    raw = json.dumps(options).encode()
    with serving({"tiny": tiny}, BOUNDED) as client:
        before = tiny.metrics().requests["cancelled"]
        connection = opened(client)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(head(client, len(raw)) + raw)
        until(lambda: tiny.metrics().running == 1)
        until(lambda: tiny.metrics().running == 0, 60)
        assert tiny.metrics().requests["cancelled"] == before + 1
        assert len(drawn) < 40


def _answers(work: Callable[[], httpx.Response]) -> bool:
    try:
        return work().status_code == 200
    except httpx.TransportError:
        return False


def test_line_ends_of_other_alphabets_are_text_to_the_client() -> None:
    body = {"text": "one\u2028two\u2029three\x85four"}
    sent = line(body)
    assert sent.decode().splitlines() == [*sent.decode().rstrip("\n").split("\n"), ""]
    raw = b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\r\n\n"
    for whole in (sent, raw):
        lines = _Lines()
        results = [each for n in range(len(whole)) for each in lines.take(whole[n : n + 1])]
        assert len(results) == 2
        assert json.loads(results[0].removeprefix("data: ")) == body
