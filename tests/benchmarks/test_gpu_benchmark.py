"""The GPU benchmark runs on a machine without one, with small sizes, and its shapes equal the real models' shapes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from vllm_peer import Peer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PARAMETERS = {
    "llama-3-8b": 8_030_261_248,
    "qwen2.5-7b": 7_615_616_512,
    "mistral-7b": 7_248_023_552,
    "gemma-2-9b": 9_241_705_984,
    "glm-4-9b": 9_399_951_360,
}
"""Parameters of the published checkpoints."""


def run(*arguments: str, script: str = "gpu.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_all_figures_are_measured_with_small_sizes_on_a_cpu(tmp_path: Path) -> None:
    done = run("--tiny", "--repeats", "1", "--without", "context", "--json", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stderr
    text = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    names = [figure["name"].split(",")[0] for figure in text["figures"]]
    assert names.count("decode ÷ bytes/bandwidth") == names.count("verify 5 ÷ a decode step") == 5
    assert [name for name in names if name.startswith("a round of")] == [
        f"a round of {count} ÷ 10 forward passes each at the floor" for count in (1, 2, 3, 5)
    ]
    assert names[14:] == [
        *["seconds to the first segment"] * 2,
        *[f"tokens/s of {count} at once" for count in (1, 2, 4)],
        *["seconds with ÷ without speculation"] * 3,
        "seconds a token of five of the same weights ÷ one alone",
        "speed with new lengths ÷ with the same ones again",
        "first segment of eight with one new prompt ÷ of one",
        "longest pause of 8 streams",
        *["int8 products ÷ reading bf16"] * 3,
    ]
    assert all(figure["ratio"] > 0 for figure in text["figures"])
    assert {"bandwidth", "memory", "4 answers at once", *PARAMETERS} <= text["facts"].keys()
    assert all("paged execution" in text["facts"][name] for name in PARAMETERS)
    replayed, packed, dynamic = text["facts"]["forward passes, answers at once"].split(", ")
    assert (replayed, dynamic) == ("0 replayed", "0 dynamic"), "prompts are packed, too"
    assert int(packed.split()[0]) > 0


@pytest.mark.slow
def test_longer_contexts_are_measured_with_and_without_speculation(tmp_path: Path) -> None:
    done = run("--tiny", "--only", "context 48", "--json", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stderr
    text = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert not text["figures"]
    assert not any(fact.startswith("failed") for fact in text["facts"].values())
    assert all(f"context 48: decode, {name}" in text["facts"] for name in PARAMETERS)
    for count in (1, 2, 4):
        reply = text["facts"][f"context 48: {count} at once, 5 members"]
        assert "speculation off; " in reply
        assert reply.endswith("speculation auto")


class Server(BaseHTTPRequestHandler):
    """vLLM's routes that the benchmark uses; every answer has the requested number of tokens."""

    def do_GET(self) -> None:
        self._send({"/version": {"version": "0.0"}, "/v1/models": {"data": [{"id": "served"}]}}[self.path])

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, request["model"], request["ignore_eos"]) == ("/v1/completions", "served", True)
        self._send({"usage": {"completion_tokens": request["max_tokens"]}})

    def _send(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.mark.slow
def test_the_results_of_an_interrupted_run_and_a_servers_decode_are_written(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--tiny", "--repeats", "1", "--compare-vllm", url]
        running = subprocess.Popen([*command, "--json", str(file)], stdout=subprocess.PIPE, text=True)
        limit = time.monotonic() + 200
        while not (file.exists() and "÷ vLLM's" in file.read_text("utf-8")):
            assert running.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        output, _ = running.communicate(timeout=60)
        server.shutdown()
    assert running.returncode == 0
    text = json.loads(file.read_text("utf-8"))
    assert any("interrupted" in fact for fact in text["facts"].values())
    assert "vLLM, 2 at once" in text["facts"]
    assert "| measured | ratio | aim | from |" in output


@pytest.mark.slow
def test_no_part_begins_after_the_time_limit(tmp_path: Path) -> None:
    done = run("--tiny", "--minutes", "0", "--json", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stderr
    text = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert not text["figures"]
    assert "left out" in text["facts"]["answers at once"]


def test_a_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(ConnectionError, match="no vLLM server answers at"):
        Peer("http://127.0.0.1:9")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_real_sizes_are_refused() -> None:
    done = run("--repeats", "1")
    assert done.returncode == 2
    assert "--tiny runs the same code on a CPU" in done.stderr


@pytest.mark.slow
def test_shapes_equal_the_real_models_shapes() -> None:
    code = (
        f"import sys, torch; sys.path.insert(0, {str(BENCHMARKS)!r}); from bench_members import SHAPES, weight_bytes\n"
        "for s in SHAPES: print(s.name, weight_bytes(s.config(tiny=False), torch.bfloat16) // 2)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    results = dict(line.split() for line in done.stdout.splitlines())
    assert results.keys() == PARAMETERS.keys()
    for name, count in PARAMETERS.items():
        assert abs(int(results[name]) / count - 1) < 1e-4, name
