"""Clients that disconnect, clients that read slowly, many concurrent clients, and the shutdown of a server."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, SamplingParams
from tests.support.serving import QUESTION, command, line_of, ready, until

LONG = {"model": "tiny", "messages": QUESTION, "max_tokens": 3000, "ignore_eos": True}
CHAT = "/v1/chat/completions"


def threads_of_answers() -> int:
    """The number of threads, without the bounded pools, which grow under concurrent requests and keep their threads."""
    pools = ("asyncio_", "AnyIO worker", "specfuse-http", "specfuse-opening")
    return sum(not thread.name.startswith(pools) for thread in threading.enumerate())


def idle(engine: EnsembleEngine) -> bool:
    now = engine.metrics()
    return (now.running, now.waiting, now.cache_bytes) == (0, 0, 0)


def test_a_client_that_leaves_a_stream_stops_the_compute(client: httpx.Client, tiny: EnsembleEngine) -> None:
    cancelled = tiny.metrics().requests["cancelled"]
    with client.stream("POST", CHAT, json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()  # the reference keeps the stream open
        next(lines)
        assert tiny.metrics().running == 1
    until(lambda: idle(tiny), 5)
    assert tiny.metrics().requests["cancelled"] == cancelled + 1


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 3, "temperature": 1.0}])
def test_a_client_that_leaves_before_the_answer_stops_the_compute(
    client: httpx.Client, tiny: EnsembleEngine, more: dict[str, Any]
) -> None:
    until(lambda: idle(tiny))
    raw = json.dumps({**LONG, **more}).encode()
    headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    head = f"POST {CHAT} HTTP/1.1\r\n{headers}\r\n\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as connection:
        connection.sendall(head.encode() + raw)
        until(lambda: tiny.metrics().running == more.get("n", 1))
    until(lambda: idle(tiny), 5)


@pytest.mark.slow
def test_slow_readers_do_not_slow_the_others(client: httpx.Client, tiny: EnsembleEngine) -> None:
    """The slow clients request long answers, and read nothing until the other clients have their answers."""
    until(lambda: idle(tiny))
    body = {**LONG, "max_tokens": 600, "stream": True, "specfuse": {"ledger": "full", "events": True}}
    with client.stream("POST", CHAT, json=body) as slow, client.stream("POST", CHAT, json=body) as slower:
        for _ in range(3):
            answer = client.post(CHAT, json={"model": "tiny", "messages": QUESTION, "max_tokens": 8})
            assert answer.status_code == 200
            assert answer.elapsed.total_seconds() < 5
        until(lambda: tiny.metrics().running == 0, 60)
        read = [response.read().decode() for response in (slow, slower)]
    assert all(text.endswith("data: [DONE]\n\n") for text in read)
    assert min(map(len, read)) > 100_000


def test_each_of_many_clients_gets_its_own_answer_although_a_third_disconnect(
    client: httpx.Client, tiny: EnsembleEngine
) -> None:
    """60 concurrent clients; afterwards no answer, cache, thread or socket of them remains."""
    until(lambda: idle(tiny))
    words = ["sea", "moon", "tide", "salt", "fish", "cat", "dog", "sun"]
    expected = {w: tiny.generate(f"Describe the {w}", SamplingParams(max_tokens=12)).text for w in words}
    process, chance = psutil.Process(), random.Random(5)
    requests = [(words[i % len(words)], chance.random() < 1 / 3) for i in range(60)]

    async def ask(http: httpx.AsyncClient, word: str, leaves: bool) -> str | None:
        turns = [{"role": "user", "content": f"Describe the {word}"}]
        body = {"model": "tiny", "messages": turns, "max_tokens": 12, "stream": True}
        text = ""
        async with http.stream("POST", CHAT, json={**body, "max_tokens": 600} if leaves else body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                    if leaves and chance.random() < 0.5:
                        return None
        return None if leaves else text

    async def all_of_them() -> list[str | None]:
        async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as http:
            return await asyncio.gather(*(ask(http, *each) for each in requests))

    asyncio.run(all_of_them())
    until(lambda: idle(tiny))
    threads = threads_of_answers()
    answers = asyncio.run(all_of_them())
    for (word, _), answer in zip(requests, answers, strict=True):
        assert answer is None or answer == expected[word]
    assert sum(answer is not None for answer in answers) > 30
    until(lambda: idle(tiny))
    assert threads_of_answers() <= threads
    until(lambda: len([c for c in process.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]) <= 4)


# ── the command ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_server_that_is_stopped_lets_answers_finish(tiny_members: list[MemberConfig]) -> None:
    models = [arg for member in tiny_members for arg in ("--member", member.model)]
    with command(*models, SPECFUSE_API_KEY="") as (process, address):
        until(lambda: ready(address), 60)
        (ensemble, *_) = httpx.get(f"{address}/v1/models").json()["data"]
        assert ensemble["id"] == "chat+base"
        body = {**LONG, "model": "chat+base", "max_tokens": 400, "stream": True}
        with httpx.stream("POST", address + CHAT, json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{address}/health")
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(20) == 0
        text = process.stderr.read() if process.stderr else ""
    assert re.search(r"POST /v1/chat/completions 200 .* completion_tokens=\d+", text)
    assert "salty" not in text


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_server_prints_nothing_on_stderr(tiny_members: list[MemberConfig], number: signal.Signals) -> None:
    """The libraries of grammars and tokenizers print nothing either when the process ends."""
    with command("--member", tiny_members[0].model, SPECFUSE_API_KEY="") as (process, address):
        until(lambda: ready(address), 60)
        grammar = {"kind": "choice", "source": '["yes", "no"]'}
        body = {"model": "chat", "messages": QUESTION, "grammar": grammar}
        answer = httpx.post(address + CHAT, json=body, timeout=60)
        assert answer.json()["choices"][0]["message"]["content"] in ("yes", "no")
        line_of(process, process.stderr, "POST /v1/chat/completions 200")  # skips the libraries' own lines
        process.send_signal(number)
        assert process.wait(20) == 0
        text = process.stderr.read() if process.stderr else ""
    assert [line for line in text.splitlines() if not re.match(r"\d{4}-\d\d-\d\d ", line)] == []


@pytest.mark.slow
def test_answers_that_do_not_finish_in_time_end_with_an_error(tmp_path: Path, tiny_members: list[MemberConfig]) -> None:
    members = json.dumps([member.model for member in tiny_members])
    (file := tmp_path / "serve.toml").write_text(
        f"[server]\nport = 0\nstop_seconds = 1\n[ensembles.tiny]\nmembers = {members}\n", "utf-8"
    )
    with command("--config", str(file), SPECFUSE_API_KEY="") as (process, address), ThreadPoolExecutor() as pool:
        until(lambda: ready(address), 60)
        whole = pool.submit(httpx.post, address + CHAT, json=LONG, timeout=60)
        with httpx.stream("POST", address + CHAT, json={**LONG, "stream": True}, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            reported = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert reported[-1]["error"]["code"] == "stopping"
        assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "stopping")
        assert process.wait(20) == 0
        assert "Traceback" not in (process.stderr.read() if process.stderr else "")


@pytest.mark.slow
def test_a_server_whose_members_cannot_be_loaded_stops_with_the_reason(tmp_path: Path) -> None:
    with command("--member", str(tmp_path / "nobody"), SPECFUSE_API_KEY="") as (process, _):
        assert process.wait(60) == 1
        text = process.stderr.read() if process.stderr else ""
    assert "nobody" in text.splitlines()[-1]
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "SPECFUSE_API_KEY holds no key"),
        (["--port", "99999"], "--port must be between 0 and 65535"),
        (["--config", "none.toml"], "none.toml cannot be read"),
        (["--config", "none.toml", "--member", "x"], "leave --member"),
        (["--prot", "1"], "--port"),
        (["--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY holds no key"),
    ],
)
def test_a_wrong_command_line_is_reported_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specfuse_shared.cli.commands import main

    monkeypatch.delenv("SPECFUSE_API_KEY", raising=False)
    assert main(["serve", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_port_in_use_is_reported(tiny_members: list[MemberConfig], capsys: pytest.CaptureFixture[str]) -> None:
    from specfuse_shared.api_server.run import serve
    from specfuse_shared.api_server.settings import ServeConfig, ServerSettings
    from specfuse_shared.errors import ConfigError

    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ServerSettings(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="choose another --port"):
            serve(ServeConfig({"tiny": EnsembleConfig(tiny_members)}, settings))
