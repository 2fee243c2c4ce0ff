"""A server's responses are checked: their numbers, their tokens, their form, and their size."""

from __future__ import annotations

import gzip
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from langchain_specfuse import ChatSpecFuse
from specfuse_shared import EnsembleEngine, SamplingParams, SpecFuseError, bounded_http
from specfuse_shared.client.engine import RemoteEngine
from specfuse_shared.errors import ConfigError, GenerationError, ServerError
from specfuse_shared.members.server.vllm import ServerClient
from tests.servers.model_server import Ways, model_server
from tests.support.served import QUESTIONS, served

Change = Callable[[list[dict[str, Any]]], Any]


def numbers(value: Any) -> Change:
    """Set every log-probability to this value."""

    def change(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for choice in choices:
            rows = (choice.get("logprobs") or {}).get("top_logprobs", [])
            for row in rows:
                row |= dict.fromkeys(row, value)
        return choices

    return change


def tokens(*ids: Any) -> Change:
    """Replace every continuation by these tokens."""
    return lambda choices: [{**choice, "token_ids": list(ids)} for choice in choices]


@pytest.fixture(scope="module")
def lying(tiny_engine: EnsembleEngine, folders: dict[str, Path]) -> Iterator[tuple[EnsembleEngine, Ways]]:
    """An engine whose chat member is on a server with invalid responses."""
    with (
        model_server(folders["chat"]) as (url, ways),
        EnsembleEngine(served(tiny_engine, url, "chat")) as engine,
    ):
        yield engine.load(), ways


@pytest.mark.parametrize(
    "change",
    [
        numbers(math.nan),
        numbers(math.inf),
        numbers(800.0),
        numbers(5.0),
        numbers("high"),
        numbers(None),
        tokens(*range(2000)),
        tokens(-1),
        tokens(10**9),
        tokens("a"),
        tokens(True),
        tokens([1]),
        lambda choices: [],
        lambda choices: choices * 2,
        lambda choices: "nonsense",
        lambda choices: [{}],
    ],
    ids=[
        *("NaN", "infinity", "800", "5", "text", "nothing", "many", "negative", "unknown", "no number", "a boolean"),
        *("a list", "no choice", "twice", "no list", "empty"),
    ],
)
def test_an_invalid_server_response_removes_its_member_from_the_answer(
    lying: tuple[EnsembleEngine, Ways], change: Change
) -> None:
    engine, ways = lying
    alone = engine.generate(QUESTIONS[0], SamplingParams(max_tokens=12), members=["base"])
    ways.replace_choices = change
    try:
        result = engine.generate(QUESTIONS[0], SamplingParams(max_tokens=12))
    finally:
        ways.replace_choices = None
    [warning] = result.warnings
    assert warning.member == "chat"
    assert warning.kind in ("ServerError", "ServerSettingsError"), warning
    assert result.text
    assert alone.text.startswith(result.text), "the reference member, which has exited, counted the tokens"
    assert not engine.closed
    honest = engine.generate(QUESTIONS[0], SamplingParams(max_tokens=12))
    assert not honest.warnings, "it is asked again in the next answer"


# ── size, time, form ─────────────────────────────────────────────────────────────────────────────


@contextmanager
def answering(body: bytes, headers: dict[str, str], pause: float = 0.0) -> Iterator[str]:
    """The address of a server that answers every request with this data, in a hundred parts."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.do_GET()

        def do_GET(self) -> None:
            self.send_response(200)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            size = max(1, len(body) // 100)
            try:
                for start in range(0, len(body), size):
                    self.wfile.write(body[start : start + size])
                    time.sleep(pause)
            except OSError:
                pass

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def request_to(address: str) -> Any:
    client = ServerClient(address, timeout=30)
    try:
        return await client.post("/v1/completions", {"prompt": [1]})
    finally:
        await client.close()


BOMB = gzip.compress(b" " * (8 << 20), 9)
STREAM = {"Content-Type": "text/event-stream"}


async def test_a_compressed_or_too_long_response_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(BOMB, {"Content-Encoding": "gzip"}) as address:
        with pytest.raises(ServerError, match="compresses"):
            await request_to(address)
        with pytest.raises(SpecFuseError, match="compresses"):
            RemoteEngine(address, "m").generate("x")
    monkeypatch.setattr(bounded_http, "MOST_BYTES", 1 << 20)
    with answering(b" " * (4 << 20), {}) as address:
        with pytest.raises(ServerError, match="more than 1 MiB"):
            await request_to(address)
        with pytest.raises(SpecFuseError, match="more than 1 MiB"):
            RemoteEngine(address).describe()


async def test_our_clients_reject_an_endless_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "MOST_BYTES", 1 << 18)
    with answering(b": nothing\n\n" * 100_000, STREAM) as address:
        engine = RemoteEngine(address, "m")
        with pytest.raises(GenerationError, match="refused: it sends more than"):
            engine.generate("x")
        with pytest.raises(GenerationError, match="refused: it sends more than"):
            async for _ in engine.astream("x"):
                pass
        engine.close()


async def test_a_timeout_ends_a_slow_trickle_of_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specfuse_shared.client.engine.GRACE_SECONDS", 0.1)
    with answering(b": nothing\n\n" * 100, STREAM, pause=0.05) as address:
        engine, began = RemoteEngine(address, "m"), time.monotonic()
        with pytest.raises(GenerationError, match="longer than the timeout"):
            engine.generate("x", timeout=0.2)
        with pytest.raises(GenerationError, match="longer than the timeout"):
            async for _ in engine.astream("x", timeout=0.2):
                pass
        assert time.monotonic() < began + 3
        engine.close()


@pytest.mark.parametrize(
    "line",
    [
        b"data: {",
        b"data: []",
        b"data: 1",
        b'data: {"choices": 5}',
        b'data: {"choices": [{"specfuse": {"events": [{"type": "wat"}]}}]}',
        b'data: {"choices": [{"specfuse": {"events": [{"type": "segment", "text": 5}]}}]}',
        b'data: {"choices": [], "error": 5}',
        b"data: " + b"[" * 100_000,
    ],
    ids=range(8),
)
def test_a_stream_of_another_form_is_an_error_by_name(line: bytes) -> None:
    with answering(line + b"\n\n", STREAM) as address:
        engine = RemoteEngine(address, "m")
        with pytest.raises(SpecFuseError, match="does not answer like a SpecFuse server"):
            engine.generate("x")
        engine.close()


def test_a_description_of_another_form_is_an_error_by_name() -> None:
    wrong: tuple[Any, ...] = ({"data": []}, {"data": [{"id": "m"}]}, 5)
    for reported in wrong:
        with answering(json.dumps(reported).encode(), {}) as address:
            engine = RemoteEngine(address)
            with pytest.raises(SpecFuseError, match="does not answer like a SpecFuse server"):
                engine.describe()
            engine.close()


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_key_crosses_no_network_unencrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"unencrypted.*https://"):
        ChatSpecFuse(base_url="http://192.0.2.1:8000", api_key="secret")
    monkeypatch.setenv("SPECFUSE_API_KEY", "secret")
    with pytest.raises(ConfigError, match=r"that SPECFUSE_API_KEY holds would go to http://192\.0\.2\.1:8000") as error:
        RemoteEngine("http://192.0.2.1:8000", "m")
    assert "secret" not in str(error.value)
    for address in ("https://192.0.2.1", "http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"):
        assert RemoteEngine(address, "m")._api_key == "secret"
    assert RemoteEngine("http://192.0.2.1:8000", "m", api_key="")._api_key is None


def test_proxies_of_the_environment_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    client = RemoteEngine("https://192.0.2.1", "m")._connections.client()
    assert any(isinstance(transport, httpx.HTTPTransport) for transport in client._mounts.values())
    client.close()
