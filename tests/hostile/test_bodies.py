"""Random request bodies to a server in another process: it survives, sends no 5xx, and delays no other client."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from tests.hostile.strategies import bodies, response_bodies
from tests.support.serving import command, ready, until
from tests.support.tiny import byte_level_tokenizer, save_model

LONGEST_SECONDS = 2.0
"""Maximum seconds that another request waits for a random body, in the event loop or for a lane."""


class Served:
    """A server with a client that sends random bodies; the waits of another client are measured."""

    def __init__(self, address: str) -> None:
        self.client = httpx.Client(base_url=address, timeout=120)
        self.statuses: Counter[int] = Counter()
        self.waited = {"/health": 0.0, "/v1/chat/completions": 0.0}

    def send(self, body: dict[str, Any]) -> None:
        raw = json.dumps({"model": "tiny", "max_tokens": 4, "timeout": 20, **body}).encode()
        path = "/v1/responses" if "input" in body else "/v1/chat/completions"
        response = self.client.post(path, content=raw, headers={"Content-Type": "application/json"})
        assert response.status_code < 500, response.text
        self.statuses[response.status_code] += 1

    def watch(self, over: threading.Event) -> None:
        """The seconds of another client's small requests, sent one after another until the end."""
        small = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        with httpx.Client(base_url=self.client.base_url, timeout=120) as second_client:
            while not over.is_set():
                for path in self.waited:
                    began = time.monotonic()
                    response = (
                        second_client.post(path, json=small) if path.startswith("/v1") else second_client.get(path)
                    )
                    assert response.status_code == 200
                    self.waited[path] = max(self.waited[path], time.monotonic() - began)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("served")
    save_model("qwen3", byte_level_tokenizer(), folder / "one", max_position_embeddings=4096)
    save_model("llama", byte_level_tokenizer(), folder / "two", seed=1, max_position_embeddings=4096)
    config = folder / "serve.toml"
    members = ", ".join(f'{{model = "{folder / name}", dtype = "float32"}}' for name in ("one", "two"))
    config.write_text(f"[ensembles.tiny]\nmembers = [{members}]\n")
    with command("--config", str(config)) as (process, address):
        assert process.stderr is not None
        log = threading.Thread(target=process.stderr.read, daemon=True)  # an unread pipe would block the server
        log.start()
        until(lambda: ready(address), 120)
        result = Served(address)
        yield result
        result.client.close()
        sys.stdout.write(f"\nstatuses: {dict(result.statuses)}, others waited {result.waited}\n")
        assert process.poll() is None, "it ended"


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=bodies() | response_bodies())
def test_no_body_is_answered_with_a_failure(served: Served, body: dict[str, Any]) -> None:
    served.send(body)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_five_thousand_random_bodies_delay_no_other_client(served: Served) -> None:
    over = threading.Event()
    watch = threading.Thread(target=served.watch, args=(over,))
    watch.start()
    try:

        @settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
        @given(body=bodies() | response_bodies())
        def send(body: dict[str, Any]) -> None:
            served.send(body)

        send()
    finally:
        over.set()
        watch.join()
    assert max(served.waited.values()) < LONGEST_SECONDS, served.waited
