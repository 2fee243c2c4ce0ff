"""Members on servers in both frameworks: the same answers as local members, and configurations that can be stored."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from langchain_core.load import dumpd

from langchain_specfuse import ChatSpecFuse
from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import MemberConfig
from tests.servers.model_server import Ways, model_server
from tests.support.served import QUESTIONS
from tests.support.tiny import save_pair

KEY = "a-key-that-nobody-may-see"


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models with contexts that fit LlamaIndex's prompts."""
    return save_pair(tmp_path_factory, max_position_embeddings=2048)


@pytest.fixture
def members(long: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("KEY_OF_TESTS", KEY)
    with model_server(long["chat"], Ways(key=KEY, context=2048)) as (url, _):
        yield [
            MemberConfig(str(long["chat"]), name="chat", server=url, api_key_env="KEY_OF_TESTS", resources={"GPU": 1}),
            MemberConfig(str(long["base"]), name="base"),
        ]


def test_a_chat_model_of_langchain_answers_as_with_members_here(
    long: dict[str, Path], members: list[MemberConfig]
) -> None:
    here = [str(folder) for folder in long.values()]
    with ChatSpecFuse(members=members, max_tokens=20) as there, ChatSpecFuse(members=here, max_tokens=20) as local:
        for question in QUESTIONS:
            assert there.invoke(question).text == local.invoke(question).text
        assert "".join(chunk.text for chunk in there.stream(QUESTIONS[0])) == local.invoke(QUESTIONS[0]).text
        stored = pickle.dumps(there)
        for text in (stored.decode("latin1"), str(dumpd(there)), str(there.model_dump()), repr(there)):
            assert KEY not in text
        with pickle.loads(stored) as again:
            assert again.members == there.members
            assert again.invoke(QUESTIONS[1]).text == local.invoke(QUESTIONS[1]).text


def test_a_model_of_llamaindex_answers_as_with_members_here(long: dict[str, Path], members: list[MemberConfig]) -> None:
    here = [str(folder) for folder in long.values()]
    with SpecFuseLLM(members=members, max_tokens=20) as there, SpecFuseLLM(members=here, max_tokens=20) as local:
        for question in QUESTIONS:
            assert there.complete(question).text == local.complete(question).text
        stored = there.to_dict()
        assert KEY not in str(stored)
        with SpecFuseLLM.from_dict(stored) as again:
            assert again.members == there.members
            assert again.complete(QUESTIONS[1]).text == local.complete(QUESTIONS[1]).text
