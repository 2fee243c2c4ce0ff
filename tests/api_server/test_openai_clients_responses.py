"""Unmodified third-party clients of the Responses API: OpenAI's SDK, ChatOpenAI and LlamaIndex's OpenAIResponses."""

from __future__ import annotations

import asyncio
import json
import warnings
from typing import Any

import httpx
import openai
import pytest
from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAIResponses

from specfuse_shared import EnsembleEngine
from tests.langchain.standard import ByTheDemo
from tests.support.agents import ANSWER, EXAMPLES, HOURS, PRICE, TASK, worked
from tests.support.agents import QUESTION as ASKED
from tests.support.serving import Digit, unkept

QUESTION = "Why is the sea salty?"
ENDLESS = {"grammar": {"kind": "lark", "source": "start: /(ab|cd){2000}/"}}


# ── OpenAI's SDK ─────────────────────────────────────────────────────────────────────────────────


def test_the_sdk_creates_streams_and_counts(sdk: openai.OpenAI) -> None:
    whole = sdk.responses.create(model="tiny", input=QUESTION, instructions="Be brief.", max_output_tokens=20)
    assert whole.output_text
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    results = list(
        sdk.responses.create(model="tiny", input=QUESTION, instructions="Be brief.", max_output_tokens=20, stream=True)
    )
    text = "".join(event.delta for event in results if event.type == "response.output_text.delta")
    assert text == whole.output_text
    assert [event.sequence_number for event in results] == list(range(len(results)))
    assert results[-1].type == "response.incomplete"
    for event in results:  # each has the type that the SDK declares
        type(event).model_validate(event.model_dump(by_alias=True, warnings=False))
    type(whole).model_validate(whole.model_dump(by_alias=True, warnings=False))


def test_the_sdk_streams_on_an_event_loop_and_a_closed_stream_stops(address: str, tiny: EnsembleEngine) -> None:
    async def ask() -> int:
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            stream = await client.responses.create(
                model="tiny", input=QUESTION, max_output_tokens=3000, stream=True, extra_body={"ignore_eos": True}
            )
            await anext(aiter(stream))
            running = tiny.metrics().running
            await stream.close()
            while tiny.metrics().running:
                await asyncio.sleep(0.01)
            return running

    assert asyncio.run(ask()) == 1


def test_the_sdk_parses_values_and_calls_into_pydantic(sdk: openai.OpenAI) -> None:
    tools: Any = [openai.pydantic_function_tool(Digit)]
    flat: Any = [{"type": "function", **tools[0]["function"]}]
    parsed = sdk.responses.parse(model="tiny", input=QUESTION, max_output_tokens=60, text_format=Digit)
    assert isinstance(parsed.output_parsed, Digit)
    called = sdk.responses.parse(model="tiny", input=QUESTION, max_output_tokens=90, tools=flat, tool_choice="required")
    (call,) = called.output
    assert call.type == "function_call"
    assert 0 <= json.loads(call.arguments)["a"] <= 9
    with sdk.responses.stream(model="tiny", input=QUESTION, max_output_tokens=60, text_format=Digit) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_response().output_parsed, Digit)
    assert {"response.output_text.delta", "response.output_text.done", "response.completed"} <= kinds
    with sdk.responses.stream(
        model="tiny", input=QUESTION, max_output_tokens=90, tools=flat, tool_choice="required"
    ) as stream:
        done = [event for event in stream if event.type == "response.function_call_arguments.done"]
    assert json.loads(done[0].arguments).keys() == {"a"}


def test_the_sdk_continues_with_a_tools_result(sdk: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **openai.pydantic_function_tool(Digit)["function"]}
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    first = sdk.responses.create(model="tiny", input=turns, tools=[tool], tool_choice="required", max_output_tokens=90)
    turns += [item.model_dump(exclude_none=True) for item in first.output]
    turns.append({"type": "function_call_output", "call_id": first.output[0].call_id, "output": "4"})
    second = sdk.responses.create(model="tiny", input=turns, tools=[tool], tool_choice="auto", max_output_tokens=9)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


def test_the_sdk_raises_its_own_errors(sdk: openai.OpenAI) -> None:
    create: Any = sdk.responses.create
    with pytest.raises(openai.NotFoundError, match="no model"):
        create(model="none", input=QUESTION)
    with pytest.raises(openai.BadRequestError, match="send the whole conversation as input") as raised:
        create(model="tiny", input=QUESTION, previous_response_id="resp_1")
    assert raised.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as raised:
        create(model="tiny", input="sea " * 5000)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="no response is stored"):
        sdk.responses.retrieve("resp_1")
    cut = create(model="tiny", input=QUESTION, max_output_tokens=20, extra_body=ENDLESS)
    assert cut.status == "incomplete"


# ── LangChain's ChatOpenAI ───────────────────────────────────────────────────────────────────────


def chat(address: str, **settings: Any) -> ChatOpenAI:
    reported = {"model": "tiny", "base_url": address, "api_key": "none", "use_responses_api": True, "max_tokens": 60}
    return ChatOpenAI(**{**reported, "http_async_client": unkept(), **settings})


def test_chatopenai_answers_calls_and_keeps_to_schemas(address: str) -> None:
    model = chat(address)
    whole = model.invoke(QUESTION)
    assert whole.text
    assert whole.usage_metadata is not None
    assert whole.response_metadata["model_name"] == "tiny"
    chunks = list(model.stream(QUESTION))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert asyncio.run(model.ainvoke(QUESTION)).text == whole.text
    called = model.bind_tools([Digit], tool_choice="any").invoke(QUESTION, max_tokens=90)
    assert called.tool_calls[0]["name"] == "Digit"
    total: Any = None
    for chunk in model.bind_tools([Digit], tool_choice="any").stream(QUESTION, max_tokens=90):
        total = chunk if total is None else total + chunk
    assert isinstance(total, AIMessageChunk)
    assert total.tool_calls[0]["args"] == called.tool_calls[0]["args"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a warning of langchain-openai about its parsing of values
        value = model.with_structured_output(Digit, method="json_schema").invoke(QUESTION)
        streamed = list(model.with_structured_output(Digit, method="json_schema").stream(QUESTION))
    assert isinstance(value, Digit)
    assert isinstance(streamed[-1], Digit)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # a warning of langchain-openai about its parsing of values
class TestChatOpenAI(ByTheDemo, ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _use_the_server(self, demo: httpx.Client) -> None:
        type(self).address = f"{demo.base_url}/v1"

    address = "http://127.0.0.1:9/v1"
    chat_model_class = ChatOpenAI
    model_override_value = "demo/smollm2-135m"

    @property
    def chat_model_params(self) -> dict[str, Any]:
        at = {"model": "demo", "base_url": self.address, "api_key": "none", "use_responses_api": True}
        return {**at, "http_async_client": unkept()}


# ── LlamaIndex's OpenAIResponses ─────────────────────────────────────────────────────────────────


def like(address: str, model: str, **settings: Any) -> OpenAIResponses:
    reported = {"context_window": 4096, "max_output_tokens": 32, "temperature": 0}
    at = {"model": model, "api_base": address, "api_key": "none", "async_http_client": unkept()}
    return OpenAIResponses(**{**at, **reported, **settings})


def weigh(heavy: bool) -> str:
    """Weighs a thing."""
    return str(heavy)


def test_openairesponses_completes_chats_streams_and_calls(address: str) -> None:
    llm = like(address, "tiny")
    message = [ChatMessage(QUESTION)]
    whole = llm.chat(message).message.content
    assert whole
    assert llm.complete(QUESTION).text == whole
    assert "".join(r.delta or "" for r in llm.stream_chat(message)) == whole
    assert asyncio.run(llm.achat(message)).message.content == whole
    tool = FunctionTool.from_defaults(weigh)
    options = {"tool_required": True, "max_output_tokens": 90}
    called = llm.chat_with_tools([tool], QUESTION, **options)
    (selection,) = llm.get_tool_calls_from_response(called)
    assert selection.tool_name == "weigh"
    assert selection.tool_kwargs["heavy"] in (True, False)
    *_, last = llm.stream_chat_with_tools([tool], QUESTION, **options)
    assert llm.get_tool_calls_from_response(last)[0].tool_kwargs == selection.tool_kwargs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # LlamaIndex's agents use old pydantic
async def test_openairesponses_runs_a_function_agent_as_our_own_llm_does_in_process(demo: httpx.Client) -> None:
    llm = like(f"{demo.base_url}/v1", "demo", max_output_tokens=60)
    agent = FunctionAgent(tools=[HOURS, PRICE], llm=llm, system_prompt=TASK, allow_parallel_tool_calls=False)
    history = [message for example in EXAMPLES for message in worked(*example)]
    handler = agent.run(user_msg=ASKED, chat_history=history, max_iterations=6)
    calls = [(e.tool_name, e.tool_kwargs) async for e in handler.stream_events() if isinstance(e, ToolCallResult)]
    assert calls == [("opening_hours", {"day": "Friday"}), ("ticket_price", {"visitor": "child"})]
    assert str(await handler) == ANSWER
