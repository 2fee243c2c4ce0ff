"""Our own clients at a server that is busy or lost for a while: retries, headers, keys and kept connections."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import socket
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from langchain_core.exceptions import ModelAuthenticationError
from starlette.types import ASGIApp, Receive, Scope, Send

from langchain_specfuse import ChatSpecFuse
from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import (
    AuthenticationError,
    ConfigError,
    EngineBusyError,
    EngineClosedError,
    EnsembleEngine,
    SamplingParams,
)
from specfuse_shared.client import engine as client_engine
from specfuse_shared.client.engine import RemoteEngine
from specfuse_shared.client.wire import event_to_json
from specfuse_shared.errors import SpecFuseError
from tests.support.serving import QUESTION, serving

BUSY = b'{"error": {"message": "busy", "specfuse": {"kind": "EngineBusyError", "message": "busy", "attributes": {}}}}'
Refusal = tuple[int, dict[str, str]]


@dataclass
class Gate:
    """A proxy that first refuses as scripted, or drops the connection (0), and records requests."""

    refusals: list[Refusal] = field(default_factory=list)
    requests: list[dict[str, str]] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)
    times: list[float] = field(default_factory=list)
    address: str = ""

    def around(self, app: ASGIApp) -> ASGIApp:
        async def gated(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"].endswith(("completions", "tokenize")):
                self.requests.append({name.decode(): value.decode() for name, value in scope["headers"]})
                self.ports.add(scope["client"][1])
                self.times.append(time.monotonic())
                if self.refusals:
                    await self.refuse(send, *self.refusals.pop(0))
                    return
            await app(scope, receive, send)

        return gated

    async def refuse(self, send: Send, status: int, headers: dict[str, str]) -> None:
        if not status:
            raise ConnectionResetError("dropped")  # uvicorn closes the connection if no response was sent
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": BUSY})


@pytest.fixture(scope="module")
def gates(tiny: EnsembleEngine) -> Iterator[Gate]:
    gate = Gate()
    with serving({"tiny": tiny}, around=gate.around, max_tokens=4) as client:
        gate.address = str(client.base_url)
        yield gate


@pytest.fixture
def gate(gates: Gate) -> Gate:
    for each in (gates.refusals, gates.requests, gates.ports, gates.times):
        each.clear()
    return gates


def answer_by(gate: Gate, way: str, **settings: Any) -> str:
    """An answer of a model through the proxy, by one of the methods."""
    at = {"base_url": gate.address, "model": "tiny", "max_tokens": 4, **settings}
    chat, llm = ChatSpecFuse(**at), SpecFuseLLM(**at)
    if way == "invoke":
        return chat.invoke("Hi").text
    if way == "stream":
        return "".join(chunk.text for chunk in chat.stream("Hi"))
    if way == "ainvoke":
        return asyncio.run(chat.ainvoke("Hi")).text
    if way == "batch":
        return chat.batch(["Hi"])[0].text
    if way == "complete":
        return str(llm.complete("Hi"))
    assert way == "acomplete"
    return str(asyncio.run(llm.acomplete("Hi")))


WAYS = ("invoke", "stream", "ainvoke", "batch", "complete", "acomplete")


@pytest.mark.parametrize("way", WAYS)
def test_temporary_refusals_are_retried(gate: Gate, way: str) -> None:
    expected = answer_by(gate, way)
    gate.requests.clear()
    gate.refusals[:] = [(429, {"Retry-After": "0"}), (503, {"Retry-After": "0"})]
    assert answer_by(gate, way) == expected
    assert len(gate.requests) == 3
    gate.refusals[:] = [(429, {"Retry-After": "0"})] * 3
    with pytest.raises(EngineBusyError, match="busy"):
        answer_by(gate, way)
    assert gate.refusals == []
    gate.refusals[:] = [(429, {"Retry-After": "0"})]
    with pytest.raises(EngineBusyError):
        answer_by(gate, way, max_retries=0)
    assert gate.refusals == []


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_retry_after_is_obeyed(gate: Gate, way: str) -> None:
    gate.refusals[:] = [(429, {"Retry-After": "1"})]
    answer_by(gate, way)
    assert 1.0 <= gate.times[1] - gate.times[0] < 3.0


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_hopeless_requests_are_not_retried(gate: Gate, way: str) -> None:
    """A wait is at most a minute and ends before the call's timeout; some refusals forbid a retry."""
    began = time.monotonic()
    for headers, settings in (
        ({"Retry-After": "3600"}, {}),
        ({"Retry-After": "30"}, {"timeout": 2.0}),
        ({"x-should-retry": "false"}, {}),
    ):
        gate.refusals[:] = [(503, headers)]
        with pytest.raises(EngineBusyError):
            answer_by(gate, way, **settings)
    assert time.monotonic() - began < 5
    gate.requests.clear()
    gate.refusals[:] = [(400, {})]
    with pytest.raises(SpecFuseError):
        answer_by(gate, way)
    assert len(gate.requests) == 1


def test_a_lost_connection_is_reopened(gate: Gate) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    model = ChatSpecFuse(base_url=f"http://127.0.0.1:{port}", model="tiny", max_retries=1)
    began = time.monotonic()
    with pytest.raises(EngineClosedError, match="no server answers"):
        model.invoke("Hi")
    assert 0.5 <= time.monotonic() - began < 5


def test_an_answer_that_has_begun_is_not_retried(gate: Gate, tiny: EnsembleEngine) -> None:
    async def truncated(send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        event = b'{"type": "start", "members": ["chat"], "prompt_tokens": 3}'
        line = b'data: {"choices": [{"specfuse": {"events": [' + event + b"]}}]}\n\n"
        await send({"type": "http.response.body", "body": line})

    gate.refusals[:] = [(200, {})]
    plainly = gate.refuse
    gate.refuse = lambda send, *_: truncated(send)  # type: ignore[method-assign]
    try:
        with pytest.raises(EngineClosedError, match="connection to the server was lost"):
            list(RemoteEngine(gate.address, "tiny").stream("Hi"))
    finally:
        gate.refuse = plainly  # type: ignore[method-assign]
    assert len(gate.requests) == 1


# ── headers and keys ─────────────────────────────────────────────────────────────────────────────


def test_headers_can_be_set_for_all_requests_and_for_one(gate: Gate) -> None:
    at: dict[str, Any] = {"base_url": gate.address, "model": "tiny", "default_headers": {"X-Team": "blue"}}
    chat, llm = ChatSpecFuse(**at), SpecFuseLLM(**at)
    chat.invoke("Hi")
    chat.invoke("Hi", extra_headers={"X-Run": "7"})
    chat.invoke("Hi", extra_headers={"X-Team": "red"})
    llm.complete("Hi", extra_headers={"X-Run": "7"})
    asyncio.run(llm.acomplete("Hi", extra_headers={"X-Run": "7"}))
    chat.get_token_ids("Hi")
    results = [(headers.get("x-team"), headers.get("x-run")) for headers in gate.requests]
    assert results == [
        ("blue", None),
        ("blue", "7"),
        ("red", None),
        ("blue", "7"),
        ("blue", "7"),
        ("blue", None),
    ]


def test_headers_are_checked_before_they_are_sent_and_are_in_no_repr(gate: Gate) -> None:
    for headers, word in (
        ({"X-Team": "blue\r\nX-Other: 1"}, "printable"),
        ({"X Team": "blue"}, "printable"),
        ({"X-Team": 5}, "text"),
        ({"authorization": "Bearer secret-value"}, "api_key"),
        ({"Content-Length": "3"}, "by itself"),
        (["X-Team"], "names and values"),
    ):
        with pytest.raises(ConfigError, match=word) as raised:
            ChatSpecFuse(base_url=gate.address, model="tiny").invoke("Hi", extra_headers=headers)
        assert "secret-value" not in str(raised.value)
    with pytest.raises(ConfigError, match="default_headers"):
        SpecFuseLLM(base_url=gate.address, default_headers={"X-Team": "ü"})
    assert gate.requests == []
    for kind in (ChatSpecFuse, SpecFuseLLM):
        model = kind(base_url=gate.address, model="tiny", default_headers={"X-Token": "very-secret"})
        reported = repr(model) + str(model) + str(model.model_dump()) + repr(model._resolve_engine())
        assert "very-secret" not in reported
        assert b"very-secret" not in pickle.dumps(model)


def test_a_wrong_key_is_an_authentication_error(tiny: EnsembleEngine) -> None:
    with serving({"tiny": tiny}, key="right") as client:
        at = str(client.base_url)
        with pytest.raises(AuthenticationError, match="api_key"):
            RemoteEngine(at, "tiny", "wrong").generate("Hi")
        with pytest.raises(ModelAuthenticationError):
            ChatSpecFuse(base_url=at, model="tiny", api_key="wrong").invoke("Hi")
        with pytest.raises(AuthenticationError):
            asyncio.run(SpecFuseLLM(base_url=at, model="tiny", api_key="wrong").acomplete("Hi"))


# ── connections ──────────────────────────────────────────────────────────────────────────────────


def test_answers_on_one_event_loop_share_a_connection_that_ends_with_it(gate: Gate) -> None:
    chat, llm = (kind(base_url=gate.address, model="tiny", max_tokens=3) for kind in (ChatSpecFuse, SpecFuseLLM))

    async def several() -> None:
        for _ in range(3):
            await chat.ainvoke("Hi")
            async for _ in chat.astream("Hi", extra_headers={"X-Run": "7"}):
                pass

    async def on_another_loop() -> None:
        for _ in range(3):
            await llm.acomplete("Hi")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(several())
        assert len(gate.ports) == 1
        asyncio.run(several())  # another loop: its own connection
        assert len(gate.ports) == 2
        asyncio.run(on_another_loop())
        assert len(gate.ports) == 3
        gc.collect()
    assert len(gate.requests) == 15


def test_answers_without_an_event_loop_share_a_connection(gate: Gate) -> None:
    engine = RemoteEngine(gate.address, "tiny")
    chat, llm = (kind(base_url=gate.address, model="tiny", max_tokens=3) for kind in (ChatSpecFuse, SpecFuseLLM))
    for connections, ask in enumerate((engine.generate, chat.invoke, llm.complete), start=1):
        for _ in range(3):
            ask("Hi")
        assert len(gate.ports) == connections
    assert len(list(engine.stream("Hi"))) > 1
    assert "".join(chunk.text for chunk in chat.stream("Hi"))
    assert "".join(response.delta for response in llm.stream_complete("Hi"))
    assert len(gate.ports) == 3


def test_a_client_stops_reading_after_the_end_of_the_answer(
    gate: Gate, tiny: EnsembleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_engine, "END_SECONDS", 0.3)
    finish = event_to_json(list(tiny.stream("Hi", SamplingParams(max_tokens=3)))[-1])

    async def unending(send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        line = f"data: {json.dumps({'choices': [{'specfuse': {'events': [finish]}}]})}\n\n".encode()
        await send({"type": "http.response.body", "body": line, "more_body": True})
        await asyncio.sleep(3)

    monkeypatch.setattr(gate, "refuse", lambda send, *_: unending(send))
    gate.refusals[:] = [(200, {})]
    engine = RemoteEngine(gate.address, "tiny")
    began = time.monotonic()
    assert engine.generate("Hi").text == tiny.generate("Hi", SamplingParams(max_tokens=3)).text
    assert time.monotonic() - began < 2
    assert engine.generate("Hi").text
    assert len(gate.ports) == 2


def test_closing_a_model_and_dropping_it_close_its_connections(gate: Gate) -> None:
    async def dropped() -> None:
        for _ in range(2):
            chat = ChatSpecFuse(base_url=gate.address, model="tiny", max_tokens=3)
            await chat.ainvoke("Hi")
            chat.close()
            await chat.ainvoke("Hi")
            del chat
            gc.collect()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(dropped())
        gc.collect()
    assert len(gate.ports) == 4
    assert QUESTION
