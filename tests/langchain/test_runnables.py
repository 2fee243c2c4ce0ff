"""LangChain's machinery around a model: event streams, configurable fields, retries; and no access to the network."""

from __future__ import annotations

import subprocess
import sys

import pytest
from langchain_core.messages import AIMessageChunk
from langchain_core.runnables import ConfigurableField

from langchain_specfuse import ChatSpecFuse
from specfuse_shared import EnsembleEngine

QUESTION = "Write one sentence about the sea."
OFFLINE = """
import socket

def refuse(*_):
    raise OSError("the network is cut")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse

from langchain_specfuse import ChatSpecFuse

print(ChatSpecFuse(members="demo", max_tokens=6).invoke("Name a colour.").content)
"""


@pytest.fixture(scope="module")
def model(demo_engine: EnsembleEngine) -> ChatSpecFuse:
    return ChatSpecFuse(engine=demo_engine, max_tokens=12)


async def test_events_of_version_two_carry_the_segments(model: ChatSpecFuse) -> None:
    events = [event async for event in model.astream_events(QUESTION, version="v2")]
    names = [event["event"] for event in events]
    assert (names[0], names[-1]) == ("on_chat_model_start", "on_chat_model_end")
    pieces = [event["data"]["chunk"] for event in events if event["event"] == "on_chat_model_stream"]
    assert all(isinstance(piece, AIMessageChunk) for piece in pieces)
    whole = events[-1]["data"]["output"]
    assert "".join(piece.content for piece in pieces) == whole.content == (await model.ainvoke(QUESTION)).content
    reported = [s for piece in pieces for s in piece.additional_kwargs.get("specfuse_segments", ())]
    assert reported == whole.additional_kwargs["specfuse_segments"] != []


def test_configurable_fields_and_retries_keep_the_engine(model: ChatSpecFuse, demo_engine: EnsembleEngine) -> None:
    forwards = demo_engine.metrics().forwards
    chosen = model.configurable_fields(max_tokens=ConfigurableField(id="room"))
    short = chosen.invoke(QUESTION, {"configurable": {"room": 3}})
    assert short.usage_metadata["output_tokens"] == 3
    assert model.with_retry().invoke(QUESTION).content == model.bind(max_tokens=12).invoke(QUESTION).content
    assert demo_engine.metrics().forwards != forwards, "all of them ran on the one engine"


@pytest.mark.slow
def test_loading_and_answering_need_no_network() -> None:
    done = subprocess.run([sys.executable, "-c", OFFLINE], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
