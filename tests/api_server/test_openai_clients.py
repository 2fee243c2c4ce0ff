"""Unmodified third-party clients: OpenAI's SDK, ChatOpenAI, OpenAILike and the chat tests of llm-comply."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from llama_index.core import Document, SummaryIndex
from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from specfuse_shared import EnsembleEngine
from tests.langchain.standard import ByTheDemo
from tests.support.agents import ANSWER, EXAMPLES, HOURS, PRICE, TASK, worked
from tests.support.agents import QUESTION as ASKED
from tests.support.serving import QUESTION, Digit, serving, unkept

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weigh",
        "description": "Weighs a thing.",
        "parameters": {
            "type": "object",
            "properties": {"grams": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["grams"],
        },
    },
}


# ── OpenAI's SDK ─────────────────────────────────────────────────────────────────────────────────


def test_the_sdk_chats_streams_and_counts(sdk: openai.OpenAI) -> None:
    reported = sdk.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=20)
    assert reported.choices[0].message.content
    assert reported.usage.total_tokens == reported.usage.prompt_tokens + reported.usage.completion_tokens
    assert reported._request_id.startswith("req-")
    stream = sdk.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == reported.choices[0].message.content
    assert chunks[-1].usage == reported.usage
    assert reported.choices[0].model_dump()["specfuse"]["segments"][0]["member"] in ("chat", "base"), (
        "what others ignore is there"
    )
    done = sdk.completions.create(model="tiny", prompt="The sea", max_tokens=5, n=2, temperature=1, seed=4)
    assert [choice.index for choice in done.choices] == [0, 1]
    assert [model.id for model in sdk.models.list()] == ["tiny", "tiny/chat", "tiny/base"]
    assert sdk.models.retrieve("tiny/chat").id == "tiny/chat"


def test_the_sdk_answers_on_an_event_loop_and_a_closed_stream_stops(address: str, tiny: EnsembleEngine) -> None:
    async def ask() -> tuple[str | None, int]:
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as sdk:
            create = sdk.chat.completions.create
            reported = await create(model="tiny", messages=QUESTION, max_tokens=8)
            long = await create(
                model="tiny", messages=QUESTION, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
            )
            await anext(aiter(long))
            running = tiny.metrics().running
            await long.close()
            while tiny.metrics().running:
                await asyncio.sleep(0.01)
            return reported.choices[0].message.content, running

    text, running = asyncio.run(ask())
    assert text
    assert running == 1


def test_the_sdk_calls_tools_and_parses_values_into_pydantic(sdk: openai.OpenAI) -> None:
    with warnings.catch_warnings():
        parsed = sdk.chat.completions.parse(model="tiny", messages=QUESTION, max_tokens=60, response_format=Digit)
        assert isinstance(parsed.choices[0].message.parsed, Digit)
        tools = [openai.pydantic_function_tool(Digit)]
        called = sdk.chat.completions.parse(
            model="tiny", messages=QUESTION, max_tokens=90, tools=tools, tool_choice="required"
        )
        (call,) = called.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Digit)
        with sdk.chat.completions.stream(
            model="tiny", messages=QUESTION, max_tokens=60, response_format=Digit
        ) as stream:
            kinds = {event.type for event in stream}
            assert {"chunk", "content.delta", "content.done"} <= kinds
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, Digit)
        with sdk.chat.completions.stream(
            model="tiny", messages=QUESTION, max_tokens=90, tools=[TOOL], tool_choice="required"
        ) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        assert 0 <= json.loads(done[0].arguments)["grams"] <= 9


def test_the_sdk_raises_its_own_errors_and_marks_a_cut_value(sdk: openai.OpenAI, tiny: EnsembleEngine) -> None:
    create: Any = sdk.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="no model"):
        create(model="none", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature") as raised:
        create(model="tiny", messages=QUESTION, temperature=-1)
    assert raised.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as raised:
        create(model="tiny", messages=[{"role": "user", "content": "sea " * 5000}])
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.InternalServerError, match="timeout"):
        create(model="tiny", messages=QUESTION, extra_body={"timeout": 1e-9})
    with (
        serving({"tiny": tiny}, key="right") as client,
        openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="wrong") as wrong_key,
        pytest.raises(openai.AuthenticationError),
    ):
        wrong_key.models.list()
    grammar = {"kind": "lark", "source": "start: /(ab|cd){2000}/"}
    cut = create(model="tiny", messages=QUESTION, max_tokens=20, extra_body={"grammar": grammar})
    assert cut.choices[0].finish_reason == "length"


# ── LangChain's ChatOpenAI ───────────────────────────────────────────────────────────────────────


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
        at = {"model": "demo", "base_url": self.address, "api_key": "none", "stream_usage": True}
        return {**at, "http_async_client": unkept()}


# ── LlamaIndex's OpenAILike ──────────────────────────────────────────────────────────────────────


def like(address: str, model: str, **settings: Any) -> OpenAILike:
    reported = {
        "is_chat_model": True,
        "is_function_calling_model": True,
        "context_window": 4096,
        "max_tokens": 32,
        "temperature": 0,
    }
    at = {"model": model, "api_base": address, "api_key": "none", "async_http_client": unkept()}
    return OpenAILike(**{**at, **reported, **settings})


def test_openailike_completes_chats_and_streams(address: str) -> None:
    llm = like(address, "tiny")
    assert llm.complete("Why is the sea salty?").text
    whole = llm.chat([ChatMessage("Why is the sea salty?")]).message.content
    assert "".join(r.delta or "" for r in llm.stream_chat([ChatMessage("Why is the sea salty?")])) == whole
    assert asyncio.run(llm.acomplete("Hi")).text == llm.complete("Hi").text


@pytest.mark.slow
def test_openailike_answers_in_a_query_engine(demo: httpx.Client) -> None:
    index = SummaryIndex.from_documents([Document(text="The observatory opens at seven in the evening.")])
    engine = index.as_query_engine(llm=like(f"{demo.base_url}/v1", "demo"), streaming=True)
    answer = engine.query("When does the observatory open?")
    assert "seven" in "".join(answer.response_gen)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # LlamaIndex's agents use old pydantic
async def test_openailike_runs_a_function_agent_as_our_own_llm_does_in_process(demo: httpx.Client) -> None:
    llm = like(f"{demo.base_url}/v1", "demo", max_tokens=60)
    agent = FunctionAgent(tools=[HOURS, PRICE], llm=llm, system_prompt=TASK, allow_parallel_tool_calls=False)
    history = [message for example in EXAMPLES for message in worked(*example)]
    handler = agent.run(user_msg=ASKED, chat_history=history, max_iterations=6)
    calls = [(e.tool_name, e.tool_kwargs) async for e in handler.stream_events() if isinstance(e, ToolCallResult)]
    assert calls == [("opening_hours", {"day": "Friday"}), ("ticket_price", {"visitor": "child"})]
    assert str(await handler) == ANSWER


# ── llm-comply ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow  # with the demo: unfinished arguments of a call are truncated and reported
def test_the_chat_tests_of_llm_comply_pass_but_the_one_with_an_image(demo_engine: EnsembleEngine) -> None:
    program = str(Path(sys.executable).with_name("llm-comply"))
    with serving({"demo": demo_engine}, max_tokens=256) as client:
        at = ["--base-url", f"{client.base_url}/v1", "--api-key", "none", "--model", "demo"]
        command = [program, "--format", "openai-chat", *at, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    by_status: dict[str, list[str]] = {}
    for result in json.loads(done.stdout)["results"]:
        by_status.setdefault(result["status"], []).append(result["id"])
    assert by_status.pop("failed") == ["chat-image-input"]
    assert by_status.pop("skipped") == ["chat-reasoning-summary"]
    assert len(by_status.pop("passed")) == 7
    assert by_status == {}
