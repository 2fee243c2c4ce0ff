"""Real quantised files: SmolLM2 of the demo, and those that $SPECFUSE_GGUF names, against llama.cpp's own decoding."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, Message, SamplingParams, demo_members
from tests.support.llamacpp import members_of

pytest.importorskip("llama_cpp")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

FILES = [demo_members()[0].model, *filter(None, os.environ.get("SPECFUSE_GGUF", "").split(os.pathsep))]
SUBJECTS = (
    "the tide, honey, a lighthouse, iron, sleep, bread, a comet, rain, chess, salt, glass, wool, a bridge, tea, moss, "
    "a violin, ice, a harbour, sugar, the wind"
)
QUESTIONS = [f"Say a few things about {subject.strip()}." for subject in SUBJECTS.split(",")]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", FILES, ids=lambda file: Path(file).stem)
def test_twenty_answers_equal_those_of_the_library(file: str) -> None:
    from llama_peer import LlamaPeer

    assert len(QUESTIONS) == 20
    config = EnsembleConfig(
        [MemberConfig(file, backend="llama.cpp", threads=1)], speculation="off", reuse_prefixes=False
    )
    with EnsembleEngine(config) as engine:
        [member] = members_of(engine)
        peer = LlamaPeer(Path(file), 1)
        for question in QUESTIONS:
            prompt = member.encode_prompt([Message("user", question)])
            [expected] = peer.decode([prompt], 40, ends=True)
            result = engine.generate(question, SamplingParams(max_tokens=40))
            assert result.text == member.codec.decode(expected).rstrip("\ufffd"), question
