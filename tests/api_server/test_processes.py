"""Two programs, of LangChain and of LlamaIndex, answer at once through one server: weights are loaded once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from specfuse_shared import MemberConfig
from tests.support.serving import command, ready, until

LANGCHAIN = """
import json, sys
from langchain_core.prompts import ChatPromptTemplate
from langchain_specfuse import ChatSpecFuse
llm = ChatSpecFuse(base_url=sys.argv[1], max_tokens=24)
chain = ChatPromptTemplate.from_template("Answer briefly: {question}") | llm
chunks = list(chain.stream({"question": "Why is the sky blue?"}))
segments = [s for c in chunks for s in c.additional_kwargs.get("specfuse_segments", [])]
print(json.dumps({"text": "".join(c.text for c in chunks), "members": sorted({s["member"] for s in segments})}))
"""
LLAMAINDEX = """
import json, sys
from llama_index.core import Document, SummaryIndex
from llamaindex_specfuse import SpecFuseLLM
llm = SpecFuseLLM(base_url=sys.argv[1], max_tokens=24)
index = SummaryIndex.from_documents([Document(text="The observatory opens at seven in the evening.")])
answer = index.as_query_engine(llm=llm).query("When does the observatory open?")
print(json.dumps({"text": str(answer), "members": llm.complete("Hi").raw["specfuse"]["members"]}))
"""
SERVED = """
import gc, os, signal, sys, threading, time
from specfuse_shared import EnsembleConfig
from specfuse_shared.api_server.run import serve
from specfuse_shared.api_server.settings import ServeConfig, ServerSettings

def look():
    until = time.monotonic() + 60
    while not gc.get_freeze_count() and time.monotonic() < until:
        time.sleep(0.05)
    print(gc.get_freeze_count(), len(gc.get_objects()))
    os.kill(os.getpid(), signal.SIGTERM)

config = ServeConfig({"tiny": EnsembleConfig(sys.argv[1:])}, ServerSettings(port=0))
serve(config, lambda address: threading.Thread(target=look).start())
"""
WEIGHTS = (".safetensors", ".gguf")
MEASURE = """
import psutil
own = psutil.Process()
sys.stderr.write(json.dumps([own.memory_info().rss, [f.path for f in own.memory_maps()]]))
"""


def output_of(process: subprocess.Popen[str]) -> tuple[dict[str, Any], int, list[str]]:
    """The output of a program, its memory in bytes, and the files that it had mapped."""
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    rss, maps = json.loads(errors.splitlines()[-1])
    return json.loads(out), rss, maps


@pytest.fixture(params=["tiny", pytest.param("demo", marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest, tiny_members: list[MemberConfig]) -> Iterator[tuple[str, psutil.Process]]:
    """Address and process of a server."""
    tiny = [arg for member in tiny_members for arg in ("--member", member.model)]
    with command(*(tiny if request.param == "tiny" else ()), SPECFUSE_API_KEY="") as (process, address):
        until(lambda: ready(address), 240)
        yield address, psutil.Process(process.pid)


@pytest.mark.slow
def test_two_programs_share_the_weights_of_one_server(
    served: tuple[str, psutil.Process], record_property: Callable[[str, object], None], request: pytest.FixtureRequest
) -> None:
    address, server = served
    before = server.memory_info().rss
    commands = [[sys.executable, "-c", script + MEASURE, address] for script in (LANGCHAIN, LLAMAINDEX)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(each, cwd=Path(__file__).parents[2], **pipes) for each in commands]
    outcomes = [output_of(process) for process in both]
    after = server.memory_info().rss
    members = httpx.get(f"{address}/v1/models").json()["data"][0]["specfuse"]["members"]
    for answer, size, maps in outcomes:
        assert answer["text"]
        assert set(answer["members"]) <= set(members)
        assert not [path for path in maps if path.endswith(WEIGHTS)]
        assert size < before / 2 or "tiny" in request.node.name, "the program holds no weights"
    sizes = {"server before": before, "server after": after}
    sizes |= {f"program {n}": size for n, (_, size, _) in enumerate(outcomes)}
    for name, size in sizes.items():
        record_property(f"MiB of the {name}", round(size / 2**20))


@pytest.mark.slow
def test_loaded_objects_are_frozen_for_the_garbage_collector(tiny_members: list[MemberConfig]) -> None:
    members = [member.model for member in tiny_members]
    done = subprocess.run([sys.executable, "-c", SERVED, *members], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    settled, unfrozen = map(int, done.stdout.split())
    assert settled > 100_000 > 10 * unfrozen
