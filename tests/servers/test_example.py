"""The example with two servers runs as written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.model_server import Ways, model_server
from tests.support.tiny import byte_level_tokenizer, metaspace_tokenizer, save_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "rag_servers.py"


@pytest.mark.slow
def test_the_chain_answers_with_two_servers(tmp_path: Path) -> None:
    long = {"max_position_embeddings": 4096}
    chat = save_model("qwen3", byte_level_tokenizer(), tmp_path / "chat", **long)
    base = save_model("llama", metaspace_tokenizer(), tmp_path / "base", seed=1, **long)
    with model_server(chat, Ways(context=4096)) as (one, ways), model_server(base, Ways(context=4096)) as (two, _):
        command = [sys.executable, str(EXAMPLE), f"{chat}={one}", f"{base}={two}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert [body for body in ways.bodies() if "logprob_token_ids" in body]
