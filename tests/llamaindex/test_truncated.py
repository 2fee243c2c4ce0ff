"""Calls and values truncated by `max_tokens` are marked, never executed, and reported to the agent."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.base.llms.types import ChatResponse, ToolCallBlock
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from llamaindex_specfuse import SpecFuseLLM
from llamaindex_specfuse.messages import to_messages
from specfuse_shared.errors import RequestError, UnfinishedValueError
from specfuse_shared.frameworks import CUT_MARK

WRITTEN: list[str] = []


def write_file(path: str, content: str) -> str:
    """Writes a file."""
    WRITTEN.append(path)
    return "done"


class Note(BaseModel):
    """A note."""

    title: str
    text: str


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # LlamaIndex's agents use old pydantic
TOOL = FunctionTool.from_defaults(write_file)
PROMPT = PromptTemplate("Note {thing}.")


@pytest.fixture
def short(tiny_llm: SpecFuseLLM) -> SpecFuseLLM:
    """An LLM of members with random weights, which end no string within these tokens."""
    return tiny_llm.model_copy(update={"max_tokens": 100})


def is_cut(llm: SpecFuseLLM, response: ChatResponse) -> bool:
    [written] = response.message.additional_kwargs["tool_calls"]
    [reported] = llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
    assert reported.tool_name.startswith("write_file (cut short")
    assert not [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
    with pytest.raises(RequestError, match="max_tokens cut"):
        llm.get_tool_calls_from_response(response)
    return bool(written["function"]["arguments"].endswith(CUT_MARK) and response.raw["finish_reason"] == "length")


async def test_a_truncated_call_is_no_call_with_every_method(short: SpecFuseLLM) -> None:
    options = {"tools": [TOOL], "user_msg": "Write.", "tool_required": True}
    assert is_cut(short, short.chat_with_tools(**options))
    assert is_cut(short, await short.achat_with_tools(**options))
    assert is_cut(short, list(short.stream_chat_with_tools(**options))[-1])
    assert is_cut(short, [response async for response in await short.astream_chat_with_tools(**options)][-1])


def test_a_turn_with_a_truncated_call_is_read_in_a_history(short: SpecFuseLLM) -> None:
    response = short.chat_with_tools([TOOL], "Write.", tool_required=True)
    [turn] = to_messages([response.message])
    assert [call.name for call in turn.tool_calls] == ["write_file"]


@pytest.mark.parametrize("streaming", [True, False])
async def test_an_agent_reads_an_error_for_a_truncated_call_and_continues(short: SpecFuseLLM, streaming: bool) -> None:
    WRITTEN.clear()
    agent = FunctionAgent(tools=[TOOL], llm=short, streaming=streaming, initial_tool_choice="write_file")
    handler = agent.run("Write.")
    results = [event async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
    output: Any = await handler
    assert WRITTEN == []
    assert "cut short and not run" in str(results[0].tool_output)
    assert output.response.content is not None


async def test_a_method_that_needs_the_call_raises_an_error(short: SpecFuseLLM) -> None:
    with pytest.raises(UnfinishedValueError, match="max_tokens cut"):
        short.predict_and_call([TOOL], "Write.")
    with pytest.raises(ValueError, match="max_tokens cut"):
        await short.apredict_and_call([TOOL], "Write.")
    assert WRITTEN == []


async def test_a_method_that_needs_no_call_gets_text_without_a_partial_call(short: SpecFuseLLM) -> None:
    expected = short.chat_with_tools([TOOL], "Write.").message.content
    options: dict[str, Any] = {"user_msg": "Write.", "error_on_no_tool_call": False}
    assert str(short.predict_and_call([TOOL], **options)) == expected != ""
    assert str(await short.apredict_and_call([TOOL], **options)) == expected
    with pytest.raises(UnfinishedValueError, match="max_tokens cut"):
        short.predict_and_call([TOOL], **options, tool_choice="any")


async def test_a_truncated_prediction_is_an_error(short: SpecFuseLLM) -> None:
    with pytest.raises(UnfinishedValueError, match="max_tokens cut"):
        short.structured_predict(Note, PROMPT, thing="the sea")
    with pytest.raises(UnfinishedValueError, match="max_tokens cut"):
        await short.astructured_predict(Note, PROMPT, thing="the sea")
    with pytest.raises(UnfinishedValueError, match="max_tokens cut"):
        list(short.stream_structured_predict(Note, PROMPT, thing="the sea"))
    program = FunctionCallingProgram.from_defaults(output_cls=Note, prompt=PROMPT, llm=short)
    with pytest.raises(UnfinishedValueError, match="max_tokens cut"):
        program(thing="the sea")
    with pytest.raises(UnfinishedValueError, match="max_tokens cut"):
        list(program.stream_call(thing="the sea"))


def test_whole_is_an_option_of_every_call(short: SpecFuseLLM) -> None:
    with pytest.raises(UnfinishedValueError, match="max_tokens cut"):
        short.complete("Hello", max_tokens=4, whole=True)
    assert short.complete("Hello", max_tokens=4).raw["finish_reason"] == "length"
