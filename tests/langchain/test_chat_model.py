"""ChatSpecFuse over the real demo ensemble."""

from __future__ import annotations

import copy
import json
import pickle
from itertools import pairwise
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.prompts import ChatPromptTemplate

from langchain_specfuse import ChatSpecFuse
from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig
from specfuse_shared.errors import ConfigError, RequestError

QUESTION = "Write one sentence about the sea."
PROVENANCE = {"round", "member", "scores", "weights", "tokens", "start", "end"}


@pytest.fixture(scope="module")
def model(demo_engine: EnsembleEngine) -> ChatSpecFuse:
    return ChatSpecFuse(engine=demo_engine, max_tokens=16)


@pytest.fixture(scope="module")
def chunks(model: ChatSpecFuse) -> list[AIMessageChunk]:
    return list(model.stream(QUESTION))


@pytest.fixture(scope="module")
def answer(model: ChatSpecFuse) -> AIMessage:
    return model.invoke(QUESTION)


# ── an answer ────────────────────────────────────────────────────────────────────────────────────


def test_joined_chunks_are_the_invoked_answer(chunks: list[AIMessageChunk], answer: AIMessage) -> None:
    assert len(chunks) > 2
    assert "".join(str(chunk.content) for chunk in chunks) == answer.content != ""


def test_every_chunk_but_the_last_is_one_verified_segment(chunks: list[AIMessageChunk]) -> None:
    *segments, last = chunks
    for chunk in segments:
        [segment] = chunk.additional_kwargs["specfuse_segments"]
        assert set(segment) == PROVENANCE
        assert segment["end"] - segment["start"] == len(chunk.content)
    assert last.content == ""
    assert last.chunk_position == "last"


def test_provenance_offsets_rebuild_the_answer(answer: AIMessage) -> None:
    segments = answer.additional_kwargs["specfuse_segments"]
    assert segments[0]["start"] == 0
    assert all(a["end"] == b["start"] for a, b in pairwise(segments))
    assert segments[-1]["end"] == len(answer.content)


def test_provenance_names_members_and_their_judgement(answer: AIMessage, demo_engine: EnsembleEngine) -> None:
    names = set(demo_engine.config.names)
    first = answer.additional_kwargs["specfuse_segments"][0]
    assert first["member"] in names
    assert first["tokens"] > 0
    assert set(first["scores"]) <= names
    assert all(0 <= score <= 1 for score in first["scores"].values())
    assert sum(first["weights"].values()) == pytest.approx(1)


def test_provenance_and_ledger_are_json(model: ChatSpecFuse) -> None:
    answer = model.model_copy(update={"ledger": "full"}).invoke(QUESTION)
    saved = json.loads(json.dumps({**answer.additional_kwargs, **answer.response_metadata}))
    assert "".join(r["text"] for r in saved["specfuse"]["rounds"]).startswith(str(answer.content))


def test_usage_and_metadata_are_sent_once(answer: AIMessage, chunks: list[AIMessageChunk]) -> None:
    usage = answer.usage_metadata
    assert usage is not None
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert 0 < usage["output_tokens"] <= 16
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert answer.response_metadata["model_provider"] == "specfuse"
    assert answer.response_metadata["model_name"] == "smollm2-135m+gemma3-270m"
    assert [bool(chunk.usage_metadata) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


class Recorder(BaseCallbackHandler):
    """Keeps the arguments of callbacks."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:  # type: ignore[override]
        self.tokens.append(token)


def test_callbacks_receive_every_segment_once(model: ChatSpecFuse) -> None:
    recorder = Recorder()
    streamed = [str(chunk.content) for chunk in model.stream(QUESTION, {"callbacks": [recorder]}, max_tokens=8)]
    assert recorder.tokens == streamed


def test_a_chain_streams_segments(model: ChatSpecFuse) -> None:
    chain = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{question}")]) | model
    streamed = list(chain.stream({"question": QUESTION}))
    assert sum(bool(chunk.content) for chunk in streamed) > 1


# ── settings ─────────────────────────────────────────────────────────────────────────────────────


def test_a_stop_string_of_the_call_ends_the_answer(model: ChatSpecFuse) -> None:
    stopped = model.invoke(QUESTION, stop=[" "])
    assert str(stopped.content).strip() != ""
    assert " " not in stopped.content
    assert stopped.response_metadata["finish_reason"] == "stop"
    assert stopped.response_metadata["specfuse"]["stop_sequence"] == " "


def test_a_stop_string_of_the_call_replaces_that_of_the_model(demo_engine: EnsembleEngine) -> None:
    model = ChatSpecFuse(engine=demo_engine, max_tokens=16, stop="e")
    assert model.invoke(QUESTION).response_metadata["specfuse"]["stop_sequence"] == "e"
    assert model.invoke(QUESTION, stop=[" "]).response_metadata["specfuse"]["stop_sequence"] == " "


def test_settings_of_a_call_apply_to_this_call_only(model: ChatSpecFuse) -> None:
    before = model.model_dump()
    short = model.invoke(QUESTION, max_tokens=4, temperature=0.7, seed=5, stop=["\n\n\n"])
    assert short.usage_metadata is not None
    assert short.usage_metadata["output_tokens"] <= 4
    assert short.response_metadata["specfuse"]["seed"] == 5
    assert model.model_dump() == before


def test_the_same_seed_gives_the_same_sampled_answer(model: ChatSpecFuse) -> None:
    first, second = (model.invoke(QUESTION, temperature=1.0, seed=11, max_tokens=10) for _ in range(2))
    assert first.content == second.content


@pytest.mark.parametrize("unknown", [{"response_formats": {}}, {"max_token": 3}, {"model": "unknown"}])
def test_a_setting_that_does_not_exist_is_refused(model: ChatSpecFuse, unknown: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(unknown))):
        model.invoke(QUESTION, **unknown)


def test_images_are_refused(model: ChatSpecFuse) -> None:
    with pytest.raises(RequestError, match="text only"):
        model.invoke([("user", [{"type": "image", "url": "x"}])])


# ── construction, identity, copies ───────────────────────────────────────────────────────────────


def test_construction_loads_nothing() -> None:
    model = ChatSpecFuse(members=["no/such-model"])
    assert "not loaded" in repr(model._resolve_engine())


@pytest.mark.parametrize(
    "settings",
    [{}, {"members": []}, {"members": "one/model"}, {"members": "demo", "config": EnsembleConfig(["a/b"])}],
)
def test_members_must_be_named_exactly_once(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="members"):
        ChatSpecFuse(**settings)


def test_equal_configurations_share_an_engine() -> None:
    members = ["no/one", MemberConfig("no/two", revision="abc")]
    assert ChatSpecFuse(members=members)._resolve_engine() is ChatSpecFuse(members=members)._resolve_engine()
    assert ChatSpecFuse(members=["no/one"])._resolve_engine() is not ChatSpecFuse(members=members)._resolve_engine()


@pytest.mark.parametrize(
    "changed",
    [
        ChatSpecFuse(members=["no/one", "no/three"]),
        ChatSpecFuse(members=["no/one", MemberConfig("no/two", revision="abc")]),
        ChatSpecFuse(members=["no/one", MemberConfig("no/two", dtype="float32")]),
        ChatSpecFuse(config=EnsembleConfig(["no/one", "no/two"], score="mean_prob")),
        ChatSpecFuse(members=["no/one", "no/two"], temperature=0.5),
        ChatSpecFuse(members=["no/one", "no/two"], seed=1),
    ],
)
def test_a_different_ensemble_has_a_different_cache_key(changed: ChatSpecFuse) -> None:
    assert changed._get_llm_string() != ChatSpecFuse(members=["no/one", "no/two"])._get_llm_string()


def test_equal_ensembles_have_the_same_cache_key() -> None:
    one, two = (ChatSpecFuse(members=["no/one", "no/two"]) for _ in range(2))
    assert one._get_llm_string() == two._get_llm_string()


def test_copies_share_the_engine_and_pickles_leave_it_out(model: ChatSpecFuse, demo_engine: EnsembleEngine) -> None:
    assert copy.deepcopy(model).engine is demo_engine
    restored = pickle.loads(pickle.dumps(model))
    assert restored.engine is None
    assert restored.config == demo_engine.config
