"""Greedy decoding of one member's model on a running vLLM server, by its OpenAI routes."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TIMEOUT = 300


class Peer:
    """The server at `url` ("http://127.0.0.1:8000"). Raises `ConnectionError` if it does not answer."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            self.model: str = self._ask("/v1/models")["data"][0]["id"]
            self.version: str = self._ask("/version").get("version", "?")
        except (OSError, KeyError, IndexError, ValueError) as error:
            raise ConnectionError(f"no vLLM server answers at {url}: {error}") from error

    def speed(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Tokens a second of concurrent prompts (token ids), with answers of `tokens` tokens."""
        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            made = sum(pool.map(lambda prompt: self._decoded(prompt, tokens), prompts))
        return made / (time.perf_counter() - start)

    def _decoded(self, prompt: Sequence[int], tokens: int) -> int:
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0}
        return int(self._ask("/v1/completions", {**body, "ignore_eos": True})["usage"]["completion_tokens"])

    def _ask(self, route: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + route, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
            return json.loads(reply.read())
