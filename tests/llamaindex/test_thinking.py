"""Reasoning and log-probabilities are in LlamaIndex's usual fields, and reasoning is never in the content."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import takewhile

import pytest
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ThinkingBlock
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from llamaindex_specfuse import SpecFuseLLM
from llamaindex_specfuse.base import PROMPT_RESERVE
from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig
from tests.llamaindex.instrumentation import ENDPOINTS, Listener, ask
from tests.support.tiny import THINKING

QUESTION = "How do the tides follow the moon?"


class Answer(BaseModel):
    sure: bool


def weather(tomorrow: bool) -> str:
    """The weather of today, or of tomorrow."""
    return "sunny" if tomorrow else "dull"


@pytest.fixture(scope="module")
def llm(tiny_members: list[MemberConfig]) -> Iterator[SpecFuseLLM]:
    """An LLM of two members, of which one reasons."""
    chat, base = tiny_members
    thinks = MemberConfig(chat.model, name="thinks", chat_template=THINKING, thinking=True)
    with EnsembleEngine(EnsembleConfig([thinks, base])) as engine:
        yield SpecFuseLLM(engine=engine.load(), max_tokens=12, max_thinking_tokens=20)


def reasoning_in(message: ChatMessage) -> list[tuple[str | None, str]]:
    blocks = [block for block in message.blocks if isinstance(block, ThinkingBlock)]
    return [(block.content, block.additional_information["member"]) for block in blocks]


def test_reasoning_is_a_block_before_the_text_and_no_part_of_it(llm: SpecFuseLLM) -> None:
    message = llm.chat([ChatMessage(QUESTION)]).message
    [(thought, member)] = reasoning_in(message)
    assert member == "thinks"
    assert thought
    assert isinstance(message.blocks[0], ThinkingBlock)
    assert message.content == llm.complete(QUESTION).text
    assert ChatMessage.model_validate_json(message.model_dump_json()) == message


@pytest.mark.parametrize("endpoint", ["stream_chat", "astream_chat"])
async def test_reasoning_is_streamed_before_the_answer(endpoint: str, llm: SpecFuseLLM) -> None:
    responses = await ask(llm, endpoint, QUESTION)
    thinking = list(takewhile(lambda response: "thinking_delta" in response.additional_kwargs, responses))
    reported = "".join(response.additional_kwargs["thinking_delta"] for response in thinking)
    assert [(reported, "thinks")] == reasoning_in(responses[-1].message)
    assert {response.delta for response in thinking} == {""}
    assert not [r for r in responses[len(thinking) :] if "thinking_delta" in r.additional_kwargs]
    assert responses[-1].message.content == "".join(response.delta for response in responses)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # LlamaIndex's agents use old pydantic
async def test_an_agent_passes_reasoning_on(llm: SpecFuseLLM) -> None:
    handler = FunctionAgent(tools=[], llm=llm).run(user_msg=QUESTION)
    reported = [event.thinking_delta async for event in handler.stream_events() if isinstance(event, AgentStream)]
    assert "".join(filter(None, reported))
    response = await handler
    assert "".join(filter(None, reported)) not in str(response)


def test_a_value_and_a_call_begin_after_the_reasoning(llm: SpecFuseLLM) -> None:
    structured = llm.model_copy(update={"max_tokens": 60}).as_structured_llm(Answer)
    assert isinstance(structured.chat([ChatMessage(QUESTION)]).raw, Answer)

    tool = FunctionTool.from_defaults(weather)
    response = llm.chat_with_tools([tool], QUESTION, tool_required=True, max_tokens=80)
    assert reasoning_in(response.message)
    assert [call.tool_name for call in llm.get_tool_calls_from_response(response)] == ["weather"]


def test_reasoning_of_earlier_turns_is_not_sent_again(llm: SpecFuseLLM, listener: Listener) -> None:
    engine = SimpleChatEngine.from_defaults(llm=llm)
    engine.chat(QUESTION)
    [(thought, _)] = reasoning_in(engine.chat_history[-1])
    engine.chat("And why?")
    assert thought
    assert thought not in listener.prompts()[-1]


def test_llamaindex_reserves_context_for_reasoning(llm: SpecFuseLLM) -> None:
    assert llm.metadata.num_output == 12 + 20
    long = SpecFuseLLM(engine=llm.engine, max_tokens=12, max_thinking_tokens=3900)
    assert long.metadata.num_output == long.metadata.context_window - PROMPT_RESERVE


# ── log-probabilities ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_every_endpoint_gives_the_log_probability_of_each_token_once(
    endpoint: str, tiny_llm: SpecFuseLLM
) -> None:
    *partial, last = await ask(tiny_llm, endpoint, QUESTION, max_tokens=8, logprobs=True)
    assert [response.logprobs for response in partial] == [None] * len(partial)
    assert len(last.logprobs) == last.raw["usage"]["completion_tokens"]
    reported = b"".join(bytes(token.bytes) for [token] in last.logprobs)
    assert reported.decode(errors="ignore").startswith(str(last).removeprefix("assistant: ")[:8])
    assert all(token.logprob <= 0 and math.isfinite(token.logprob) for [token] in last.logprobs)
    *_, last = await ask(tiny_llm, endpoint, QUESTION, max_tokens=8, logprobs=True, top_logprobs=2)
    for token, *top in last.logprobs:
        assert [each.logprob for each in top] == sorted((each.logprob for each in top), reverse=True)
        assert len(top) == 2
        assert isinstance(token.token, str)


def test_log_probabilities_are_given_only_on_request(tiny_llm: SpecFuseLLM) -> None:
    assert tiny_llm.complete(QUESTION, max_tokens=4).logprobs is None
    expected = tiny_llm.model_copy(update={"logprobs": True})
    assert expected.complete(QUESTION, max_tokens=4).logprobs
