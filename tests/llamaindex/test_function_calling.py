"""Function calling over the real demo ensemble: the guarantees of its grammar."""

import json
from typing import Literal

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, ToolCallBlock
from llama_index.core.tools import FunctionTool

from llamaindex_specfuse import SpecFuseLLM
from llamaindex_specfuse.messages import to_messages
from specfuse_shared.errors import ConfigError, RequestError
from specfuse_shared.serving.calls import choice_of
from tests.llamaindex.instrumentation import Listener


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def weather(city: Literal["Paris", "Rome", "Zürich"]) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}."


TOOLS = [FunctionTool.from_defaults(add), FunctionTool.from_defaults(weather)]


@pytest.fixture(scope="module")
def llm(llm: SpecFuseLLM) -> SpecFuseLLM:
    return llm.model_copy(update={"max_tokens": 60})


def calls_of(response: ChatResponse) -> list[ToolCallBlock]:
    return [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]


def test_a_required_call_names_a_tool_and_has_arguments_of_its_schema(llm: SpecFuseLLM) -> None:
    history = [ChatMessage("You are a calculator.", role="system")]
    response = llm.chat_with_tools(TOOLS, "What is 3 plus 4?", chat_history=history, tool_required=True)
    [selection] = llm.get_tool_calls_from_response(response)
    assert (selection.tool_name, selection.tool_kwargs) == ("add", {"a": 3, "b": 4})
    assert len(history) == 1
    assert response.message.content == ""
    assert "None" not in str(response.message)


def test_a_named_tool_is_called_and_no_character_of_the_call_is_streamed_as_text(llm: SpecFuseLLM) -> None:
    responses = list(llm.stream_chat_with_tools(TOOLS, "How is it in Zürich?", tool_choice="weather"))
    assert {response.delta for response in responses} == {""}
    assert [len(calls_of(response)) for response in responses] == sorted(len(calls_of(r)) for r in responses)
    assert calls_of(responses[0]) == []
    begun = llm.get_tool_calls_from_response(responses[0], error_on_no_tool_call=False)
    assert {selection.tool_name for selection in begun} <= {"weather"}
    [call] = calls_of(responses[-1])
    assert call.tool_name == "weather"
    assert call.tool_kwargs["city"] in ("Paris", "Rome", "Zürich")
    assert responses[-1].raw["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_parallel_calls_have_separate_ids_and_one_call_is_one_unless_more_are_allowed(
    tiny_llm: SpecFuseLLM, seed: int
) -> None:
    """Random members, which do not stop after one call."""
    options = {"tool_required": True, "temperature": 1.0, "seed": seed}
    response = tiny_llm.chat_with_tools(TOOLS, "Weather in Paris and Rome", allow_parallel_tool_calls=True, **options)
    several = response.message.additional_kwargs["tool_calls"]  # the last one can be truncated
    assert len(several) > 1
    assert len({call["id"] for call in several}) == len(several)
    assert len(calls_of(tiny_llm.chat_with_tools(TOOLS, "Weather in Paris and Rome", **options))) == 1


def test_without_need_the_answer_is_text_and_a_missing_call_is_an_error_where_one_is_expected(llm: SpecFuseLLM) -> None:
    response = llm.chat_with_tools(TOOLS, "Say hello.", tool_choice="none")
    assert response.message.content
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(RequestError, match="tool_required"):
        llm.get_tool_calls_from_response(response)


def test_predict_and_call_calls_the_tool(llm: SpecFuseLLM, listener: Listener) -> None:
    assert llm.predict_and_call(TOOLS, "What is 20 plus 22?").response == "42"
    assert listener.calls() == ["LLMChatStartEvent", "LLMChatEndEvent"]
    [started] = listener.of("LLMChatStartEvent")
    assert started.model_dump()["additional_kwargs"]["tools"][0]["name"] == "add"


async def test_apredict_and_call_calls_the_tool(llm: SpecFuseLLM) -> None:
    answer = await llm.apredict_and_call(TOOLS, "What is the weather in Rome?", allow_parallel_tool_calls=True)
    assert "It is sunny in Rome." in answer.response


def test_a_tool_that_is_not_offered_cannot_be_chosen(llm: SpecFuseLLM) -> None:
    with pytest.raises(ConfigError, match="tool_choice"):
        llm.chat_with_tools(TOOLS, "Hello", tool_choice="subtract")


@pytest.mark.parametrize(
    ("tool_choice", "required", "choice"),
    [
        (None, False, "auto"),
        (None, True, "any"),
        ("required", False, "any"),
        ("none", True, "none"),
        ({"type": "function", "function": {"name": "add"}}, False, "add"),
        ({"type": "tool", "name": "add"}, False, "add"),
        ({"type": "any"}, False, "any"),
        ({"type": "required"}, False, "any"),
        ({"type": "auto"}, False, "auto"),
        ({"type": "none"}, True, "none"),
        (True, False, "any"),
        (False, False, "auto"),
    ],
)
def test_choices_are_understood_in_every_form(
    tool_choice: str | bool | dict[str, object] | None, required: bool, choice: str
) -> None:
    assert choice_of(tool_choice, required) == choice


def test_an_answer_of_a_tool_gets_the_name_from_its_call() -> None:
    call = ToolCallBlock(tool_call_id="c1", tool_name="add", tool_kwargs={"a": 1, "b": 2})
    answer = ChatMessage("3", role=MessageRole.TOOL, additional_kwargs={"tool_call_id": "c1"})
    _, answered = to_messages([ChatMessage(role="assistant", blocks=[call]), answer])
    assert answered.name == "add"


def test_a_response_with_a_call_is_plain_json(llm: SpecFuseLLM) -> None:
    response = llm.chat_with_tools(TOOLS, "What is 1 plus 2?", tool_choice="add")
    assert json.loads(json.dumps(response.raw))["finish_reason"] == "tool_calls"
    assert ChatMessage.model_validate_json(response.message.model_dump_json()) == response.message
