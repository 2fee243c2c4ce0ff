"""Conventions of other chat models: sizes, settings, records, finish reasons, and accepted variants."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_core.outputs import LLMResult
from langgraph.checkpoint.memory import InMemorySaver

from langchain_specfuse import ChatSpecFuse
from langchain_specfuse.messages import ChunkBuilder
from specfuse_shared import (
    EnsembleConfig,
    EnsembleEngine,
    FinishEvent,
    FinishReason,
    MemberFailedWarning,
    SamplingParams,
)
from specfuse_shared.errors import ConfigError
from tests.support.faults import FAULTS, fault_in

QUESTION = "What does the sea do?"
CONVERSATION = [SystemMessage("Be brief. " * 8), HumanMessage("The sea. " * 30), AIMessage("A tide. " * 20)]


class Results(BaseCallbackHandler):
    """Records the final results of runs."""

    def __init__(self) -> None:
        self.results: list[LLMResult] = []

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.results.append(response)


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────


def test_the_profile_knows_the_context_before_anything_is_loaded(tiny: EnsembleEngine) -> None:
    members = tiny.config.members
    for model in (ChatSpecFuse(config=EnsembleConfig(members, segment_tokens=7)), ChatSpecFuse(members=members)):
        assert model.profile is not None
        assert model.profile["max_input_tokens"] == 2048
        assert "not loaded" in repr(model._resolve_engine())
        model.close()


def test_the_context_is_unknown_where_no_configuration_can_be_read() -> None:
    assert "max_input_tokens" not in (ChatSpecFuse(members=["no/one"]).profile or {})


def test_a_conversation_is_summarised_at_a_fraction_of_the_context(tiny: EnsembleEngine) -> None:
    model = ChatSpecFuse(engine=tiny, max_tokens=8)
    summary = SummarizationMiddleware(
        model, trigger=("fraction", 0.05), keep=("messages", 1), summary_prompt="Say in short: {messages}"
    )
    agent = create_agent(model, [], middleware=[summary], checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    agent.invoke({"messages": [HumanMessage("The sea. " * 30)]}, config)
    state = agent.invoke({"messages": [HumanMessage("And the tide? " * 10)]}, config)
    assert "summary of the conversation" in state["messages"][0].text
    assert len(state["messages"]) == 3


def test_empty_input_has_no_tokens_and_partial_messages_can_be_trimmed(chat: ChatSpecFuse) -> None:
    assert chat.get_num_tokens_from_messages([]) == 0
    limit = chat.get_num_tokens_from_messages(CONVERSATION) - 40
    for strategy in ("last", "first"):
        retained = trim_messages(
            CONVERSATION, max_tokens=limit, token_counter=chat, strategy=strategy, allow_partial=True
        )
        assert 0 < chat.get_num_tokens_from_messages(retained) <= limit
    assert trim_messages(CONVERSATION, max_tokens=1, token_counter=chat, allow_partial=True) == []


# ── settings ─────────────────────────────────────────────────────────────────────────────────────


def test_a_typo_in_the_constructor_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="no setting 'max_token': did you mean 'max_tokens'"):
        ChatSpecFuse(members=["no/one"], max_token=5)
    with pytest.raises(ConfigError, match="did you mean 'ensembles'"):
        ChatSpecFuse(members=["no/one"], ensemble={})


def test_options_of_remote_services_are_accepted_without_effect(tiny: EnsembleEngine) -> None:
    plain = ChatSpecFuse(engine=tiny, max_tokens=8, tags=["a"], metadata={"b": 1}, verbose=False)
    remote = ChatSpecFuse(engine=tiny, max_tokens=8, api_key="secret", max_retries=3)
    options: dict[str, Any] = {"extra_headers": {"a": "b"}, "extra_body": {}, "user": "ada", "service_tier": "flex"}
    assert remote.invoke(QUESTION, **options).text == plain.invoke(QUESTION).text
    assert "secret" not in repr(remote) + json.dumps(remote.model_dump(exclude={"config"}))
    assert plain.metadata == {"b": 1}


def test_an_engine_and_a_server_are_two_sources(tiny: EnsembleEngine) -> None:
    with pytest.raises(ConfigError, match="give one of"):
        ChatSpecFuse(engine=tiny, base_url="http://127.0.0.1:8000")


def test_the_default_timeout_is_the_fields_and_none_changes_nothing(tiny: EnsembleEngine) -> None:
    hurried = ChatSpecFuse(engine=tiny, max_tokens=8, timeout=1e-9)
    with pytest.raises(TimeoutError):
        hurried.invoke(QUESTION)
    with pytest.raises(TimeoutError):
        hurried.invoke(QUESTION, timeout=None)
    assert hurried.invoke(QUESTION, timeout=60).text


def test_none_means_the_fields_value(chat: ChatSpecFuse) -> None:
    unset: dict[str, Any] = {"max_tokens": None, "temperature": None, "stop": None, "seed": None, "tool_choice": None}
    assert chat.invoke(QUESTION, **unset).text == chat.invoke(QUESTION).text
    settings: dict[str, Any] = {"max_tokens": None, "temperature": None, "timeout": None, "top_p": None}
    assert ChatSpecFuse(engine=chat.engine, **settings).max_tokens == ChatSpecFuse(engine=chat.engine).max_tokens


def test_an_answer_calls_one_tool_by_default(tiny: EnsembleEngine) -> None:
    model = ChatSpecFuse(engine=tiny)
    ask = {"tools": [{"type": "function", "function": {"name": "now"}}]}
    assert model._request([HumanMessage("Hi")], None, dict(ask)).options["parallel_tool_calls"] is False
    for settings, call in (({}, {"parallel_tool_calls": True}), ({"parallel_tool_calls": True}, {})):
        parallel = ChatSpecFuse(engine=tiny, **settings)
        assert parallel._request([HumanMessage("Hi")], None, {**ask, **call}).options["parallel_tool_calls"] is True


def test_a_false_tool_choice_leaves_the_choice_to_the_ensemble(chat: ChatSpecFuse) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    bound: Any = chat.bind_tools(tools, tool_choice=False)
    assert bound.kwargs["tool_choice"] == "auto"


def test_a_history_with_calls_and_unnamed_answers_is_answered(chat: ChatSpecFuse) -> None:
    history = [
        HumanMessage("What is the time?"),
        AIMessage([{"type": "redacted_thinking", "data": "x"}], tool_calls=[{"name": "now", "args": {}, "id": "1"}]),
        ToolMessage("noon", tool_call_id="1"),
    ]
    [_, _, answered] = chat._request(history, None, {}).messages
    assert (answered.name, answered.content) == ("now", "noon")
    assert chat.invoke(history).usage_metadata


def test_an_ensemble_is_not_a_preset(tiny: EnsembleEngine) -> None:
    with pytest.raises(ConfigError, match="'presets'"):
        ChatSpecFuse(engine=tiny, presets={})
    with pytest.raises(ConfigError, match="'preset'"):
        ChatSpecFuse(engine=tiny).invoke("Hi", preset="specem")


# ── records ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("reason", "expected"), [("stop", "stop"), ("length", "length"), ("repetition", "stop")])
def test_finish_reasons_have_common_names(tiny: EnsembleEngine, reason: str, expected: str) -> None:
    ended = replace(tiny.generate(QUESTION, SamplingParams(max_tokens=4)), finish_reason=FinishReason(reason))
    [last] = ChunkBuilder(lambda: "tiny", "summary", reader=None).chunks(FinishEvent(ended))
    reported = last.message.response_metadata
    assert reported["finish_reason"] == expected
    assert reported["specfuse"]["finish_reason"] == reason


def test_each_generation_has_its_finish_reason(chat: ChatSpecFuse) -> None:
    received = Results()
    chat.invoke(QUESTION, {"callbacks": [received]})
    list(chat.stream(QUESTION, {"callbacks": [received]}))
    for result in (*received.results, chat.generate([[HumanMessage(QUESTION)]])):
        [[generation]] = result.generations
        info = generation.generation_info
        assert info is not None
        assert (info["finish_reason"], info["model_name"], info["model_provider"]) == (
            "length",
            "chat+base",
            "specfuse",
        )
        assert generation.message.response_metadata["finish_reason"] == "length"


def test_a_message_carries_a_summary_by_default(tiny: EnsembleEngine) -> None:
    reported = {
        detail: ChatSpecFuse(engine=tiny, max_tokens=60, ledger=detail).invoke(QUESTION).response_metadata
        for detail in ("summary", "full", "none")
    }
    assert ChatSpecFuse(engine=tiny).ledger == "summary"
    assert len(json.dumps(reported["summary"]["specfuse"])) < 4000
    assert reported["summary"]["specfuse"]["rounds"] == len(reported["full"]["specfuse"]["rounds"])
    assert "specfuse" not in reported["none"]
    differences, few = (reported[detail]["specfuse"]["differences"] for detail in ("full", "summary"))
    assert [each["text"] for each in few] == [each["text"] for each in differences[: len(few)]]
    assert differences[0]["others"][0]["member"] in ("chat", "base")
    assert reported["none"]["model_name"] == "chat+base"


def test_a_call_and_a_value_have_the_agreement_of_each_field(tiny: EnsembleEngine) -> None:
    crew = {"type": "integer", "minimum": 10, "maximum": 99}
    boat = {"title": "Boat", "type": "object", "properties": {"crew": crew}, "required": ["crew"]}
    model = ChatSpecFuse(engine=tiny, max_tokens=120)
    called = model.bind_tools([boat], tool_choice="any").invoke(QUESTION)
    reported = {field["path"]: field for field in called.response_metadata["specfuse"]["fields"]}
    assert reported.keys() == {"$.name", "$.arguments.crew"}
    assert int(reported["$.arguments.crew"]["text"]) == called.tool_calls[0]["args"]["crew"]
    result = model.with_structured_output(boat, include_raw=True).invoke(QUESTION)
    [*_, field] = result["raw"].response_metadata["specfuse"]["fields"]
    assert field["path"].endswith("crew")
    assert all(0 <= field["share"] <= 1 for field in reported.values() if field["share"] is not None)
    quiet = model.model_copy(update={"ledger": "none"}).bind_tools([boat], tool_choice="any").invoke(QUESTION)
    assert "specfuse" not in quiet.response_metadata


@pytest.mark.parametrize("stage", ["draft", "verify"])
async def test_a_failed_member_is_reported(tiny: EnsembleEngine, stage: str) -> None:
    model = ChatSpecFuse(engine=tiny, max_tokens=20)
    with fault_in(tiny, stage, FAULTS["exception"], None):
        with pytest.warns(MemberFailedWarning, match="base"):
            answer = model.invoke(QUESTION)
        with pytest.warns(MemberFailedWarning, match="base"):
            assert [chunk async for chunk in model.astream(QUESTION)]
    [reported] = answer.response_metadata["specfuse"]["warnings"]
    assert (reported["member"], reported["stage"]) == ("base", stage)
    with warnings.catch_warnings(record=True) as received:
        model.invoke(QUESTION)
    assert received == []
