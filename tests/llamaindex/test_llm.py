"""SpecFuseLLM over the real demo ensemble."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ChatMessage, CompletionResponse, ImageBlock
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.prompts import PromptTemplate

from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, Tool
from specfuse_shared.errors import ConfigError, RequestError

QUESTION = "Write one sentence about the sea."


@pytest.fixture(scope="module")
def responses(llm: SpecFuseLLM) -> list[CompletionResponse]:
    return list(llm.stream_complete(QUESTION))


@pytest.fixture(scope="module")
def completion(llm: SpecFuseLLM) -> CompletionResponse:
    answer: CompletionResponse = llm.complete(QUESTION)
    return answer


# ── an answer ────────────────────────────────────────────────────────────────────────────────────


def test_provenance_offsets_rebuild_the_answer(responses: list[CompletionResponse]) -> None:
    *segments, last = responses
    spans = [(r.raw["specfuse"]["start"], r.raw["specfuse"]["end"]) for r in segments if r.raw]
    assert [last.text[start:end] for start, end in spans] == [r.delta for r in segments]
    assert "".join(last.text[start:end] for start, end in spans) == last.text


def test_a_segment_names_its_member_and_the_candidates(
    responses: list[CompletionResponse], demo_engine: EnsembleEngine
) -> None:
    assert responses[0].raw is not None
    segment = responses[0].raw["specfuse"]
    assert segment["member"] in demo_engine.config.names
    assert any(segment["member"] in candidate["drafters"] for candidate in segment["candidates"])
    assert json.loads(json.dumps(segment)) == segment


def test_usage_is_plain_numbers_and_stays_out_of_the_next_prompt(completion: CompletionResponse) -> None:
    assert completion.raw is not None
    usage = completion.raw["usage"]
    assert 0 < usage["completion_tokens"] <= 16
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert completion.additional_kwargs == {}
    json.dumps(completion.raw)


def test_predict_answers_a_prompt_template(llm: SpecFuseLLM, completion: CompletionResponse) -> None:
    assert llm.predict(PromptTemplate("Write one sentence about {thing}."), thing="the sea") == completion.text


# ── settings ─────────────────────────────────────────────────────────────────────────────────────


def test_a_stop_string_ends_the_answer(llm: SpecFuseLLM) -> None:
    of_call = llm.complete(QUESTION, stop=[" "])
    of_field = SpecFuseLLM(engine=llm.engine, max_tokens=16, stop=[" "]).complete(QUESTION)
    assert of_call.text == of_field.text != ""
    assert " " not in of_call.text
    assert of_call.raw is not None
    assert of_call.raw["specfuse"]["stop_sequence"] == " "


def test_a_setting_that_does_not_exist_is_refused(llm: SpecFuseLLM) -> None:
    with pytest.raises(ConfigError, match="max_tokens"):
        llm.complete(QUESTION, max_token=3)


def test_tools_are_refused_where_no_call_could_be_answered(llm: SpecFuseLLM) -> None:
    with pytest.raises(RequestError, match="chat_with_tools"):
        llm.complete("What time is it?", tools=[Tool("clock")])


def test_images_are_refused(llm: SpecFuseLLM) -> None:
    with pytest.raises(RequestError, match="text only"):
        llm.chat([ChatMessage(role="user", blocks=[ImageBlock(image=b"")])])


def test_prompt_functions_of_the_user_are_honoured(demo_engine: EnsembleEngine, completion: CompletionResponse) -> None:
    def render(messages: Any) -> str:
        return QUESTION

    llm = SpecFuseLLM(
        engine=demo_engine, max_tokens=16, messages_to_prompt=render, completion_to_prompt=lambda prompt: QUESTION
    )
    assert llm.chat([ChatMessage("something else")]).message.content == completion.text
    assert llm.complete("something else").text == completion.text


# ── construction, metadata, copies ───────────────────────────────────────────────────────────────


def test_metadata_of_a_loaded_ensemble_is_that_of_its_smallest_member(llm: SpecFuseLLM) -> None:
    assert llm.engine is not None
    contexts = [report.context for report in llm.engine.describe() if report.context]
    assert llm.metadata.context_window == min(contexts)
    assert llm.metadata.num_output == 16
    assert llm.metadata.is_chat_model
    assert llm.metadata.model_name == "smollm2-135m+gemma3-270m"


def test_metadata_loads_nothing() -> None:
    llm = SpecFuseLLM(members=["no/such-model"])
    assert llm.metadata.context_window == DEFAULT_CONTEXT_WINDOW
    assert SpecFuseLLM(members=[MemberConfig("no/such", max_context=900)]).metadata.context_window == 900
    assert "not loaded" in repr(llm._resolve_engine())


def test_a_dictionary_of_the_llm_rebuilds_it() -> None:
    config = EnsembleConfig(["no/one", MemberConfig("no/two", weight=2.0)], segment_tokens=5)
    llm = SpecFuseLLM(config=config, temperature=0.5)
    restored = SpecFuseLLM.from_json(llm.to_json())
    assert restored.config == config
    assert restored.temperature == 0.5


def test_copies_share_the_engine_and_pickles_leave_it_out(llm: SpecFuseLLM) -> None:
    assert copy.deepcopy(llm).engine is llm.engine
    restored = pickle.loads(pickle.dumps(llm))
    assert restored.engine is None
    assert llm.engine is not None
    assert restored.config == llm.engine.config


def test_equal_configurations_share_an_engine() -> None:
    one, two = (SpecFuseLLM(members=["no/one", "no/two"]) for _ in range(2))
    assert one._resolve_engine() is two._resolve_engine()


# ── a place in LlamaIndex ────────────────────────────────────────────────────────────────────────


def test_the_class_is_in_llamaindexs_hierarchy() -> None:
    names = [base.__name__ for base in SpecFuseLLM.__mro__]
    assert BaseLLM.__name__ in names
    assert names.index("CustomLLM") < names.index("LLM")
    assert SpecFuseLLM.class_name() == "specfuse_llm"
    assert not SpecFuseLLM.__abstractmethods__


def test_a_context_too_small_for_llamaindexs_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"600 tokens.*take up to 620"):
        SpecFuseLLM(members=[MemberConfig("no/such", max_context=600)])
    assert SpecFuseLLM(members=[MemberConfig("no/such", max_context=900)]).metadata.num_output == 256


def test_the_tokenizer_counts_as_the_reference_member_does(llm: SpecFuseLLM, completion: CompletionResponse) -> None:
    assert len(llm.tokenizer(completion.text)) == (completion.raw or {})["usage"]["completion_tokens"]
