"""A server of the tests: the real application with a real socket; its event loop runs in another thread."""

from __future__ import annotations

import asyncio
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
from pydantic import BaseModel, Field
from starlette.types import ASGIApp

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, SamplingParams
from specfuse_shared.api_server.access.clients import Clients
from specfuse_shared.api_server.app import Service, build_app
from specfuse_shared.api_server.models import Models
from specfuse_shared.api_server.run import http_server
from specfuse_shared.api_server.settings import ClientSettings, ServerSettings
from tests.support.reciting import reciting_model, reciting_tokenizer
from tests.support.terminals import restore_interrupts

SPEECH = "the tide comes in and goes out again while people sleep near harbours"
QUESTION = [{"role": "user", "content": "Why is the sea salty?"}]


class Digit(BaseModel):
    """A digit."""

    a: int = Field(ge=0, le=9)


def unkept() -> httpx.AsyncClient:
    """A client without keep-alive: it is never closed, and each test has another event loop."""
    return httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0), timeout=120)


@contextmanager
def serving(
    engines: Mapping[str, EnsembleEngine] | Models,
    settings: ServerSettings | None = None,
    key: str | None = None,
    clients: Mapping[str, ClientSettings] | None = None,
    around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    **sampling: Any,
) -> Iterator[httpx.Client]:
    """A client of a server over these engines, or over models that the caller loads; it stops with the block.

    `around`: an application in front of the server.
    """
    models = engines if isinstance(engines, Models) else Models(engines)
    if models is not engines:
        models.load()
    service = Service(models, settings or ServerSettings(), SamplingParams(**{"max_tokens": 8, **sampling}))
    app = around(build_app(service, Clients(service.settings, key, clients)))
    server = http_server(app, service.settings)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
        thread.start()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with httpx.Client(base_url=address, headers=headers, timeout=60) as client:
            until(lambda: server.started)
            yield client
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


def reciting(folder: Path, endless: bool = False) -> EnsembleConfig:
    """Two members that always give the same answer, once, or repeated until they are stopped."""
    tokenizer = reciting_tokenizer(SPEECH)
    reciting_model(tokenizer, SPEECH, 9.0, endless).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return EnsembleConfig([MemberConfig(str(folder), name=name) for name in ("ann", "bob")], repetition_guard=False)


def until(condition: Any, seconds: float = 20.0) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it was never created"
        time.sleep(0.005)


@contextmanager
def command(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`specfuse-llm serve` in another process, and the address that it prints."""
    call = [sys.executable, "-m", "specfuse_shared", "serve", "--port", "0", *arguments]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    process = subprocess.Popen(
        call,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
        preexec_fn=restore_interrupts if os.name == "posix" else None,
    )
    assert process.stderr is not None
    try:
        yield process, line_of(process, process.stderr, r"listening at (http://\S+)")[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def line_of(process: subprocess.Popen[str], stream: IO[str], pattern: str, seconds: float = 60.0) -> re.Match[str]:
    """A line of the process, which is killed after the time limit. Lines of libraries are skipped."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    skipped = []
    try:
        for line in stream:
            if match := re.search(pattern, line):
                return match
            skipped.append(line)
    finally:
        timer.cancel()
    raise AssertionError(f"no line matches {pattern!r}: {''.join(skipped)}")


def ready(address: str) -> bool:
    """Whether the models are loaded; during loading, a response can take seconds on a busy machine."""
    return httpx.get(f"{address}/health", timeout=60).status_code == 200


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a"],
        },
    },
}
DIGIT = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"]}


def chat(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json={"model": "tiny", "messages": QUESTION, **body})
    assert response.status_code == 200, response.text
    reported: dict[str, Any] = response.json()
    return reported


TIMES = ("timing", "prefill_seconds", "first_segment_seconds", "total_seconds", "leader")
"""Seconds, and the leader, which depends on them."""


class Near(float):
    """A number that equals the results of other batch sizes, up to rounding."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and math.isclose(self, other, rel_tol=5e-3)

    __hash__ = None  # type: ignore[assignment]


def untimed(value: Any) -> Any:
    """The data without seconds, and with scores as `Near`."""
    if isinstance(value, dict):
        return {k: untimed(v) for k, v in value.items() if k not in TIMES and not k.startswith(("lc_run", "id"))}
    if isinstance(value, (list, tuple)):
        return [untimed(v) for v in value]
    return Near(value) if isinstance(value, float) else value
