"""What a newcomer does first, on any system: `ask` into a file, `compare` twice, `serve` for a moment.

In an environment with the demo: `python .ci/first_steps.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

COMMAND = (sys.executable, "-c", "import sys; from specfuse_shared.cli.commands import main; sys.exit(main())")
QUESTION = "Give me two tips for a good night's sleep. 🌙"
SECONDS = 900
"""The first command converts the demo's models."""


def ask(folder: Path) -> None:
    file = folder / "answer.txt"
    with file.open("wb") as out:
        subprocess.run([*COMMAND, "ask", QUESTION, "--max-tokens", "20"], stdout=out, check=True, timeout=SECONDS)
    answer = file.read_bytes().decode("utf-8")
    assert answer.strip(), "there is no answer in the file"
    assert "\r" not in answer, "line ends of the system were written"
    said(f"ask: {answer.strip()!r}")


def compare(folder: Path) -> None:
    questions, run = folder / "questions.txt", folder / "run.jsonl"
    questions.write_bytes(b"\xef\xbb\xbfWhat is a tide?\r\nWhy do cats purr?\r\n")
    command = [*COMMAND, "compare", "--questions", str(questions), "--run", str(run), "--max-tokens", "8"]
    for _ in range(2):
        done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, check=True, timeout=SECONDS)
        json.loads(done.stdout.decode("utf-8"))
        sizes = len(run.read_bytes().splitlines())
        said(f"compare: {sizes} lines")
    assert not run.with_name("run.jsonl.lock").exists()


def serve(folder: Path) -> None:
    log = folder / "serve.log"  # a pipe of Windows is full after 4 KiB
    group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP} if sys.platform == "win32" else {}
    with log.open("wb") as errors:
        process = subprocess.Popen([*COMMAND, "serve", "--port", "8123"], stderr=errors, **group)
    try:
        until, ready = time.monotonic() + SECONDS, False
        while not ready:
            assert process.poll() is None, f"the server ended: {log.read_text('utf-8', 'replace')}"
            assert time.monotonic() < until, "the server is not ready"
            time.sleep(0.5)
            ready = answers("/health")
        body = {"model": models()[0], "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}
        asked = urllib.request.Request(
            "http://127.0.0.1:8123/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=SECONDS) as reply:
            said(f"serve: {json.load(reply)['choices'][0]['message']['content']!r}")
        process.send_signal(signal.CTRL_BREAK_EVENT if sys.platform == "win32" else signal.SIGTERM)
        code = process.wait(timeout=60)
        assert code == 0, f"the server ended with {code}: {log.read_text('utf-8', 'replace')}"
    finally:
        process.kill()
        process.wait()


def answers(path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:8123{path}", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def models() -> list[str]:
    with urllib.request.urlopen("http://127.0.0.1:8123/v1/models", timeout=30) as reply:
        return [model["id"] for model in json.load(reply)["data"]]


def said(text: str) -> None:
    sys.stdout.buffer.write(f"{text}\n".encode())
    sys.stdout.flush()


if __name__ == "__main__":
    os.environ.pop("SPECFUSE_API_KEY", None)
    with tempfile.TemporaryDirectory() as place:
        ask(Path(place))
        compare(Path(place))
        serve(Path(place))
