"""A small real server of one model over HTTP: the model itself, without a cache, behind vLLM's requests.

Responses are computed by the library's plain forward pass, one request after another. `Ways` are the ways in
which servers differ, or go wrong. Run as a program it serves a folder until it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.servers.token_route import PATH, RefusedError, TokenRoute

MOST_IDS = 128


@dataclass
class Ways:
    """The behaviour of the server, and its received requests."""

    key: str | None = None
    model: str | None = None
    scores_named: bool = True
    prefix_cache: str = "True"
    has_metrics: bool = True
    mode: str = "raw_logprobs"
    delay: float = 0.0
    status: int = 200
    off_by: float = 0.0
    off_by_tokens: float = 0.0
    other_vocabulary: bool = False
    context: int = 512
    tokens: bool = False
    """Whether it has the token endpoint (`--enable-scale-out`)."""
    all_rows: bool = True
    """It sends a row for every token of a prompt; the rows before the cached prefix are the cache's former content."""
    broken_rows: int = 0
    """The number of responses that fail on such rows with NaN, which JSON cannot express."""
    keeps_grammars: bool = True
    fails_under: str = "(?!)"
    """A regular expression: the token endpoint fails under grammars that match it."""
    block: int = 16
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    running: int = 0
    disconnected: int = 0
    keys: set[str | None] = field(default_factory=set)
    replace_choices: Callable[[Any], Any] | None = None
    """Replaces the choices of a completion."""
    replace_tokens: Callable[[Any], Any] | None = None
    """Replaces the answer of the token endpoint."""

    def bodies(self, path: str = "/v1/completions") -> list[dict[str, Any]]:
        return [body for request, body in self.requests if request == path]


class ModelServer:
    """The routes over the model of a folder."""

    def __init__(self, folder: Path | str, ways: Ways) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.size = int(self.model.config.vocab_size)
        self.name, self.root, self.ways = ways.model or str(folder), str(folder), ways
        self._lock = threading.Lock()
        self.next_logits = lru_cache(256)(self._next_logits)
        """Logits after ids, cached since a member requests the same position repeatedly; read-only."""
        get = {"/v1/models": self._models, "/version": self._version, "/metrics": self._metrics}
        post = {"/tokenize": self._tokenize, "/v1/completions": self._completions}
        if ways.tokens:
            post[PATH] = TokenRoute(self).answer
        routes = [Route(path, self._guarded(path, answer)) for path, answer in get.items()]
        routes += [Route(path, self._guarded(path, answer), methods=["POST"]) for path, answer in post.items()]
        self.app = Starlette(routes=routes)

    def _guarded(self, path: str, answer: Any) -> Any:
        async def handle(request: Request) -> Response:
            ways = self.ways
            ways.keys.add(request.headers.get("authorization"))
            if ways.key and request.headers.get("authorization") != f"Bearer {ways.key}" and path != "/metrics":
                return JSONResponse({"error": "Unauthorized"}, 401)
            body = await request.json() if request.method == "POST" else {}
            ways.requests.append((path, body))
            ways.running += 1
            try:
                return await self._unless_disconnected(request, answer, body)
            except RefusedError as error:
                return JSONResponse({"error": {"message": str(error), "code": 400}}, 400)
            finally:
                ways.running -= 1

        return handle

    async def _unless_disconnected(self, request: Request, answer: Any, body: dict[str, Any]) -> Response:
        """The answer, unless the client disconnects before."""
        gone = threading.Event()
        work = asyncio.create_task(asyncio.to_thread(self._slowly, answer, body, gone))
        while not work.done():
            await asyncio.wait([work], timeout=0.01)
            if await request.is_disconnected():
                gone.set()
                self.ways.disconnected += 1
                await asyncio.gather(work, return_exceptions=True)
                return Response(status_code=499)
        return work.result()

    def _slowly(self, answer: Any, body: dict[str, Any], gone: threading.Event) -> Response:
        generates = "prompt" in body or "token_ids" in body
        if generates and gone.wait(self.ways.delay):
            raise RefusedError("the client left")
        if generates and self.ways.status != 200:
            return JSONResponse({"error": {"message": "out of order"}}, self.ways.status)
        with self._lock, torch.inference_mode():
            result: Response = answer(body)
        return result

    # ── vLLM ─────────────────────────────────────────────────────────────────────────────────────

    def _models(self, body: dict[str, Any]) -> Response:
        card = {"id": self.name, "root": self.root, "max_model_len": self.ways.context}
        return JSONResponse({"object": "list", "data": [card]})

    def _version(self, body: dict[str, Any]) -> Response:
        return JSONResponse({"version": "0.0-tests"})

    def _metrics(self, body: dict[str, Any]) -> Response:
        if not self.ways.has_metrics:
            return PlainTextResponse("no such page", 404)
        setting = f'block_size="{self.ways.block}",enable_prefix_caching="{self.ways.prefix_cache}",engine="0"'
        return PlainTextResponse(f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{setting}}} 1.0\n")

    def _tokenize(self, body: dict[str, Any]) -> Response:
        ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body.get("add_special_tokens", True))
        return JSONResponse({"tokens": ids[::-1] if self.ways.other_vocabulary else ids, "count": len(ids)})

    def _completions(self, body: dict[str, Any]) -> Response:
        if (unknown := self.unknown(body)) is not None:
            return unknown
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        named = body.get("logprob_token_ids") if self.ways.scores_named else None
        if named is not None:
            self.check(len(named) <= MOST_IDS, f"Requested logprob_token_ids of length {len(named)}")
            self.check(body.get("logprobs") is not None, "when using `logprob_token_ids`, `logprobs` must be set.")
        for request in (named, body.get("allowed_token_ids"), map(int, body.get("logit_bias") or {})):
            self.check(all(0 <= token < self.size for token in request or ()), "out-of-vocab token ids")
        choices = [self._choice(n, prompt, body, named) for n, prompt in enumerate(prompts)]
        if self.ways.replace_choices is not None:
            return Response(json.dumps({"choices": self.ways.replace_choices(choices)}), media_type="application/json")
        return JSONResponse({"model": self.name, "choices": choices})

    def unknown(self, body: dict[str, Any]) -> Response | None:
        """The refusal of a model that is not served."""
        if body["model"] == self.name:
            return None
        return JSONResponse({"error": {"message": f"The model `{body['model']}` does not exist."}}, 404)

    def _choice(self, index: int, prompt: list[int], body: dict[str, Any], named: list[int] | None) -> dict[str, Any]:
        self.check(len(prompt) + body["max_tokens"] <= self.ways.context, "this model's maximum context length")
        ids, reported = list(prompt), []
        choice = {"index": index, "text": "", "finish_reason": "length", "prompt_logprobs": None}
        for _ in range(body["max_tokens"]):
            logits = self.next_logits(tuple(ids))
            processed = self.processed(logits, ids, body)
            token = self.pick(processed, body, len(ids))
            reported.append(self._reported(logits, processed, named if named is not None else [], token))
            ids.append(token)
            if token in body.get("stop_token_ids", ()):
                choice["finish_reason"] = "stop"
                break
        if body.get("return_token_ids"):
            choice["token_ids"] = ids[len(prompt) :]
        if body.get("logprobs") is not None:
            choice["logprobs"] = {"tokens": [f"token_id:{t}" for t in ids[len(prompt) :]], "top_logprobs": reported}
        if body.get("prompt_logprobs") is not None:
            rows = self.logits(prompt)
            scores = rows if self.ways.mode == "raw_logits" else rows.log_softmax(-1)
            rows_of_prompt = [self._ranked(scores[n], t, body["prompt_logprobs"]) for n, t in enumerate(prompt[1:])]
            choice["prompt_logprobs"] = [None, *rows_of_prompt]
        return choice

    def _ranked(self, scores: torch.Tensor, token_id: int, count: int) -> dict[str, Any]:
        """The prompt's own token, and `count` of the most probable."""
        options = dict.fromkeys([token_id, *scores.topk(count).indices.tolist()])
        ranks = {token: int((scores > scores[token]).sum()) + 1 for token in options}
        return {str(token): {"logprob": float(scores[token]), "rank": rank} for token, rank in ranks.items()}

    def _reported(
        self, logits: torch.Tensor, processed: torch.Tensor, named: list[int], token: int
    ) -> dict[str, float]:
        """Log p in the form that `Ways` configures."""
        raw = {"raw_logits": logits, "processed_logprobs": processed.log_softmax(-1)}
        scores = raw.get(self.ways.mode, logits.log_softmax(-1)) + self.ways.off_by
        return {f"token_id:{t}": max(float(scores[t]), -9999.0) for t in (token, *named)}

    # ── the model ────────────────────────────────────────────────────────────────────────────────

    def logits(self, ids: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self.model(torch.tensor([ids]), use_cache=False).logits[0].float()
        return logits

    def _next_logits(self, ids: tuple[int, ...]) -> torch.Tensor:
        return self.logits(list(ids))[-1].clone()

    def processed(self, logits: torch.Tensor, ids: list[int], body: dict[str, Any]) -> torch.Tensor:
        scores = logits.clone()
        for token, bias in (body.get("logit_bias") or {}).items():
            scores[int(token)] += bias
        if body.get("allowed_token_ids") is not None:
            keep = torch.full_like(scores, -math.inf)
            keep[body["allowed_token_ids"]] = 0
            scores = scores + keep
        rules = LogitsProcessorList()
        if (penalty := body.get("repetition_penalty") or 1.0) != 1.0:
            rules.append(RepetitionPenaltyLogitsProcessor(penalty))
        if temperature := body.get("temperature"):
            rules.append(TemperatureLogitsWarper(float(temperature)))
            rules.extend([TopKLogitsWarper(body["top_k"])] if body.get("top_k") else [])
            rules.extend([TopPLogitsWarper(body["top_p"])] if body.get("top_p", 1.0) < 1 else [])
            rules.extend([MinPLogitsWarper(body["min_p"])] if body.get("min_p") else [])
        processed: torch.Tensor = rules(torch.tensor([ids]), scores[None])[0]
        return processed

    def pick(self, scores: torch.Tensor, body: dict[str, Any], place: int) -> int:
        if not body.get("temperature"):
            return int(scores.argmax())
        generator = torch.Generator().manual_seed(hash((body["seed"], place)) % 2**62)
        return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))

    def check(self, condition: bool, message: str) -> None:
        if not condition:
            raise RefusedError(message)


@contextmanager
def model_server(folder: Path | str, ways: Ways | None = None, port: int = 0, **tls: Any) -> Iterator[tuple[str, Ways]]:
    """The address of a server of this model, and its ways; it stops with the block."""
    ways = ways or Ways()
    config = uvicorn.Config(ModelServer(folder, ways).app, log_level="error", lifespan="off", **tls)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", port), backlog=256) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
        thread.start()
        limit = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < limit, "the server did not start"
            time.sleep(0.01)
        try:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{port}/v1", ways
        finally:
            server.should_exit = server.force_exit = True
            thread.join(20)
    assert not thread.is_alive(), "the server did not stop"


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.run(ModelServer(sys.argv[1], Ways()).app, port=int(sys.argv[2]), log_level="error", lifespan="off")
