"""The settings of SpecFuseLLM: fields, options of every call, and sizes for planning before anything is loaded."""

from __future__ import annotations

import json

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from pydantic import BaseModel

from llamaindex_specfuse import SpecFuseLLM
from llamaindex_specfuse.base import PROMPT_RESERVE
from specfuse_shared import EnsembleConfig, EnsembleEngine, Grammar, MemberConfig
from specfuse_shared.errors import ConfigError, MemberFailedWarning, RequestError, RequestTimeoutError
from tests.support.faults import FAULTS, fault_in

YES_OR_NO = Grammar.choice(["yes", "no"])


class Answer(BaseModel):
    sure: bool


def with_fields(llm: SpecFuseLLM, **fields: object) -> SpecFuseLLM:
    assert llm.engine is not None
    return SpecFuseLLM(engine=llm.engine, **{"max_tokens": 20, **fields})


# ── of every call ────────────────────────────────────────────────────────────────────────────────


def test_a_grammar_applies_to_every_answer_without_another_grammar(tiny_llm: SpecFuseLLM) -> None:
    llm = with_fields(tiny_llm, grammar=YES_OR_NO)
    assert llm.complete("Is it open?").text in ("yes", "no")
    assert llm.complete("Is it open?", grammar=Grammar.choice(["perhaps"])).text == "perhaps"
    assert isinstance(llm.as_structured_llm(Answer).complete("Is it open?").raw, Answer)


def test_a_grammar_comes_back_from_json() -> None:
    llm = SpecFuseLLM(members=["no/one"], grammar=YES_OR_NO, additional_kwargs={"seed": 3})
    restored = SpecFuseLLM.from_json(llm.to_json())
    assert restored.grammar == YES_OR_NO
    assert restored.additional_kwargs == {"seed": 3}


def test_an_object_that_is_no_grammar_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Grammar\.choice"):
        SpecFuseLLM(members=["no/one"], grammar="yes|no")


def test_additional_kwargs_are_options_of_every_call_and_a_call_replaces_them(tiny_llm: SpecFuseLLM) -> None:
    llm = with_fields(tiny_llm, additional_kwargs={"max_tokens": 3})
    assert llm.complete("Hello").raw["usage"]["completion_tokens"] == 3
    assert llm.complete("Hello", max_tokens=5).raw["usage"]["completion_tokens"] == 5
    assert llm.metadata.num_output == 3


def test_additional_kwargs_that_no_call_knows_are_refused_at_construction() -> None:
    with pytest.raises(ConfigError, match="did you mean 'temperature'"):
        SpecFuseLLM(members=["no/one"], additional_kwargs={"temprature": 1})


def test_none_means_the_fields_value(tiny_llm: SpecFuseLLM) -> None:
    unset = dict.fromkeys(("max_tokens", "temperature", "stop", "seed", "grammar", "tools", "tool_choice", "model"))
    assert tiny_llm.complete("Hello", **unset).text == tiny_llm.complete("Hello").text


def test_a_call_can_name_its_model_and_no_other(tiny_llm: SpecFuseLLM) -> None:
    answer = tiny_llm.complete("Hello", model=tiny_llm.model, max_tokens=3)
    assert answer.text == tiny_llm.complete("Hello", model_name=tiny_llm.metadata.model_name, max_tokens=3).text
    with pytest.raises(ConfigError, match="gpt-4o"):
        tiny_llm.complete("Hello", model="gpt-4o")


def test_a_call_takes_tools_as_openai_describes_them(tiny_llm: SpecFuseLLM) -> None:
    day = {"type": "object", "properties": {"day": {"enum": ["today"]}}, "required": ["day"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": day}}
    response = tiny_llm.chat([ChatMessage("Hello")], tools=[tool], tool_choice={"type": "any"})
    [call] = tiny_llm.get_tool_calls_from_response(response)
    assert (call.tool_name, call.tool_kwargs) == ("weather", {"day": "today"})
    with pytest.raises(RequestError, match="web_search"):
        tiny_llm.chat([ChatMessage("Hello")], tools=[{"type": "web_search"}])


@pytest.mark.parametrize(
    ("name", "nearest"), [("max_token", "max_tokens"), ("time_out", "timeout"), ("sytem_prompt", "system_prompt")]
)
def test_a_setting_that_does_not_exist_is_refused_with_the_nearest(
    name: str, nearest: str, tiny_llm: SpecFuseLLM
) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{nearest}'"):
        SpecFuseLLM(members=["no/one"], **{name: 5})
    if nearest != "system_prompt":
        with pytest.raises(ConfigError, match=name):
            tiny_llm.complete("Hello", **{name: 5})


def test_options_of_an_http_client_have_no_effect(tiny_llm: SpecFuseLLM) -> None:
    plain = tiny_llm.complete("Hello", max_tokens=4)
    options = {"extra_headers": {"x": "y"}, "extra_body": {}, "user": "someone", "metadata": {"a": "b"}}
    assert tiny_llm.complete("Hello", max_tokens=4, **options).text == plain.text


def test_an_answer_ends_at_the_timeout_of_the_field_or_of_the_call(tiny_llm: SpecFuseLLM) -> None:
    with pytest.raises(RequestTimeoutError):
        with_fields(tiny_llm, max_tokens=2000, timeout=0.05).complete("Say everything.")
    with pytest.raises(TimeoutError):
        tiny_llm.complete("Say everything.", max_tokens=2000, timeout=0.05)
    assert with_fields(tiny_llm, timeout=0.0001).complete("Hello", timeout=60, max_tokens=3).text


def test_one_answer_calls_one_tool_unless_more_are_allowed(tiny_llm: SpecFuseLLM) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    assert not tiny_llm.parallel_tool_calls
    response = tiny_llm.chat([ChatMessage("Hello")], tools=tools, tool_choice="required")
    assert len(tiny_llm.get_tool_calls_from_response(response)) == 1


def test_the_record_is_a_summary_by_default(tiny_llm: SpecFuseLLM) -> None:
    records = {
        detail: with_fields(tiny_llm, ledger=detail).complete("Hello").raw.get("specfuse")
        for detail in ("none", "summary", "full")
    }
    assert records["none"] is None
    assert isinstance(records["summary"]["rounds"], int)
    assert len(records["full"]["rounds"]) == records["summary"]["rounds"]
    differences, few = (records[detail]["differences"] for detail in ("full", "summary"))
    assert [each["text"] for each in few] == [each["text"] for each in differences[: len(few)]] != []
    assert len(json.dumps(records["summary"])) < 4000 < len(json.dumps(records["full"]))


def test_a_failed_member_is_a_warning_and_in_the_record(tiny_members: list[MemberConfig]) -> None:
    with EnsembleEngine(EnsembleConfig(members=tiny_members)) as engine:
        llm = SpecFuseLLM(engine=engine.load(), max_tokens=8)
        failing = engine._members[1]
        with (
            fault_in(engine, "draft", FAULTS["exception"], None),
            pytest.warns(MemberFailedWarning, match=failing.name),
        ):
            response = llm.complete("Hello")
        failed = [part["member"] for part in response.raw["specfuse"]["summary"] if part["exit_reason"] == "fault"]
        assert failed == [failing.name]


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────


def test_a_given_context_window_is_used(tiny_llm: SpecFuseLLM) -> None:
    assert with_fields(tiny_llm).metadata.context_window == 4096
    assert with_fields(tiny_llm, context_window=2000).metadata.context_window == 2000
    with pytest.raises(ConfigError, match="600 tokens"):
        with_fields(tiny_llm, context_window=600)


def test_the_context_is_known_before_anything_is_loaded(tiny_members: list[MemberConfig]) -> None:
    llm = SpecFuseLLM(members=tiny_members)
    assert llm.metadata.context_window == 4096
    for longest in (4096, 100_000):  # an answer can use the rest of the context
        metadata = SpecFuseLLM(members=tiny_members, max_tokens=longest).metadata
        assert (metadata.context_window, metadata.num_output) == (4096, 4096 - PROMPT_RESERVE)


def test_the_budget_of_a_prompt_is_never_negative() -> None:
    assert SpecFuseLLM(members=["no/one"]).metadata.context_window == DEFAULT_CONTEXT_WINDOW
    metadata = SpecFuseLLM(members=["no/one"], max_tokens=4096).metadata
    assert metadata.context_window - metadata.num_output > 600


def test_settings_are_plain_json(tiny_llm: SpecFuseLLM) -> None:
    assert json.loads(with_fields(tiny_llm, grammar=YES_OR_NO).to_json())["grammar"]["kind"] == "choice"
